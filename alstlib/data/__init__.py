"""From documents to samples to slices: each rank gets its slice of a sample, with labels that are shifted before it is
cut.

In the order in which to read it: `formats` reads what rows of a dataset hold, `corpus` opens it, `account` counts
what trains nothing, `samples` tokenizes and packs; `shard` cuts a batch into slices, and `loader` (`SPDataLoader`)
does so for a whole group of ranks, with what `prefetch` reads ahead.
"""
