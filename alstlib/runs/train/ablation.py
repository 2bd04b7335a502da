"""The worker of a run, started by torchrun: `python -m alstlib.runs.train.ablation --config FILE --out DIR`. It writes
result.json.

A run trains: real text, real optimizer steps, finite losses. With `search`, it first finds the longest sequence whose
peak stays within the device budget (`search.py`), and then trains at that length.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

import alstlib
from alstlib.base.config import RunConfig, Search
from alstlib.base.mesh import accelerator, from_all
from alstlib.contrib.sparse import Sparse, select_pages
from alstlib.hf.loading import models
from alstlib.hf.loading.models import flop_dimensions, put_liger
from alstlib.hf.loading.ranks import load_on_first
from alstlib.hf.saving import save_model
from alstlib.planner.measure.ledger import Ledger, ran_out
from alstlib.planner.search import Trials, longest_that_fits
from alstlib.runs.corpus.samples import Samples, collate, make_samples
from alstlib.runs.progress import Pace, Progress, ProgressReader
from alstlib.runs.results import Json
from alstlib.runs.train.engine import host_tensors, initialize, take_step
from alstlib.runs.train.resume import of_first
from alstlib.runs.train.state import RunStates
from alstlib.runs.train.worker import Training, run_worker
from alstlib.runs.workers import ABLATION

WATCHED = 2
"""Steps whose memory is watched: from the second on ZeRO-3 gathers weights ahead."""
WATCHED_TIME = (
    "the time is that of a step whose memory was watched, which takes longer; use more steps for a better time"
)

NO_STEP = "no step was left to do: the time is that of the last step of the earlier run, and the memory that of loading"


class SampleOrder(Sampler[int]):
    """Samples in their own order, of which each of the replicas takes every n-th. Any other number of replicas can go
    on where all have `seen` so many."""

    def __init__(self, samples: Samples, replicas: int, rank: int) -> None:
        self.samples, self.replicas, self.rank, self.seen = samples, replicas, rank, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.seen + self.rank, len(self.samples), self.replicas))

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seen = state["seen"]


class AblationRun(Training):
    """One rank of a run: model, engine, data and ledger."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        self.say(f"loading {run.model.name}")
        self.ctx = alstlib.SPContext.create(run.engine.sp)
        unplaced = load_on_first(run, self.dtype, self.device)
        model = unplaced.model
        self.flops = flop_dimensions(model)
        put_liger(run, model, self.gpu)
        self.handle = alstlib.apply(model, self.ctx, run.options)
        if run.contrib.sparse is not None:
            select_pages(self.handle, Sparse(**run.contrib.sparse))
        torch.manual_seed(run.optim.seed + 1 + self.rank)  # dropout masks differ between shards
        self.engine = initialize(self.with_files(), model, self.bf16, self.say, unplaced)
        budget = run.limits.device_memory
        if budget is None and self.gpu and run.search:
            # a margin for what the allocator does not count: context, communication buffers, fragments
            budget = int(0.93 * accelerator(self.device).get_device_properties(self.device).total_memory)
        self.budget = budget
        """Bytes of a rank's device that decide what fits. They are enforced where nothing is searched for."""
        self.ledger = Ledger(self.device, [self.handle.store], None if run.search else budget)
        self.known = Trials(of_first(ProgressReader(self.progress.path).read() if run.search else []))

    def _collate(self, samples: Any) -> Json:
        batch = collate(samples)
        self.check_tokens(int(batch["input_ids"].max()))
        return batch

    def loader(self, seq_len: int, steps: int) -> Any:
        """Batches of `steps` optimizer steps: every rank has its own samples, as under a distributed sampler."""
        run, sp = self.run, self.ctx.sp
        samples = steps * run.optim.accumulation * self.ctx.dp * run.data.batch_size
        self.samples = make_samples(
            self.corpus, self.tokenizer, seq_len, packed=run.data.packed, seed=run.optim.seed, limit=samples,
            pace=lambda tokens: Pace(self.say, f"tokenizing {tokens:,} tokens", tokens),
        )  # fmt: skip
        if run.optim.accumulation % sp:
            sp = 1  # the ranks of a group cannot take turns within a step: they share one stream of samples
        replicas = self.ctx.dp * sp
        place = self.ctx.rank if sp > 1 else self.ctx.dp_rank
        order = self.order = SampleOrder(self.samples, replicas, place)
        batches = DataLoader(self.samples, batch_size=run.data.batch_size, sampler=order, collate_fn=self._collate)
        return alstlib.SPDataLoader(
            batches, self.ctx, run.optim.accumulation, replicated=sp == 1 and self.ctx.sp > 1, device=self.device
        )

    def steps(self, seq_len: int, loader: Any, numbers: range, event: str = "trial") -> Iterator[Json]:
        """Train these optimizer steps at this length; yields loss, seconds, valid tokens and wire bytes of each."""
        run, batches, took = self.run, iter(loader), []
        for step in numbers:
            began, wire, losses, finite = time.perf_counter(), self.handle.wire_bytes, [], True
            for batch in itertools.islice(batches, run.optim.accumulation):
                if run.block is None:
                    out = alstlib.causal_lm_loss(self.engine, batch)
                    self.engine.backward(out.loss)
                else:
                    out = alstlib.block_step(self.engine, batch, run.block)
                losses.append(out.mean * out.tokens)
                finite = take_step(self.engine)
            if len(losses) < run.optim.accumulation:
                raise ValueError(f"the data ended after {step - 1} of {numbers[-1]} optimizer steps")
            tokens = int(batch["step_tokens"])
            loss = float(sum(losses)) / max(1, tokens)  # waits for the device: the step's end
            if not finite or not math.isfinite(loss):
                wrong = "gradients are not finite" if math.isfinite(loss) else f"loss is {loss}"
                raise FloatingPointError(f"step {step} at {seq_len} tokens: its {wrong}")
            took.append(time.perf_counter() - began)
            usual = statistics.median(took[1:][-10:] or took)  # the first warms up
            self.progress.emit(
                event, row=run.row, seq_len=seq_len, step=step, steps=numbers[-1], loss=loss,
                tokens_per_second=self.tokens_per_step(seq_len) / took[-1], eta_seconds=(numbers[-1] - step) * usual,
            )  # fmt: skip
            sent = self.handle.wire_bytes - wire
            yield {"loss": loss, "step_seconds": took[-1], "valid_tokens": tokens, "wire_bytes": sent}

    def _trial(self, seq_len: int, count: int) -> None:
        """Train some steps, of which nothing is kept but the memory that they took."""
        for _ in self.steps(seq_len, self.loader(seq_len, count), range(1, count + 1)):
            pass

    def tokens_per_step(self, seq_len: int) -> int:
        return seq_len * self.run.data.batch_size * self.run.optim.accumulation * self.ctx.dp

    def peaks(self, seq_len: int) -> int:
        """Largest device peak of any rank in one optimizer step at this length."""
        if (known := self.known.peak(seq_len, self.budget or 0)) is not None:
            return known
        self.progress.emit("search", row=self.run.row, seq_len=seq_len, message="a trial of the search")
        self.ledger.start()
        self.length = seq_len
        self._trial(seq_len, 1)
        peak = max(from_all(self.ledger.device_peak))
        self.progress.emit("tried", row=self.run.row, seq_len=seq_len, peak=peak, message="tried")
        return peak

    def measure(self, seq_len: int) -> Json:
        """Train the run's steps: on a CPU, memory and budget are watched in the first `WATCHED`. Time is taken in those
        after, or where there are none in the last."""
        run, handle, ranks = self.run, self.handle, self.ctx.world_size
        watched = 1 if run.search else min(WATCHED, run.optim.steps)  # a search has made steps already
        self.ledger.start()
        loader = self.loader(seq_len, run.optim.steps)
        self.states = states = RunStates(self.engine, run, seq_len, self.out, self.say)
        made: dict[str, list[Any]] = states.resume(self.order)
        tokens, begun = self.tokens_per_step(seq_len), states.begun
        left = (run.optim.steps - begun) * tokens // seq_len
        self.samples.lengthen(self.order.seen + left)  # after a step of other groups
        self.say(f"step {begun + 1} of {run.optim.steps}, which warms up", seq_len=seq_len)
        numbers, own = range(begun + 1, run.optim.steps + 1), []
        for number, step in zip(numbers, self.steps(seq_len, loader, numbers, "step")):
            for name, value in step.items():
                made.setdefault(name, []).append(value)
            own.append(step["step_seconds"])
            if len(own) == watched and self.device.type == "cpu":
                self.ledger.close()
            self.order.seen += tokens // seq_len
            states.after_step(self.order, number, max(own[-10:]), made)
        timed = own[watched:] or made["step_seconds"][-1:]
        seconds = statistics.median(timed)
        flos = models.flos(seq_len, tokens, **self.flops)
        self.notes += [*states.notes, *self.samples.notes()]
        if not own[watched:]:
            self.notes.append(WATCHED_TIME if own else NO_STEP)
        measured, predicted = self.measured(self.ledger, handle), self.predicted(ABLATION, self.ctx, seq_len)
        if planned := predicted.get("allocated_bytes"):  # by how much it is above what the allocator says
            said = {"allocated": max(measured["device_peak_bytes"])}
            if (here := accelerator(self.device)) is not None:
                said["reserved"] = here.max_memory_reserved(self.device)
            predicted |= {f"{name}_percent": 100 * (planned / nbytes - 1) for name, nbytes in said.items()}
        return {
            **measured,
            "predicted": predicted,
            "seq_len": seq_len,
            "tokens_per_step": tokens,
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_gpu": tokens / seconds / ranks,
            "step_seconds": timed,
            "loss": made["loss"],
            "valid_tokens": made["valid_tokens"],
            "wire_bytes": made["wire_bytes"][-1],
            "flos": flos,
            "tflops": {name: count / seconds / ranks / 1e12 for name, count in flos.items()},
            "mfu": models.mfu(flos["model"] / seconds / ranks, self.device),
            "attention_kept": handle.plan.attention_kept,
            "inputs_kept_every": handle.plan.inputs_kept_every,
            "kv_on_host": handle.plan.kv_on_host,
        }

    def __call__(self) -> Json:
        self.length = max(self.run.data.seq_len, self.ctx.sp)
        tried: list[tuple[int, int]] = []
        try:
            with self.ledger:
                self.ledger.mark_host(host_tensors(self.engine, self.run))
                if self.run.search:
                    self.length, tried = self._search(self.run.search)
                metrics = self.measure(self.length)
        except BaseException as e:
            if self.run.search and ran_out(e):  # on any rank: the launcher starts other processes, for shorter lengths
                everyone = Progress(self.progress.path)
                everyone.emit("tried", row=self.run.row, seq_len=self.length, peak=None, message="memory ran out")
            raise
        if self.run.search:
            lost = self.known.lost
            metrics["tried"] = [{"seq_len": n, "device_peak_bytes": None if n in lost else p} for n, p in tried]
            if max(metrics["device_peak_bytes"]) > (self.budget or 0):
                metrics["notes"].append("the measured step took more than the budget, which two others kept")
        return metrics

    def _search(self, search: Search) -> tuple[int, list[tuple[int, int]]]:
        """The longest length that fits the budget, from the run's own, and all that were tried with their peaks."""
        granule, budget = search.granule, self.budget
        if budget is None:
            raise ValueError(
                "search=True needs limits.device_memory, the memory budget of each rank that decides what fits"
            )
        self._trial(granule, 3)  # ZeRO-3 prefetches from what these have read
        found = longest_that_fits(self.peaks, budget, granule, start=self.length, limit=search.max)
        length, tried = found.length, found.tried
        while length > granule and (again := self.peaks(length)) > budget:
            tried.append((length, again))  # peaks of one length vary a little: at the edge it must fit twice
            length -= granule
        return length, tried

    def finish(self) -> None:
        """Save the trained model."""
        folder = str(self.run.output.save_to)
        self.say(f"saving the model to {folder}")
        save_model(self.handle, folder, self.tokenizer, Pace(self.say, "saving the model: gathering weights", 1.0))


if __name__ == "__main__":
    run_worker(__doc__, AblationRun)
