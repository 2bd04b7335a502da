"""Measure, simulate and emulate runs, and make the planner's closed forms from simulated ones.

In the order in which to read it: `simulate` drives the real code at full size with fake tensors (`fused_states` stands
in for kernels), and answers the planner where it has no form; `emulate` is one rank of many on one GPU; `search` finds
the longest sequence that fits; `peers` trains side by side with the `baselines`; `time_kernels` and `time_layouts` time
attention. `verify` compares a `small` model of any architecture with plain transformers. `profiles` and `scope` say
what memory belongs to; `forms` (with `pruning`) reads closed forms off a traced step, `reference_forms` those of the
reference, and `calibrate` writes forms.json.
"""
