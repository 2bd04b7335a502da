"""What the ranks of the tests have in common. One server imports it, and all ranks are forked from that (conftest.py):
it costs each of some 40 ranks seconds, and so does the garbage collector, which from here on passes over it."""

import gc
from importlib import import_module

import torch

COMMON = ["transformers.models.llama.modeling_llama", "alstlib.hf.attach", "alstlib.data.shard", "cases", "matrix"]
ENGINE = "deepspeed.runtime.zero.muon.muon_optimizer"
"""What `deepspeed.initialize` imports last, and with it PyTorch's compiler."""

# where there is a GPU, DeepSpeed asks for its properties, after which no fork of the process can use it
for name in COMMON if torch.cuda.is_available() else [*COMMON, ENGINE]:
    import_module(name)
gc.collect()
gc.freeze()
