"""Attention over a sequence of which each rank holds a slice (Ulysses; ALST, section 3.2).

In the order in which to read it: `alltoall` exchanges slices of the sequence for heads; `attention` is the
operator, exchange, kernel and exchange back; `head_layouts` lets any number of heads lie on any number of ranks, by the
plans of `head_split`.
"""
