"""The public names of the package, which `__init__.py` imports when they are first used."""

from .base.config import ROWS as ROWS
from .base.config import RunConfig as RunConfig
from .base.mesh import SPContext as SPContext
from .base.options import Options as Options
from .data.loader import SPDataLoader as SPDataLoader
from .data.shard import shard_batch as shard_batch
from .hf.attach import apply as apply
from .hf.block_step import block_step as block_step
from .hf.causal_lm_loss import Loss as Loss
from .hf.causal_lm_loss import causal_lm_loss as causal_lm_loss
from .hf.handle import Handle as Handle
from .hf.loading.zero_config import zero_config as zero_config
from .hf.saving import save_model as save_model
from .hf.token_logps import sequence_logps as sequence_logps
from .hf.token_logps import token_logps as token_logps
from .offload.host_store import HostOutOfMemory as HostOutOfMemory
from .planner.measure.ledger import DeviceOutOfMemory as DeviceOutOfMemory
from .runs.launch import RunFailed as RunFailed
from .trainers.dpo_trainer import DPOTrainerMixin as DPOTrainerMixin
from .trainers.grpo_trainer import GRPOTrainerMixin as GRPOTrainerMixin
from .trainers.trainer import TrainerMixin as TrainerMixin
from .trees.tree_step import tree_step as tree_step

__version__: str
