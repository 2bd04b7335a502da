"""From documents to samples to slices: each rank gets its slice of a sample, with labels that are shifted before it is
cut.

In the order in which to read it: `formats` reads what rows of a dataset hold, `corpus` opens it, `samples` tokenizes
and packs, and counts what trains nothing; `shard` cuts a batch into slices, and `loader` (`SPDataLoader`) does so for a
whole group of ranks, which agree on what they read (`agreement`); `prefetch` continues a pass over a loader.
"""
