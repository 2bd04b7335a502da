"""Measure and simulate runs.

In the order in which to read it: `ledger` counts bytes on the device and the host. `simulate` drives the real code at
full size with fake tensors (`fused_states` stands in for kernels, `scope` says what memory belongs to), `deep` does so
with few layers of a deep model, and `towers` with the vision tower of a model that reads images; `answers` answers the
planner with them. `verify` compares a `small` model of any architecture with plain transformers. Other workers, and
other programs than ours, are in papermill_runs/referee/; what only lessons need is in notebooks/.
"""
