"""What the ranks of the tests have in common. One server imports it, and all ranks are forked from that (conftest.py):
it costs each of some 40 ranks seconds, and so does the garbage collector, which from here on passes over it."""

import gc
import os
from importlib import import_module

import transformers

COMMON = ["transformers.models.llama.modeling_llama", "alstlib.hf.attach", "alstlib.data.shard", "cases", "matrix"]
for name in COMMON:
    import_module(name)
if os.environ["DS_ACCELERATOR"] == "cpu":  # to ask a GPU for anything would keep all forks from using it
    import_module("alstlib.runs.train.operators").leave_out()
    import_module("deepspeed.runtime.zero.stage3")
    for config, _ in import_module("matrix").ALL_MODELS.values():  # half a second of each rank that runs the net
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[getattr(transformers, config)]
gc.collect()
gc.freeze()
