"""The worker that times attention kernels, `python -m alstlib.bench --config config.json --out DIR`.

Every backend of `kernels.BACKENDS` that runs here: forward and backward, causal, over the run's length with the heads
of the run's model on one of `sp` ranks; and in row chunks (`chunk`) over resident keys, as a streamed layer calls it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alstlib.config import RunConfig
from alstlib.kernels import (
    BACKENDS,
    Backend,
    Rule,
    attention_backward,
    attention_backward_rows,
    attention_forward,
    choose_backend,
)
from alstlib.models import model_config
from alstlib.progress import Progress
from alstlib.worker import run_worker, this_device

CHECKING = ("eager",)
"""Makes [S, S]: not timed."""
SLOW = {"blockwise": 65_536}
"""Not timed beyond so many tokens: it is there for what the others do not compute."""


class Bench:
    def __init__(self, run: RunConfig, out: Path) -> None:
        self.run, (self.device, cuda) = run, this_device()
        self.progress = Progress(out / "progress.jsonl", 0)
        self.dtype = torch.bfloat16 if run.dtype == "bf16" or (run.dtype == "auto" and cuda) else torch.float32
        config = model_config(run.model, run.model_config, run.trust_remote_code).get_text_config()
        ranks = max(1, run.emulate)
        self.heads = config.num_attention_heads // ranks
        self.kv = max(1, (config.num_key_value_heads or config.num_attention_heads) // ranks)
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def __call__(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        run = self.run
        for i, name in enumerate(BACKENDS):
            if name in CHECKING or run.seq_len > SLOW.get(name, run.seq_len):
                continue
            try:
                backend = choose_backend(name, self.device, self.dtype, self.dim)
            except ValueError as e:
                made[name] = {"runs": False, "why": str(e)}
                continue
            text = f"{name} at {run.seq_len:,} tokens, {i + 1} of {len(BACKENDS)} kernels"
            self.progress.emit("load", row=run.row, message=text)
            try:
                made[name] = {"runs": True, **self.time(backend)}
            except (RuntimeError, ImportError, TypeError) as e:  # a kernel that fails is a finding, not the end
                made[name] = {"runs": False, "why": f"{type(e).__name__}: {e}"[:500]}
        chosen = choose_backend("sdpa", self.device, self.dtype, self.dim).name
        seconds = made[chosen]["forward_seconds"] + made[chosen]["backward_seconds"] if made[chosen]["runs"] else None
        return {
            "seq_len": self.run.seq_len,
            "tokens_per_step": self.run.seq_len,
            "step_seconds": [seconds] if seconds else [],
            "chosen": chosen,
            "kernels": made,
        }

    def time(self, backend: Backend) -> dict[str, Any]:
        """Median seconds, and TFLOPS of the causal half: 2 S^2 d a head forward, 5 S^2 d backward."""
        run, length = self.run, self.run.seq_len

        def make(heads: int) -> torch.Tensor:  # as they come out of an exchange: views of [S, B, heads, D]
            return torch.randn(length, 1, heads, self.dim, device=self.device, dtype=self.dtype).permute(1, 2, 0, 3)

        q, dout, (k, v) = make(self.heads), make(self.heads), (make(self.kv), make(self.kv))
        scale = self.dim**-0.5
        out, lse = attention_forward(backend, q, k, v, rule=Rule(scale))
        forward = self.median(lambda: attention_forward(backend, q, k, v, rule=Rule(scale)))
        backward = self.median(lambda: attention_backward(backend, dout, q, k, v, out, lse, rule=Rule(scale)))
        square = float(length) ** 2 * self.dim * self.heads
        made = {
            "forward_seconds": forward,
            "backward_seconds": backward,
            "forward_tflops": 2 * square / forward / 1e12,
            "backward_tflops": 5 * square / backward / 1e12,
        }
        if run.chunk is None:
            return made
        chunk = run.chunk
        spans = [slice(lo, min(lo + chunk, length)) for lo in range(0, length, chunk)]

        def chunks_forward() -> None:
            for at in spans:
                attention_forward(backend, q[:, :, at], k[:, :, : at.stop], v[:, :, : at.stop], rule=Rule(scale))

        dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))

        def chunks_backward() -> None:
            for at in reversed(spans):
                attention_backward_rows(
                    backend, dout[:, :, at], q[:, :, at], k[:, :, : at.stop], v[:, :, : at.stop], out[:, :, at],
                    lse[:, :, at], dk[:, :, : at.stop], dv[:, :, : at.stop], rule=Rule(scale),
                )  # fmt: skip

        forward, backward = self.median(chunks_forward), self.median(chunks_backward)
        return {
            **made,
            "chunk": chunk,
            "chunks_forward_seconds": forward,
            "chunks_backward_seconds": backward,
            "chunks_forward_tflops": 2 * square / forward / 1e12,
            "chunks_backward_tflops": 5 * square / backward / 1e12,
        }

    def median(self, step: Callable[[], Any]) -> float:
        step()
        seconds = []
        for _ in range(self.run.steps):
            self._wait()
            began = time.perf_counter()
            step()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    run_worker(__doc__, Bench)


if __name__ == "__main__":
    main()
