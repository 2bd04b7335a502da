"""The workers that train, and the parts that they are made of.

In the order in which to read it: `ablation` is the worker of a run (`worker` is what every worker does); `models` and
`loading` make the model, `engine` wraps it in DeepSpeed, `state` and `resume` save and continue a training, `search`
finds the longest sequence. `finetune` is the worker of a fine-tuning with TRL. `operators` builds DeepSpeed's compiled
operators, `agent` is torchrun as our runs start it.
"""

from alstlib import face

__getattr__, __all__ = face(__name__, {
    "engine": ["zero_config"],
})  # fmt: skip
