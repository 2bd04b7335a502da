"""Layers with a state (gated delta rule, Mamba, lightning attention), over a sequence of which each rank holds a slice.

In the order in which to read it: a `rule` says what a layer does to its state; `pass_state` carries the state from
rank to rank, and `by_heads` exchanges tokens for heads as attention does, with equal results (`ways` has the rule that
chooses); `convolution` carries the few tokens before a slice. `documents` puts packed documents into calls of a kernel.
An `adapter` knows the modules of one
family in a Hugging Face model, and calls all of this with their functions; each file of `adapters` is a family, and
`attach` gives them to a model.
"""
