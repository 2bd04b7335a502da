"""Token-wise functions run tile by tile, so that intermediates do not grow with the sequence (ALST, section 3.1).

In the order in which to read it: `compute` has the operator, and the modules that stand in for an MLP or a norm;
`logits` what a head's loss needs of one tile, `loss` the cross-entropy of a language-model head without its logits, and
the log-probability of each label; `skip` and `last_product` find what a recompute need not compute.
"""
