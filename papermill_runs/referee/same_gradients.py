"""The worker that compares one step on a device with plain transformers on the CPU: `same_gradients.py
--config config.json --out DIR`.

The run's model, with weights whose every gradient counts, computes loss and gradients of one sample on the device with
the run's options, in fp32 and in bf16. Plain transformers computes the same from the same weights in fp32 on the CPU.
It also does so in bf16 on the device: its error is what bf16 itself costs.
"""

from __future__ import annotations

import copy
import time
from typing import Any
from unittest import mock

import torch

import alstlib
from alstlib.base import sizing
from alstlib.hf.loading.models import model_config
from alstlib.planner.measure.small import build
from alstlib.planner.measure.verify import compare, errors_of, plain, sample
from alstlib.runs.train.worker import Job, run_worker

EXACT = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 5e-2)}
"""Largest relative error of the loss and of a gradient: another device adds in another order, and bf16 has 8 bits."""


class SameGradients(Job):
    def __call__(self) -> dict[str, Any]:
        run = self.run
        self.say(f"comparing gradients at {run.data.seq_len:,} tokens with the CPU's")
        began = time.perf_counter()
        config = model_config(run.model.name, run.model.config, run.model.trust_remote_code)
        with mock.patch.object(sizing, "LEAST_KEYS", 1):  # several pages, as a long sequence has
            found = {str(dtype).removeprefix("torch."): self.compared(config, dtype) for dtype in EXACT}
        return {
            "seq_len": run.data.seq_len,
            "tokens_per_step": run.data.seq_len,
            "step_seconds": [time.perf_counter() - began],
            "gradients": found,
        }

    def compared(self, config: Any, dtype: torch.dtype) -> dict[str, Any]:
        """What came of a type (`verify.compare`), with the error of plain transformers in bf16 and its share."""
        model: Any = build(config, dtype, self.run.optim.seed)
        model.set_attn_implementation("sdpa")
        model.to(self.device)
        data = sample(self.run.data.seq_len, packed=False)
        here = {n: x.to(self.device) if isinstance(x, torch.Tensor) else x for n, x in data.items()}
        more: dict[str, float] = {}

        def reference(model: Any) -> Any:
            loss, grads = plain(copy.deepcopy(model).float().cpu(), data)
            want = {n: g.to(self.device) for n, g in grads.items()}
            if dtype != torch.float32:
                more["of_plain"] = max(errors_of(plain(model, here)[1], want).values())
            return loss, want

        found = compare(model, alstlib.SPContext(), self.run.options, here, reference, EXACT)
        if more and "gradient" in found:
            more["times_plain"] = found["gradient"] / more["of_plain"]
        return {**found, **more}


def main() -> None:
    run_worker(__doc__, SameGradients)


if __name__ == "__main__":
    main()
