"""Predict what fits, how long it takes and what would help, without starting anything; without torch where a formula or
the user's cache has the answer.

In the order in which to read it: `model_shapes` reads a model's config (`hybrids` reads what layers with a state have)
and `machine` (with `gpus`, `devices`) what it is to run on; `activations` evaluates the closed forms of memory
(`moments`: forms.json, made by `alstlib.measure.calibrate`). Where there is no form, `fits` draws lines through steps
of the real code (`alstlib.measure.simulate`). `model_states` is what ZeRO holds, `step_time` the seconds (`state_ways`
those of layers with a state over ranks); `prediction` puts them together. `question` asks about a run on a machine,
`rendering` says the answer, `command` is `alst plan`, `preflight` asks about a run before it starts, `papers` about
the rows of a paper.
"""
