"""The order in which a Trainer reads its samples, and the noise that it adds to their embeddings: what it draws at
random must be alike, or must differ, on the ranks that share a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from alstlib.base.recompute import own_random
from alstlib.hf.handle import Handle


class SharedOrder(Sampler):
    """A sampler that draws the order of an epoch from a seed: the same on every rank, and again after a resume."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        with own_random(torch.device("cpu")):
            torch.default_generator.manual_seed(self.seed + self.epoch)
            return iter(list(self.sampler))


def spread_neftune(handle: Handle) -> Any:
    """NEFTune's noise (arXiv 2310.05914) for the embeddings of a slice; returns the hook's handle.

    transformers' own hook takes the slice for the whole sample, so that its noise is sqrt(sp) too large, and ranks with
    the same seed add the same noise to their slices.
    """
    ctx, tokens = handle.ctx, handle.model.get_input_embeddings()

    def add(module: Any, args: Any, out: Tensor) -> Tensor:
        if not module.training:
            return out
        length = None if handle.state is None else handle.state.inputs.sample_length
        bound = module.neftune_noise_alpha / ((length or out.shape[1] * ctx.sp) * out.shape[2]) ** 0.5
        seed = int(torch.randint(2**62, ())) + ctx.sp_rank
        g = torch.Generator(out.device).manual_seed(seed)
        return out + torch.empty_like(out).uniform_(-bound, bound, generator=g)

    return tokens.register_forward_hook(add)
