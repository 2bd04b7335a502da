"""The training programs that `peers` compares (ours, the reference's, plain transformers), each an object with the same
methods.

The reference is DeepSpeed's ALST stack put together as its tutorial and ArcticTraining do: Ulysses attention registered
with transformers, its tiled MLP with sequence / width tiles, its fused logits and loss, transformers' checkpointing,
and the loss gathered over the ranks. Its loss has two rules for the tiles: `deepspeed` takes ArcticTraining's, 1 GiB of
logits (one tile at the lengths of a CPU), `deepspeed, loss tiles` takes as many as its MLP. DeepSpeed replaces
transformers' attention function for the whole process, so a process that builds it holds no other stack.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.options import check_names
from alstlib.data.shard import WHOLE, shard_batch
from alstlib.hf.loading.ranks import UnplacedModel, load_on_first, place
from alstlib.offload.host_store import HostStore
from alstlib.runs.train import operators
from alstlib.runs.train.engine import initialize

OURS: dict[str, dict[str, Any]] = {
    "ours": {"save_attention": True},
    "ours+chunk": {"save_attention": True, "chunk": True},
    "ours+offload": {"save_attention": "auto", "offload": True},
    "ours+chunk+offload": {"save_attention": "auto", "offload": True, "chunk": True},
    "ours, attention twice": {"save_attention": False},
}
"""Options of our variants; everything else is on. `chunk: True` takes the run's chunk."""
LOSS_TILES: dict[str, Callable[[int, int, int], int]] = {
    "deepspeed": lambda rows, width, vocabulary: math.ceil(rows * vocabulary * 4 / 2**30),
    "deepspeed, loss tiles": lambda rows, width, vocabulary: math.ceil(rows / width),
}
"""Tiles of the reference's loss: ArcticTraining's rule, 1 GiB of fp32 logits in a tile, or the rule of its MLP."""
STACKS = (*OURS, "readme", *LOSS_TILES, "transformers")


def check_stacks(run: RunConfig) -> None:
    """Raise ValueError for stacks in `peers` that do not exist or lack a setting."""
    if not run.peers:
        raise ValueError("peers names no stack to compare, such as [ours, deepspeed, transformers]")
    check_names(dict.fromkeys(run.peers), STACKS, "stack in peers")
    for name in run.peers:
        if OURS.get(name, {}).get("chunk") and run.options.chunk is None:
            raise ValueError(f"peers names '{name}': set chunk, the tokens of a chunk")


