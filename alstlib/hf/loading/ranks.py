"""Loading a model onto the ranks: rank 0 reads the weights, and the other ranks get them one tensor at a time.

So the hosts hold one copy of the weights for all ranks. Under ZeRO-3 a device never holds more of them than its part
and one whole tensor: a model may be larger than a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from alstlib.base.config import RunConfig
from alstlib.base.mesh import SPContext, accelerator, from_all
from alstlib.base.options import Json
from alstlib.data.agreement import Agreement
from alstlib.hf.loading.models import has_random_weights, load_model


class UnplacedModel(nn.Module):
    """A model whose weights are still to arrive: its parameters have their shapes, dtypes and device, but no memory.

    Made by `load_on_first`; `alstlib.apply` takes the model, and `place` brings the weights.
    """

    def __init__(self, model: PreTrainedModel, waiting: dict[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a child
        self.named = list(model.named_parameters())
        self.waiting, self.device, self.first = waiting, device, dist.get_rank() == 0

    model: Any

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Each parameter in turn: with its weight on rank 0, with room for it elsewhere. Send it before the next."""
        for name, p in self.named:
            if self.first:
                p.data = self.waiting.pop(name)
            else:  # no other name keeps it
                p.data = torch.empty(p.shape, dtype=p.dtype, device=self.device)
            yield p


def _whole(run: RunConfig, dtype: torch.dtype, device: torch.device, images: bool) -> PreTrainedModel:
    """The run's model on the host. Random weights are drawn on the device where they fit: 1.5B of them take 12 s on a
    host, in one thread."""
    if has_random_weights(run) and (here := accelerator(device)) is not None:
        with contextlib.suppress(torch.OutOfMemoryError):
            with device:
                model = load_model(run, dtype, images=images)
            model.cpu()
            here.empty_cache()
            return model
        here.empty_cache()
    return load_model(run, dtype, images=images)


def load_on_first(
    run: RunConfig, dtype: torch.dtype, device: torch.device, *, images: bool = False
) -> UnplacedModel:  # fmt: skip
    """The run's model on every rank, with its weights on rank 0's host only. A collective.

    Args:
        images: whether it is to read images.

    Raises:
        Exception: what a rank met while it loaded, on every rank; elsewhere it is a RuntimeError, or a ValueError too.
    """
    first = dist.get_rank() == 0
    with Agreement(SPContext.create(), "load_on_first", {}, waits=True):
        if first:
            model = _whole(run, dtype, device, images)
        else:
            with torch.device("meta"):
                model = load_model(run.replace(model={"random_weights": True}), dtype, images=images)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    told = {name: [list(t.shape), str(t.dtype).partition(".")[2]] for name, t in tensors}
    waiting = {name: p.data for name, p in model.named_parameters()} if first else {}
    _hollow(model, from_all(told)[0], device)
    return UnplacedModel(model, waiting, device)


def _hollow(model: nn.Module, tensors: Json, device: torch.device) -> None:
    """Put parameters and buffers on the device, with rank 0's dtypes: buffers with its values, parameters without
    memory. A tensor that has several names stays one."""
    made: dict[int, Tensor] = {}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        parent, _, leaf = name.rpartition(".")
        owner, weight = model.get_submodule(parent), isinstance(t, nn.Parameter)
        held: dict[str, Any] = owner._parameters if weight else owner._buffers
        if id(t) not in made:
            shape, dtype = tensors[name][0], getattr(torch, tensors[name][1])
            if weight:
                hollow = torch.empty(1, dtype=dtype, device=device).expand(shape)
                made[id(t)] = nn.Parameter(hollow, requires_grad=t.requires_grad)
                made[id(t)].__dict__.update(t.__dict__)
            else:
                value = torch.empty(shape, dtype=dtype, device=device) if t.is_meta else t.to(device)
                made[id(t)] = value.detach().contiguous()
                _send(made[id(t)])
        held[leaf] = made[id(t)]


def _send(t: Tensor) -> None:
    """Rank 0's values, on every rank."""
    if t.numel():
        dist.broadcast(t.view(-1).view(torch.uint8), 0)


def place(unplaced: UnplacedModel, config: Json) -> None:
    """Bring the weights to where an engine of this DeepSpeed configuration wants them: under ZeRO-3 in parts."""
    if config["zero_optimization"]["stage"] == 3:
        import deepspeed

        deepspeed.zero.Init(module=unplaced, config_dict_or_path=config)
        return
    for p in unplaced.parameters():
        p.data = p.data.to(unplaced.device).contiguous()
        _send(p.data)
