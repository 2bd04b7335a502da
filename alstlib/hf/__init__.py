"""Attach to a Hugging Face model and detach from it. Only this folder knows transformers' internals.

In the order in which to read it: `configs` finds a model's config (`public_models` has published shapes), `models`
loads it, and `loading` brings its weights onto the ranks; `saving` writes it, and `zero_config` makes DeepSpeed's
configuration for it. `attach` (`apply`) attaches what `handle` holds (`Options`, `Handle`), with `attention`,
`layer_runner` and `routers`. `pass_state` is what runs now, and `memory_plan` what is kept for backward, and where.
`inputs` takes and checks one call; `causal_lm_loss` calls the model, `token_logps` does so for log-probabilities, and
`block_step` block by block (`block_calls`). What can be run exactly is found by `support`, `dry_run` and `logits`;
`edits` are the changes to modules that `detach` takes back; `experts` has blocks that route tokens, in tiles, and
`router_loss` their loss over a sharded sequence.
"""
