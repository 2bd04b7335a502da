"""The worker that measures what a tree of trajectories takes: `time_trees.py --config config.json --out DIR`.

Eight trajectories of `data.seq_len` tokens share four fifths of them. Their step as a tree is compared with the
trajectories one by one (`tree_step` with one trajectory each), in time, and in memory with the longest one alone and
with all of them as the rows of one batch. Beside it stands what others do: plain transformers in one process, which has
the threads of all ranks, on the tokens of the tree in one sequence under a mask (PyTorch's attention with a mask of
[tokens, tokens]: flex attention has no backward on a CPU). Work is counted in FLOPs of one forward: of weights by
token, of attention by pairs of query and key.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import alstlib
from alstlib.base.sizing import heads_of
from alstlib.hf.loading.models import load_model
from alstlib.planner.measure.ledger import Ledger
from alstlib.runs.progress import Pace
from alstlib.runs.train.worker import Job, run_worker, timed

LEAVES = 8
SHARED = 0.8
"""The part of a trajectory that all have in common."""


class Trees(Job):
    def __call__(self) -> dict[str, Any]:
        run, ctx = self.run, alstlib.SPContext.create(dist.get_world_size())
        block = run.block or run.data.seq_len // ctx.sp
        model: Any = load_model(run, self.dtype)
        model.to(self.device)
        text, length = model.config.get_text_config(), run.data.seq_len
        prefix = int(SHARED * length) // ctx.sp * ctx.sp
        g = torch.Generator().manual_seed(run.optim.seed)
        common, *own = torch.randint(1, text.vocab_size, (prefix + LEAVES * (length - prefix),), generator=g).split(
            [prefix, *[length - prefix] * LEAVES]
        )
        paths = [torch.cat([common, rest]) for rest in own]
        for i, path in enumerate(paths):
            path[prefix] = i  # no two have more in common
        data = [{"input_ids": path} for path in paths]
        rows = {"input_ids": torch.stack(paths), "labels": torch.stack(paths)}
        heads, _, dim = heads_of(text)
        weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        with Ledger(self.device, []) as ledger:
            masks = (
                self.by_mask(model, common, [path[prefix:] for path in paths], ledger) if dist.get_rank() == 0 else {}
            )
        dist.barrier()
        with alstlib.apply(model, ctx, run.options) as handle, Ledger(self.device, [handle.store]) as ledger:
            engine: Any = nn.parallel.DistributedDataParallel(model) if ctx.sp > 1 else model

            def batch() -> None:
                alstlib.causal_lm_loss(engine, alstlib.shard_batch(rows, ctx.sp, ctx.sp_rank)).loss.backward()

            ways: dict[str, Callable[[], Any]] = {
                "tree": lambda: alstlib.tree_step(engine, data, block),
                "one by one": lambda: [alstlib.tree_step(engine, [one], block) for one in data],
                "longest alone": lambda: alstlib.tree_step(engine, data[:1], block),
                "one batch": batch,
            }
            peaks: dict[str, int] = {}
            for name, way in ways.items():
                self.say(f"{name}: {LEAVES} trajectories of {length:,} tokens")
                way()  # makes gradients and buffers
                model.zero_grad(set_to_none=False)
                ledger.start()
                before = ledger.device_bytes
                way()
                peaks[name] = ledger.device_peak - before
            measured = self.measured(ledger, handle)
            ledger.close()
            seconds: dict[str, list[float]] = {name: [] for name in ("tree", "one by one")}
            pace = Pace(self.say, "timing", run.optim.steps)
            for i in range(run.optim.steps):
                for name, found in seconds.items():
                    found.append(timed(ways[name], self.device))
                pace(i + 1)
            with torch.no_grad():
                out = alstlib.tree_step(engine, data, block)
        own_rows = length - prefix
        pairs = length * (length + 1) // 2
        tree_pairs = prefix * (prefix + 1) // 2 + LEAVES * (own_rows * prefix + own_rows * (own_rows + 1) // 2)
        counted = {"tokens": (out.computed, out.tokens), "pairs": (tree_pairs, LEAVES * pairs)}
        layers = text.num_hidden_layers
        flops = [2 * weights * t + 4 * layers * heads * dim * p for t, p in zip(*counted.values())]
        median = {name: statistics.median(found) for name, found in seconds.items()}
        if masks and abs(masks["loss"] / float(out.loss) - 1) > 1e-5:
            raise RuntimeError(f"the loss by a mask is {masks['loss']}, and of the tree {float(out.loss)}")
        return {
            **measured, "seq_len": length, "tokens_per_step": out.tokens, "step_seconds": seconds["tree"],
            "trees": {
                **{name: list(pair) for name, pair in counted.items()}, "flops": flops, "seconds": median,
                "peak_bytes": peaks, "flops_ratio": flops[0] / flops[1],
                "seconds_ratio": median["tree"] / median["one by one"],
                "peak_over_longest": peaks["tree"] / peaks["longest alone"],
                "batch_over_peak": peaks["one batch"] / peaks["tree"],
                **({"masks": masks} if masks else {}),
            },
        }  # fmt: skip

    def by_mask(self, model: Any, common: Tensor, own: list[Tensor], ledger: Ledger) -> dict[str, float]:
        """Seconds of a step on the tree's tokens under a mask, in one process, its peak in bytes, and the loss."""
        prefix, rows = len(common), len(own[0])
        flat = torch.cat([common, *own])[None]
        place = torch.arange(flat.shape[1])
        leaf = (place - prefix).div(rows, rounding_mode="floor").clamp(min=-1)
        positions = torch.cat([torch.arange(prefix), (prefix + torch.arange(rows)).repeat(len(own))])[None]
        # each label's logits stand at the token before it on its path; all paths have those of the prefix
        labels = place[1:]
        before = torch.where(positions[0, 1:] == prefix, prefix - 1, labels - 1)
        weights = torch.where(labels < prefix, len(own), 1) / (len(own) * (prefix + rows - 1))

        sees = (place <= place[:, None]) & ((leaf == -1) | (leaf == leaf[:, None]))

        def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, **kwargs: Any) -> Any:
            out = scaled_dot_product_attention(q, k, v, sees, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2), None

        AttentionInterface.register("tree_mask", attention)
        model = copy.deepcopy(model)
        model.set_attn_implementation("tree_mask")
        threads = torch.get_num_threads()
        torch.set_num_threads(threads * dist.get_world_size())

        def step() -> Tensor:
            logits = model(input_ids=flat, position_ids=positions, use_cache=False).logits[0, before]
            loss = -(weights * logits.log_softmax(-1).gather(1, flat[0, 1:, None])[:, 0]).sum()
            loss.backward()
            return loss.detach()

        step()  # makes gradients and buffers
        ledger.start()
        there = ledger.device_bytes
        loss = step()
        peak = ledger.device_peak - there
        ledger.close()
        model.zero_grad(set_to_none=False)
        seconds = []
        for _ in range(self.run.optim.steps):  # not `timed`, which all ranks call
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        torch.set_num_threads(threads)
        return {"seconds": statistics.median(seconds), "peak_bytes": peak, "loss": float(loss)}


def main() -> None:
    run_worker(__doc__, Trees)


if __name__ == "__main__":
    main()
