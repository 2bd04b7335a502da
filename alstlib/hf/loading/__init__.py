"""A model before it is attached: its config, its sizes, its weights on the ranks, and its engine's configuration. The
core does not need it: a model that you have loaded takes its place.

In the order in which to read it: `configs` finds a model's config without torch (`public_models` has published shapes),
`models` loads the model and counts its FLOPs, `ranks` brings its weights onto the ranks, and `zero_config` makes
DeepSpeed's configuration for it.
"""