class Stack:
    """One model with its engine. `sequences` samples of the sequence length make a step."""

    def __init__(self, name: str, run: RunConfig, device: torch.device, bf16: bool) -> None:
        self.name, self.run, self.device = name, run, device
        self.ctx = alstlib.SPContext.create(dist.get_world_size())
        self.sequences = 1
        self.stores: list[HostStore] = []
        self.notes: list[str] = []
        operators.leave_out()  # some stacks reach for them before our `initialize` does
        unplaced = load_on_first(run, torch.bfloat16 if bf16 else torch.float32, device)
        model, config = unplaced.model, None
        if name in OURS:
            self.loss = self._ours(model, OURS[name])
        elif name == "readme":
            self.loss = self._printed(model)
            config = alstlib.zero_config(model, learning_rate=run.optim.learning_rate)
        elif name in LOSS_TILES:
            self.loss = self._deepspeed(model, LOSS_TILES[name])
        else:
            self.loss = self._plain(model)
        self.model = model
        self.engine: Any = _own_engine(unplaced, config) if config else initialize(run, model, bf16, unplaced=unplaced)

    def step(self, sample: Mapping[str, Tensor], update: bool = True) -> float:
        """One optimizer step on a whole sample [1, S] that every rank has; returns the loss."""
        loss, log = self.loss(sample)
        self.engine.backward(loss)
        if update:
            self.engine.step()
        return float(log)

    def host_bytes(self) -> int:
        """Peak bytes that this stack keeps on the host."""
        return sum(store.peak_nbytes for store in self.stores)

    def _ours(self, model: Any, options: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        chunk = self.run.options.chunk if options.get("chunk") else None
        given = alstlib.Options(**{"attention": self.run.options.attention, **options, "chunk": chunk})
        handle = alstlib.apply(model, self.ctx, given)
        self.stores = [handle.store]
        self.notes = handle.notes

        def loss(sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            shard: dict[str, Any] = shard_batch(sample, self.ctx.sp, self.ctx.sp_rank)
            shard = {n: t.to(self.device) if n not in WHOLE else t for n, t in shard.items()}
            out = alstlib.causal_lm_loss(self.engine, shard)
            return out.loss, out.mean

        return loss

    def _printed(self, model: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """The loop of notebooks/training.md, with its options, configuration and loader (a new one each step)."""
        handle = alstlib.apply(model, self.ctx, alstlib.Options(offload=True))
        self.stores = [handle.store]
        self.notes = handle.notes

        def loss(sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            batch = next(iter(alstlib.SPDataLoader([sample], self.ctx, device=self.device)))
            out = alstlib.causal_lm_loss(self.engine, batch)
            return out.loss, out.mean

        return loss

    def _deepspeed(self, model: Any, tiles_of: Callable[[int, int, int], int]) -> Callable[..., tuple[Tensor, Tensor]]:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, UlyssesSPAttentionHF

        model.set_attn_implementation("sdpa")
        deepspeed.init_distributed(dist_init_required=False)  # its registration wants its own wrapper to be there
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=self.ctx.sp,
            micro_batch_size=1, seq_length_is_variable=True,
        )  # fmt: skip
        _checkpoint(model)
        for layer in model.model.layers:
            layer.mlp.forward = MethodType(_reference_mlp, layer.mlp)
        vocabulary = model.config.vocab_size

        def tile_loss(causal_lm: Any, x: Tensor, y: Tensor) -> Tensor:
            logits = causal_lm.lm_head(x).float()
            return nn.functional.cross_entropy(logits.view(-1, vocabulary), y.view(-1))

        def loss(sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            shard: dict[str, Any] = shard_batch(sample, self.ctx.sp, self.ctx.sp_rank)
            ids, positions, labels = (shard[n].to(self.device) for n in ("input_ids", "position_ids", "shift_labels"))
            hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            tiles = tiles_of(labels.numel(), hidden.shape[-1], vocabulary)
            head = [model.lm_head.weight]
            loss = TiledFusedLogitsLoss.apply(tile_loss, model, hidden, labels, None, tiles, head, "mean")
            valid = (labels != -100).sum()
            gather_with_gradient = torch.distributed.nn.functional.all_gather
            losses, valids = gather_with_gradient(loss), gather_with_gradient(valid)
            mean = sum(one * n for one, n in zip(losses, valids)) / sum(valids)
            return mean, mean.detach()

        return loss

    def _plain(self, model: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """Data parallel: every rank has a sample of its own (here the same one), so that a step is `world` samples."""
        self.sequences = dist.get_world_size()
        model.set_attn_implementation("sdpa")
        _checkpoint(model)

        def loss(sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            ids = sample["input_ids"].to(self.device)
            out = self.engine(input_ids=ids, labels=sample["labels"].to(self.device), use_cache=False)
            return out.loss, out.loss.detach()

        return loss


def _own_engine(unplaced: UnplacedModel, config: dict[str, Any]) -> Any:
    import deepspeed

    place(unplaced, config)
    return deepspeed.initialize(model=unplaced.model, config=config)[0]


def _checkpoint(model: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # renamed in 5.23, and not there in 5.17
        model.gradient_checkpointing_enable({"use_reentrant": True})


def _reference_mlp(mlp: Any, x: Tensor) -> Tensor:
    """The tutorial's forward of an MLP: sequence / width tiles, agreed by all ranks."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    tiles = torch.tensor(math.ceil(x.shape[1] / x.shape[2]), device=x.device)
    dist.all_reduce(tiles, op=dist.ReduceOp.MAX)

    def forward(module: Any, part: Tensor) -> Tensor:
        return module.down_proj(module.act_fn(module.gate_proj(part)) * module.up_proj(part))

    weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
    return TiledMLP.apply(forward, mlp, x, int(tiles), weights)
