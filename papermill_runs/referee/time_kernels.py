"""The worker that times attention kernels, `time_kernels.py --config config.json --out DIR`.

Every backend of `backends.BACKENDS` that runs here: forward and backward, causal, over the run's length with the heads
of the run's model on one of `sp` ranks; and in chunks of queries (`chunk`) over resident keys, as a streamed layer
calls it. Each kernel has a process of its own: an illegal access leaves a process that cannot use its GPU any more, and
says something about one kernel only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alstlib.base.config import RunConfig
from alstlib.base.sizing import heads_of
from alstlib.hf.loading.models import model_config
from alstlib.kernels.attention import attention_backward, attention_forward
from alstlib.kernels.backends import BACKENDS, choose_backend
from alstlib.kernels.rule import Attended, Rule
from alstlib.runs.processes import die_with_parent, seconds_left
from alstlib.runs.train.worker import Job, run_worker, wait_for

CHECKING = ("eager",)
"""Makes [S, S]: not timed."""
SLOW = {"blockwise": 65_536}
"""Kernels that are not timed beyond this number of tokens: they serve what the others do not compute."""


class Bench(Job):
    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        config = model_config(run.model.name, run.model.config, run.model.trust_remote_code).get_text_config()
        ranks = max(1, run.emulate)
        heads, kv, self.dim = heads_of(config)
        self.heads, self.kv = heads // ranks, max(1, kv // ranks)

    def __call__(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        run = self.run
        for i, name in enumerate(BACKENDS):
            if name in CHECKING or run.data.seq_len > SLOW.get(name, run.data.seq_len):
                continue
            try:
                choose_backend(name, self.device, self.dtype, self.dim)
            except ValueError as e:
                made[name] = {"runs": False, "why": str(e)}
                continue
            self.say(f"{name} at {run.data.seq_len:,} tokens, {i + 1} of {len(BACKENDS)} kernels")
            made[name] = self.alone(name)
        chosen = choose_backend("sdpa", self.device, self.dtype, self.dim).name
        seconds = made[chosen]["forward_seconds"] + made[chosen]["backward_seconds"] if made[chosen]["runs"] else None
        return {
            "seq_len": self.run.data.seq_len,
            "tokens_per_step": self.run.data.seq_len,
            "step_seconds": [seconds] if seconds else [],
            "chosen": chosen,
            "kernels": made,
        }

    def alone(self, name: str) -> dict[str, Any]:
        """What a kernel answers in a process of its own, which may take half of the time that is left."""
        answer, run = self.out / f"kernel-{name}.json", self.run
        answer.unlink(missing_ok=True)
        task = {
            "name": name, "device": str(self.device), "dtype": str(self.dtype).removeprefix("torch."),
            "heads": self.heads, "kv": self.kv, "dim": self.dim, "length": run.data.seq_len, "steps": run.optim.steps,
            "chunk": run.options.chunk,
        }  # fmt: skip
        left = seconds_left() / 2
        limit = None if math.isinf(left) else max(1.0, left)
        with open(answer.with_suffix(".log"), "w+") as log:
            try:
                done = subprocess.run(self.command(task, answer), stdout=log, stderr=log, timeout=limit)
                ended = f"its process ended with status {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"no answer in {left:.0f} s"
            log.seek(0)
            said = log.read().strip().splitlines()[-3:]
        try:
            return json.loads(answer.read_text())
        except (OSError, ValueError):
            return {"runs": False, "why": ": ".join([ended, *said])[:500]}

    def command(self, task: dict[str, Any], answer: Path) -> list[str]:
        return [sys.executable, __file__, "--kernel", json.dumps(task), "--out", str(answer)]


def answer_of(task: dict[str, Any]) -> dict[str, Any]:
    """The times of a kernel; where it fails, whatever way, that is its answer."""
    try:
        return {"runs": True, **time_kernel(**task)}
    except Exception as e:
        return {"runs": False, "why": f"{type(e).__name__}: {e}"[:500]}


def time_kernel(
    name: str, device: str, dtype: str, heads: int, kv: int, dim: int, length: int, steps: int, chunk: int | None
) -> dict[str, Any]:
    """Median seconds, and TFLOPS of the causal half: 2 S^2 d a head forward, 5 S^2 d backward."""
    on = torch.device(device)
    backend = choose_backend(name, on, getattr(torch, dtype), dim)

    def make(heads: int) -> torch.Tensor:  # as they come out of an exchange: views of [S, B, heads, D]
        return torch.randn(length, 1, heads, dim, device=on, dtype=getattr(torch, dtype)).permute(1, 2, 0, 3)

    def figures(kind: str, forward: Callable[[], Any], backward: Callable[[], Any]) -> dict[str, float]:
        seconds = {f"{kind}forward": median(forward), f"{kind}backward": median(backward)}
        flops = {f"{kind}forward": 2 * square, f"{kind}backward": 5 * square}
        tflops = {f"{n}_tflops": flops[n] / s / 1e12 for n, s in seconds.items()}
        return {**{f"{n}_seconds": s for n, s in seconds.items()}, **tflops}

    def median(step: Callable[[], Any]) -> float:
        step()
        seconds = []
        for _ in range(steps):
            wait_for(on)
            began = time.perf_counter()
            step()
            wait_for(on)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    q, dout, (k, v) = make(heads), make(heads), (make(kv), make(kv))
    rule = Rule(dim**-0.5)
    kept = Attended(q, k, v, *attention_forward(backend, q, k, v, rule=rule))
    square = float(length) ** 2 * dim * heads
    made = figures(
        "",
        lambda: attention_forward(backend, q, k, v, rule=rule),
        lambda: attention_backward(backend, dout, kept, rule=rule),
    )
    if chunk is None:
        return made
    spans = [slice(lo, min(lo + chunk, length)) for lo in range(0, length, chunk)]

    def chunks_forward() -> None:
        for at in spans:
            attention_forward(backend, q[:, :, at], k[:, :, : at.stop], v[:, :, : at.stop], rule=rule)

    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v))

    def chunks_backward() -> None:
        for at in reversed(spans):
            rows, keys = (slice(None), slice(None), at), (slice(None), slice(None), slice(at.stop))
            part = Attended(q[rows], k[keys], v[keys], kept.out[rows], kept.lse[rows])
            attention_backward(backend, dout[rows], part, rule=rule, sums=(dq[rows], dk[keys], dv[keys]))

    return {**made, "chunk": chunk, **figures("chunks_", chunks_forward, chunks_backward)}


def main() -> None:
    if "--kernel" not in sys.argv:
        return run_worker(__doc__, Bench)
    parser = argparse.ArgumentParser(description="One kernel in a process of its own.")
    parser.add_argument("--kernel", type=json.loads, help="arguments of time_kernel")
    parser.add_argument("--out", type=Path, help="file for its answer")
    args = parser.parse_args()
    die_with_parent()
    args.out.write_text(json.dumps(answer_of(args.kernel)))


if __name__ == "__main__":
    main()
