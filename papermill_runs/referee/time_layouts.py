"""The worker that times head layouts and documents: `time_layouts.py --config FILE --out DIR`.

One job runs attention over real ranks, forward and backward, in turn: whole heads (where they divide) and split
heads (`split rows`) over the same heads, one document and several (unequal, and short) at the same number of tokens.
Work is counted in pairs of query and key, so that times can be compared at equal work.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from alstlib import SPContext
from alstlib.base.config import RunConfig
from alstlib.base.sizing import heads_of
from alstlib.hf.loading.models import model_config
from alstlib.kernels.spans import Offsets, document_spans
from alstlib.runs.progress import Pace
from alstlib.runs.train.worker import Job, run_worker, timed
from alstlib.ulysses.alltoall import whole_heads
from alstlib.ulysses.attention import UlyssesAttention
from alstlib.ulysses.head_split import area, balance

SHORT = 64
"""Tokens of a short document."""


def packings(length: int) -> dict[str, list[int]]:
    """Document offsets over a sample of `length` tokens: one document; halves of what is left; short ones."""
    halves, at = [0], 0
    while length - at >= 4 * SHORT:
        at += (length - at) // 2
        halves.append(at)
    short = [*range(0, length, SHORT), length]
    return {"one document": [0, length], "unequal documents": [*halves, length], "short documents": short}


class Costs(Job):
    """One rank of the job."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        self.ctx = SPContext.create(dist.get_world_size())
        config = model_config(run.model.name, run.model.config, run.model.trust_remote_code).get_text_config()
        self.heads, self.kv, self.dim = heads_of(config)

    def __call__(self) -> dict[str, Any]:
        run, rows = self.run, self.run.data.seq_len // self.ctx.sp
        length = rows * self.ctx.sp
        generator = torch.Generator().manual_seed(run.optim.seed + self.ctx.sp_rank)

        def make(heads: int) -> torch.Tensor:
            made = torch.randn(1, heads, rows, self.dim, generator=generator).to(self.device, self.dtype)
            return made.requires_grad_()

        tensors, dout = [make(self.heads), make(self.kv), make(self.kv)], make(self.heads).detach()
        layouts = {"split rows": True}
        if whole_heads(self.heads, self.kv, self.ctx.sp):
            layouts = {"whole heads": False, **layouts}
        made: dict[str, dict[str, Any]] = {}
        steps = {}
        for packing, found in packings(length).items():
            offsets = Offsets(found)  # they keep the plans of their sample, as those of a batch do
            pairs = self.heads * area(document_spans(offsets, 1, length, 0, length))
            for layout, split in layouts.items():
                name = f"{layout}, {packing}"
                self.say(f"{name} at {length:,} tokens")
                op = UlyssesAttention(self.ctx, run.options.attention, split_heads=split)

                def step(op: UlyssesAttention = op, offsets: Offsets = offsets) -> None:
                    out = op(*tensors, documents=offsets)
                    torch.autograd.grad(out, tensors, dout)

                step()
                step()
                even = (1.0, 1.0)  # of queries, of area
                uneven = balance(self.heads, self.kv, self.ctx.sp, length, offsets) if split else even
                made[name] = {"pairs": pairs, "wire_bytes": op.exchange.bytes_sent // 2, "documents": len(offsets) - 1,
                              "rows_max_over_mean": uneven[0], "area_max_over_mean": uneven[1],
                              "backend": op.backend_name, "step_seconds": []}  # fmt: skip
                steps[name] = step
        pace = Pace(self.say, f"timing {len(steps)} kinds", run.optim.steps)
        for i in range(run.optim.steps):
            for name, step in steps.items():
                made[name]["step_seconds"].append(timed(step, self.device))
            pace(i + 1)
        first = next(iter(made.values()))
        return {
            "seq_len": length,
            "tokens_per_step": length,
            "step_seconds": first["step_seconds"],
            "heads": [self.heads, self.kv],
            "costs": {n: {**one, "seconds": statistics.median(one["step_seconds"])} for n, one in made.items()},
        }


def main() -> None:
    run_worker(__doc__, Costs)


if __name__ == "__main__":
    main()
