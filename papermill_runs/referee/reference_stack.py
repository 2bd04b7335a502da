"""The programs that the ALST paper ran, simulated: `simulate` for other people's code.

Its own code runs wherever it can without a GPU: transformers' models, loss and layers' checkpoints, PyTorch's reentrant
`CheckpointFunction`, and DeepSpeed's `UlyssesSPAttentionHF` and `TiledMLP`. Kernels cannot, so functions with the same
allocations, in the same order, stand in for them, read off the sources of the paper's time (each names its own).

What the paper switched on with its fused loss were all of Liger's Llama features, but SwiGLU not with a tiled MLP; its
baseline has none of them. Gradients of weights are dropped as DeepSpeed takes them: those of a tiled MLP after its last
tile.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from baselines import _checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AutoModelForCausalLM

from alstlib.base.config import RunConfig
from alstlib.base.sizing import TileRule
from alstlib.hf.loading.models import model_config
from alstlib.planner.measure.deep import Deep
from alstlib.planner.measure.scope import CHECKPOINTS, EXCHANGE, Places
from alstlib.planner.measure.simulate import Recording, Simulated, fake_ranks, moments_of, shard_of
from alstlib.runs.train import operators

FLASH = "reference"


class _Flash(Function):
    """flash-attn 2: `FlashAttnFunc`, and `mha_bwd` of csrc/flash_attn/flash_api.cpp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty([q.shape[0], q.shape[2], q.shape[1]], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        workspace = [torch.empty_like(lse), q.new_empty(q.shape, dtype=torch.float32)]
        if k.shape[2] != q.shape[2]:
            workspace += [q.new_empty(q.shape), q.new_empty(q.shape)]
        return dq, dk, dv


def _flash(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """transformers' `flash_attention_forward`: heads after tokens, and grouped queries as they are."""
    return _Flash.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), None


class _Norm(Function):
    """Liger's `LigerRMSNormFunction`: backward in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        y, rstd = torch.empty_like(rows), x.new_empty(len(rows), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        dy = dy.contiguous()
        return dy.view(-1, dy.shape[-1]).view(dy.shape), torch.empty_like(ctx.saved_tensors[1])


def _rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """In place, once the tokens come before the heads in memory."""
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    return q.transpose(1, 2), k.transpose(1, 2)


class _Rope(Function):
    """Liger's `LigerRopeFunction`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _rotate(q, k)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(dq, dk), None, None


class _SwiGLU(Function):
    """Liger's `LigerSiLUMulFunction`: gradients over what was saved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return a.view(dc.shape), b.view(dc.shape)


def _tile(rows: int, width: int, vocabulary: int) -> int:
    """Tokens of one tile of Liger's fused loss: a power of two that makes a chunk of logits about as large as the
    hidden states."""
    chunks = -(-vocabulary // width)
    return min(rows, 1 << (-(-rows // chunks) - 1).bit_length())


class _ReferenceLoss(Function):
    """Liger's `fused_linear_cross_entropy_forward` before 0.6.2, which sums the weight's gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        dw, dx = torch.zeros_like(weight), torch.zeros_like(x)
        losses = x.new_zeros(len(x), dtype=torch.float32)
        tile = _tile(len(x), x.shape[1], len(weight))
        for rows, into in zip(x.split(tile), dx.split(tile)):
            logits = rows @ weight.t()  # and their gradient, in place
            into[:] = logits @ weight
            torch.addmm(dw, logits.t(), rows, out=dw)
        ctx.save_for_backward(dx.detach(), dw.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        dx, dw = ctx.saved_tensors
        return dx, dw


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    return _Norm.apply(x, norm.weight)


def _swiglu_forward(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(_SwiGLU.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def _tiled_forward(mlp: Any, x: Tensor) -> Tensor:
    """ArcticTraining's `tiled_mlp_forward_common`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward(mlp: Any, part: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(part)) * mlp.up_proj(part))

    tiles = math.ceil(x.shape[1] / x.shape[2])
    return TiledMLP.apply(forward, mlp, x, tiles, [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight])


@contextlib.contextmanager
def _kernels(model: Any, run: RunConfig) -> Iterator[None]:
    """With the stand-ins of Liger's kernels, and the tiled MLP, in a model."""
    tiled, fused = run.options.tile("mlp"), run.options.tile("loss")
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and fused:
            module.forward = MethodType(_norm_forward, module)
        if kind.endswith("MLP") and (tiled or fused):
            module.forward = MethodType(_tiled_forward if tiled else _swiglu_forward, module)
    rope = f"{type(model).__module__}.apply_rotary_pos_emb"
    with mock.patch(rope, _Rope.apply) if fused else contextlib.nullcontext():
        yield


def _ulysses(model: Any) -> Any:
    """DeepSpeed's attention over the (fake) ranks, as `register_with_transformers` makes it, which works but once."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    operators.leave_out()
    comm.cdb = None  # of an earlier group
    deepspeed.init_distributed(dist_init_required=False)
    config = model.config
    return UlyssesSPAttentionHF(
        attn=_flash, batch_size=1, attn_head_count=config.num_attention_heads, attn_head_size=config.head_dim,
        kv_head_count=config.num_key_value_heads, num_hidden_layers=config.num_hidden_layers,
        process_group=dist.group.WORLD, seq_length_is_variable=True,
    )  # fmt: skip


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what DeepSpeed, and a linker that it starts, say of the machine when it is imported."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _keep(layer: Any, ledger: Any, offload: bool) -> None:
    """Say where a layer's checkpoint waits. On the host as with ArcticTraining's `CheckpointFunctionWithCPUOffload`:
    nothing of it stays on the device, and backward makes it anew there."""
    checkpoint = layer._gradient_checkpointing_func

    def keep(function: Any, x: Tensor, *rest: Any) -> Any:
        if not offload:
            ledger.move(x, f"<{CHECKPOINTS}>")
            return checkpoint(function, x, *rest)
        with saved_tensors_hooks(lambda t: (t.shape, t.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1])):
            return checkpoint(function, x, *rest)

    layer._gradient_checkpointing_func = keep


def _take(p: Any) -> None:
    """DeepSpeed takes each gradient when it arrives, except those of tiles before the last (`ds_grad_is_ready`)."""
    if getattr(p, "ds_grad_is_ready", True):
        p.grad = None


def _loss(model: Any, fused: bool, ids: Tensor, at: Tensor) -> Tensor:
    """transformers' `ForCausalLM.forward` with its `ForCausalLMLoss`, or Liger's `lce_forward`."""
    if not fused:
        return model(input_ids=ids, position_ids=at, labels=ids, shift_labels=ids, use_cache=False).loss
    hidden = model.model(input_ids=ids, position_ids=at, use_cache=False).last_hidden_state
    return _ReferenceLoss.apply(hidden.view(-1, hidden.shape[-1]), model.lm_head.weight)


class ReferenceStack(Deep):
    """A model under the reference, in bf16 and with checkpoints, and with a tiled MLP, a fused loss and checkpoints on
    the host as the run's options say."""

    def whole(self) -> Any:
        AttentionInterface.register(FLASH, _flash)
        config = model_config(self.run.model.name, self.run.model.config, shape_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=FLASH).train()

    def run_step(self, model: Any, run: RunConfig, tiles: TileRule | None) -> Simulated:
        AttentionInterface.register(FLASH, _flash)
        with fake_ranks(self.ranks) as ctx, _kernels(model, run), FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(_take)
            _checkpoint(model)
            shard = shard_of(ctx, run.data.seq_len // ctx.sp)
            with Places(model) as places, Recording(place=places.now) as ledger:
                start = ledger.device_bytes
                if self.ranks > 1:
                    with _silent():
                        ulysses = _ulysses(model)
                    AttentionInterface.register(FLASH, lambda *args, **kwargs: ulysses(*args, **kwargs))
                    places.wrap(ulysses, "_combine_local_sequences", EXCHANGE)
                    places.wrap(ulysses, "_partition_global_sequence", EXCHANGE)
                for layer in model.model.layers:
                    _keep(layer, ledger, bool(run.options.offload))
                fused = bool(run.options.tile("loss"))
                _loss(model, fused, shard["input_ids"], shard["position_ids"]).backward()
            return Simulated(moments_of(ledger, start))

    def lengths(self, rows: int) -> tuple[Sequence[int], int, int]:
        """Between two of Liger's tiles, which double with the rows; of an MLP's tiles, all whole."""
        vocab, width = self.model.get_input_embeddings().weight.shape
        tile = _tile(rows, width, vocab)
        longest = tile * -(-vocab // width)
        if rows <= width:
            return (rows,), rows, rows
        low, whole = max(width + 1, longest // 2 + 1), max(tile, width)
        first = -(-low // whole) * whole
        return (first, first + whole), low, longest
