"""Saving the model that is trained, whatever engine holds its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.hf.handle import Handle


def full_weights(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole weight) of every parameter, gathered one at a time: ZeRO-3 shards, FSDP2's DTensors, or plain.

    A collective: every rank iterates. Names are those of the unattached model; a tied weight comes once.
    """
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                yield name, p.detach()
        elif hasattr(p, "full_tensor"):
            yield name, p.full_tensor().detach()
        else:
            yield name, p.detach()


Told = Callable[[float], None]
"""A function that is called with the share of a long piece of work that is done, from 0 to 1."""


def silent(_: float) -> None:
    """Report no progress."""


def save_model(handle: Handle, folder: str | Path, tokenizer: Any = None, told: Told = silent) -> None:
    """Write the model as safetensors that `from_pretrained` loads, from DDP, FSDP2 and every ZeRO stage.

    A collective: every rank calls it, rank 0 writes. The model stays attached.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    model, weights = handle.model, {}
    count = sum(1 for _ in model.parameters())
    for i, (name, tensor) in enumerate(full_weights(model)):
        told(i / count)
        if first:
            weights[name] = tensor.to("cpu", copy=True)
    if first:
        kept = model.state_dict().keys()
        weights |= {name: t.detach().to("cpu", copy=True) for name, t in model.named_buffers() if name in kept}
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
