"""Measure, simulate and emulate runs.

In the order in which to read it: `simulate` drives the real code at full size with fake tensors (`fused_states` stands
in for kernels, `scope` says what memory belongs to), `deep` does so with few layers of a deep model, `reference_stack`
does so with the programs of the ALST paper; `answers` answers the planner with them. `emulate` is one rank of many on
one GPU; `search` finds the longest sequence that fits; `peers` trains side by side with the `baselines`; `time_kernels`
and `time_layouts` time attention. `verify` compares a `small` model of any architecture with plain transformers.
`profiles` says what memory belongs to on a GPU.
"""
