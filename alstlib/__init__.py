"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

These are the public names. Each is imported when it is first used, so that `import alstlib` takes no time. Editors and
type checkers read the imports under `TYPE_CHECKING`; a test compares them with the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # "as" says that a name is public
    from alstlib.config import ROWS as ROWS
    from alstlib.config import RunConfig as RunConfig
    from alstlib.data.loader import SPDataLoader as SPDataLoader
    from alstlib.data.shard import shard_batch as shard_batch
    from alstlib.hf.attach import apply as apply
    from alstlib.hf.block_step import block_step as block_step
    from alstlib.hf.causal_lm_loss import Loss as Loss
    from alstlib.hf.causal_lm_loss import causal_lm_loss as causal_lm_loss
    from alstlib.hf.handle import Handle as Handle
    from alstlib.hf.saving import save_model as save_model
    from alstlib.hf.token_logps import sequence_logps as sequence_logps
    from alstlib.hf.token_logps import token_logps as token_logps
    from alstlib.hf.zero_config import zero_config as zero_config
    from alstlib.measure.ledger import DeviceOutOfMemory as DeviceOutOfMemory
    from alstlib.mesh import SPContext as SPContext
    from alstlib.offload.host_store import HostOutOfMemory as HostOutOfMemory
    from alstlib.options import Options as Options
    from alstlib.runs.launch import RunFailed as RunFailed
    from alstlib.trainers.dpo_trainer import DPOTrainerMixin as DPOTrainerMixin
    from alstlib.trainers.trainer import TrainerMixin as TrainerMixin
else:
    _MODULE_OF = {
        "ROWS": "config",
        "RunConfig": "config",
        "SPDataLoader": "data.loader",
        "shard_batch": "data.shard",
        "apply": "hf.attach",
        "block_step": "hf.block_step",
        "Loss": "hf.causal_lm_loss",
        "causal_lm_loss": "hf.causal_lm_loss",
        "Handle": "hf.handle",
        "save_model": "hf.saving",
        "sequence_logps": "hf.token_logps",
        "token_logps": "hf.token_logps",
        "zero_config": "hf.zero_config",
        "DeviceOutOfMemory": "measure.ledger",
        "SPContext": "mesh",
        "HostOutOfMemory": "offload.host_store",
        "Options": "options",
        "RunFailed": "runs.launch",
        "DPOTrainerMixin": "trainers.dpo_trainer",
        "TrainerMixin": "trainers.trainer",
    }
    __all__ = sorted(_MODULE_OF)

    def __getattr__(name):
        import importlib

        if name not in _MODULE_OF:
            raise AttributeError(f"module 'alstlib' has no attribute '{name}'")
        return getattr(importlib.import_module(f"alstlib.{_MODULE_OF[name]}"), name)

    def __dir__():
        return __all__
