"""The workers that train, and the parts that they are made of.

In the order in which to read it: `ablation` is the worker of a run (`worker` is what every worker does); `engine` wraps
the model in DeepSpeed, `state` and `resume` save and continue a training. `finetune` is the worker of a fine-tuning
with TRL, and `machine_rates` that of `alst check`. `agent` is torchrun as our runs start it.
"""
