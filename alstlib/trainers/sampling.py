"""The order in which a Trainer reads its samples, and the noise that it adds to their embeddings: what it draws at
random must be alike, or must differ, on the ranks that share a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from alstlib.hf.handle import Handle
from alstlib.mesh import SPContext


class SharedOrder(Sampler):
    """A sampler whose order every rank gets as rank 0 draws it, where the plain Trainer draws it.

    A checkpoint has the state of PyTorch's random numbers at the beginning of the epoch, so that an epoch goes on in
    the same order (`save`, `resume`).
    """

    FILE = "order_rng_state.pth"

    def __init__(self, sampler: Any, ctx: SPContext) -> None:
        self.sampler, self.ctx = sampler, ctx
        self.state: Tensor | None = None
        self.resumed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        if self.resumed is not None:
            torch.set_rng_state(self.resumed)
        self.state, self.resumed = torch.get_rng_state(), None
        order = torch.tensor(list(self.sampler), device=self.ctx.wire)
        if self.ctx.world_size > 1:
            dist.broadcast(order, group_src=0, group=self.ctx.world_group)
        return iter(order.tolist())

    def save(self, folder: str) -> None:
        torch.save(self.state, Path(folder) / self.FILE)

    def resume(self, folder: str) -> None:
        """The next order is the one in which the epoch of this checkpoint began. The Trainer itself sets the random
        numbers of the checkpoint after it has read the first step."""
        if (path := Path(folder) / self.FILE).is_file():  # not in checkpoints of the plain Trainer
            self.resumed = torch.load(path, weights_only=True)


def spread_neftune(handle: Handle) -> Any:
    """NEFTune's noise (arXiv 2310.05914) for the embeddings of a slice; returns the hook's handle.

    transformers' own hook takes the slice for the whole sample, so that its noise is sqrt(sp) too large, and ranks with
    the same seed add the same noise to their slices.
    """
    ctx, tokens = handle.ctx, handle.model.get_input_embeddings()

    def add(module: Any, args: Any, out: Tensor) -> Tensor:
        if not module.training:
            return out
        length = None if handle.state is None else handle.state.inputs.row_length
        bound = module.neftune_noise_alpha / ((length or out.shape[1] * ctx.sp) * out.shape[2]) ** 0.5
        seed = int(torch.randint(2**62, ())) + ctx.sp_rank
        g = torch.Generator(out.device).manual_seed(seed)
        return out + torch.empty_like(out).uniform_(-bound, bound, generator=g)

    return tokens.register_forward_hook(add)
