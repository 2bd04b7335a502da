"""Attach to a Hugging Face model and detach from it. Only this folder knows transformers' internals.

In the order in which to read it: `attach` (`apply`) attaches what `handle` holds and `detach` takes back, with
`attention` and `layer_runner`; `saving` writes the model. `pass_state` is what runs now, and `memory_plan` what is kept
for backward, and where. `inputs` reads and checks what a call is given, and has the ranks agree on it; `causal_lm_loss`
calls the model, and `token_logps` does so for log-probabilities, and `block_step` block by block. What can be run
exactly is found by `support` and `dry_run`; `experts` has MoE layers in tiles, and `router_loss` their loss over a
sharded sequence. `loading` has a model before that; the rest needs none of it.
"""
