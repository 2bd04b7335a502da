"""Predict what fits, how long it takes and what would help, without starting anything; without torch where the step was
simulated before.

In the order in which to read it: `fits` draws lines through simulated steps of the real code (`measure.answers`) and
keeps them: of public models in fits.json; and of images the tower. `model_shapes` has a model's sizes, and `machine`
(with `gpus`, `devices`) what it is to run on; `activations` decides what a run keeps where (`streaming`) and finds the
largest moment of a step. `model_states` is what ZeRO holds, `step_time` the seconds (`state_ways` those of layers with
a state over ranks); `prediction` puts them together. `question` asks about a run on a machine and about what would do
better, `trees` about trajectories that share prefixes; `progress` shows what is looked at; `rendering` says the answer
(`tables` prints it), `command` is `alst plan`, `preflight` asks about a run before it starts; `search` finds the
longest sequence that fits by steps that really run. `widgets` predicts while a slider moves. The folder `measure` needs
torch: it simulates and verifies. What comes with the library and with its pages is written by the programs in
papermill_runs/planner/.
"""
