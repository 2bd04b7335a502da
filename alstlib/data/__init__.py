"""From a user's batches to shards: each rank gets its slice of a sample, with labels that are shifted before it is cut.

In the order in which to read it: `shard` cuts a batch into slices, and `loader` (`SPDataLoader`) does so for a whole
group of ranks, which agree on what they read (`agreement`); `images` deals the images of a batch to ranks, and
`prefetch` continues a pass over a loader. (Reading files and tokenizing is `alstlib.runs.corpus`.)
"""
