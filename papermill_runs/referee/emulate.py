"""The worker that runs one real rank in place of many: `emulate.py --config config.json --out DIR`.

Real tensors of one rank's real sizes, real kernels, and a process group that sends nothing (`emulate` ranks of which
this process is one): a real device peak and real seconds, of a run that nobody has the GPUs for. What this rank
sends stands for what it would receive, so values and loss mean nothing. Few layers are built (`model.config:
{num_hidden_layers: 1}`); *ballast* stands on the device for the rest. There is no engine: ZeRO-3 would gather garbage,
so its states and buffers are ballast, by the formulas of `ballast`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.mesh import accelerator
from alstlib.data.shard import WHOLE, shard_batch
from alstlib.hf.loading import models
from alstlib.hf.loading.models import flop_dimensions, load_model, model_config, put_liger
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.measure.simulate import decoder_layers
from alstlib.planner.model_states import GATHERED, Sizes, model_states
from alstlib.runs.train.worker import Job, run_worker, wait_for


def ballast(run: RunConfig, parameters: int, element_bytes: int) -> dict[str, int]:
    """Bytes that ZeRO-3 over `run.emulate` ranks holds on a device besides what is built here
    (`model_states.model_states`). The weights of the layers that are built are here in full, as ZeRO-3 gathers them."""
    sizes = Sizes(parameters=parameters, layer=0, embedding=0)
    held = model_states(run.replace(engine={"zero_stage": 3}), sizes, max(1, run.emulate), element_bytes).device
    return {name: nbytes for name, nbytes in held.items() if name != GATHERED}


class Emulation(Job):
    """One rank of `run.emulate`."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        if run.emulate < 1:
            raise ValueError("the worker emulate.py needs emulate, the number of ranks of which one is run")
        super().__init__(run, out)
        self.ctx = alstlib.SPContext.create(run.emulate)
        self.say(f"loading {run.model.name}")
        whole = {k: v for k, v in run.model.config.items() if k != "num_hidden_layers"}
        self.depth = (
            model_config(run.model.name, whole, run.model.trust_remote_code).get_text_config().num_hidden_layers
        )
        with self.device:  # random weights are made where they stay
            model: Any = load_model(run, self.dtype)
        self.model = model.to(self.device)
        self.dimensions = flop_dimensions(self.model)
        self.layers = decoder_layers(self.model)
        of_layers = sum(p.numel() for layer in self.layers for p in layer.parameters())
        self.per_layer = of_layers // len(self.layers)
        parameters = sum(p.numel() for p in self.model.parameters()) + self.per_layer * (self.depth - len(self.layers))
        self.ballast = ballast(run, parameters, 2 if self.bf16 else 4)
        self.weight = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in self.ballast.values() if n]
        put_liger(run, self.model, self.gpu)
        self.handle = alstlib.apply(self.model, self.ctx, run.options)
        self.ledger = Ledger(self.device, [self.handle.store], run.limits.device_memory)

    def shard(self) -> dict[str, Any]:
        """Random tokens of this rank (the last, whose queries have the most keys)."""
        generator = torch.Generator().manual_seed(self.run.optim.seed)
        ids = torch.randint(0, self.model.config.vocab_size, (1, self.run.data.seq_len), generator=generator)
        made = shard_batch({"input_ids": ids, "labels": ids}, self.ctx.sp, self.ctx.sp_rank)
        return {n: t if n in WHOLE else t.to(self.device) for n, t in made.items()}

    def step(self, batch: dict[str, Any]) -> Tensor:
        out = alstlib.causal_lm_loss(self.model, batch)
        out.loss.backward()
        self.model.zero_grad(set_to_none=True)
        return out.loss

    def __call__(self) -> dict[str, Any]:
        run, batch, times = self.run, self.shard(), []
        self.say(f"{run.data.seq_len:,} tokens: step 1 of {run.optim.steps}, which warms up")
        for i in range(run.optim.steps):  # the first is watched for memory; its time counts where there is no other
            if i == 0:
                self.ledger.__enter__()
                self.ledger.mark_host(())
                self.ledger.start()
            with self._timed() as seconds:
                began = time.perf_counter()
                self.step(batch)
                wait_for(self.device)
                seconds["step"] = [time.perf_counter() - began]
            if i == 0:
                peak, host, wire = self.ledger.device_peak, self.ledger.host_peak, self.handle.wire_bytes
                here = accelerator(self.device)
                reserved = None if here is None else here.max_memory_reserved(self.device)
                self.ledger.close()
            times.append({name: sum(values) for name, values in seconds.items()})
            took = times[-1]["step"]
            left = (run.optim.steps - i - 1) * took
            self.say(f"{run.data.seq_len:,} tokens: step {i + 1} of {run.optim.steps}, {took:.1f} s", eta_seconds=left)
        times = times[1:] or times
        return self._metrics(times, peak, host, reserved, wire)

    @contextmanager
    def _timed(self) -> Iterator[dict[str, list[float]]]:
        """Seconds in all layers' forward and backward (each waits for the device)."""
        seconds: dict[str, list[float]] = {"forward": [], "backward": []}
        began = [0.0]

        def start(*_: Any) -> None:
            wait_for(self.device)
            began[0] = time.perf_counter()

        def stop(name: str) -> Any:
            def hook(*_: Any) -> None:
                wait_for(self.device)
                seconds[name].append(time.perf_counter() - began[0])

            return hook

        hooks: list[Any] = []
        for layer in self.layers:
            hooks += [layer.register_forward_pre_hook(start), layer.register_forward_hook(stop("forward"))]
            hooks += [layer.register_full_backward_pre_hook(start), layer.register_full_backward_hook(stop("backward"))]
        try:
            yield seconds
        finally:
            for hook in hooks:
                hook.remove()

    def _metrics(
        self, times: list[dict[str, float]], peak: int, host: int, reserved: int | None, wire: int
    ) -> dict[str, Any]:
        run, built = self.run, len(self.layers)
        best = min(times, key=lambda t: t["step"])
        forward, backward = best["forward"] / built, best["backward"] / built
        whole = {name: self.dimensions[name] for name in ("heads", "head_dim")}
        dimensions = {**whole, "dense_params": self.per_layer, "layers": 1}
        flos = {k: v / run.emulate for k, v in models.flos(run.data.seq_len, run.data.seq_len, **dimensions).items()}
        projected = best["step"] + (forward + backward) * (self.depth - built)
        return {
            "seq_len": run.data.seq_len,
            "tokens_per_step": run.data.seq_len,
            "step_seconds": [t["step"] for t in times],
            "loss": [],
            "device_peak_bytes": [peak],
            "host_peak_bytes": [host],
            "wire_bytes": wire,
            "attention_kept": self.handle.plan.attention_kept,
            "notes": self.handle.notes,
            "emulated": {
                "ranks": run.emulate,
                "layers_run": built,
                "layers_of_the_model": self.depth,
                "ballast_bytes": self.ballast,
                "device_reserved_bytes": reserved,
                "backend": self.handle.attention.backend_name,
                "layer_forward_seconds": forward,
                "layer_backward_seconds": backward,
                "layer_tflops": {k: v / (forward + backward) / 1e12 for k, v in flos.items()},
                "projected": {
                    "what": f"a layer's seconds times {self.depth} and the rest of the step; no optimizer, no network",
                    "step_seconds": projected,
                    "host_bytes": host * self.depth // built,
                },
            },
        }


def main() -> None:
    run_worker(__doc__, Emulation)


if __name__ == "__main__":
    main()
