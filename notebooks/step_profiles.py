"""One real training step on a CPU: which bytes are in use when, and which part of the model takes the time.

`memory_profile` counts with the ledger (`ledger`), `time_profile` takes the time of each operation alone; both ask
`scope` where in the model an operation runs, in forward, recompute and backward. An instrument costs time and a little
memory of its own: neither is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from alstlib.hf.handle import Handle
from alstlib.planner.measure.ledger import Ledger, _CpuInstrument
from alstlib.planner.measure.scope import ATTENTION, Places, category
from alstlib.planner.measure.simulate import watch
from alstlib.planner.model_states import GRADIENTS, OPTIMIZER, WEIGHTS

PHASES = ("forward", "loss", "backward", "optimizer")
"""Of a training step, in order; `loss` is the head and the loss in forward."""
PROJECTIONS = "projections"
"""Of seconds: what an attention module does besides attention itself. There, `attention` is the kernel alone."""


@dataclass(frozen=True)
class MemoryProfile:
    """The device bytes of one step, after each allocation and release."""

    phases: list[str]
    """The phase (`PHASES`) of each point."""
    points: list[dict[str, int]]
    """Bytes alive by category at each point."""

    @property
    def peak_index(self) -> int:
        totals = [sum(point.values()) for point in self.points]
        return max(range(len(totals)), key=totals.__getitem__)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category where the step holds most."""
        return self.points[self.peak_index]

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def peak_phase(self) -> str:
        return self.phases[self.peak_index]


class _Recorder(_CpuInstrument):
    """Keeps the bytes of each category whenever they change. What was there before and is no state is left out."""

    def __init__(self, budget: int | None, record: bool) -> None:
        super().__init__(budget, record)
        self.phase, self.phases, self.points = "", list[str](), list[dict[str, int]]()

    def note(self) -> None:
        if self.phase:
            self.phases.append(self.phase)
            self.points.append({name.strip("<>"): nbytes for name, nbytes in self.places.items() if name and nbytes})

    def see(self, tensor: Tensor, operation: str = "") -> None:
        before = self.bytes
        super().see(tensor, operation)
        if self.bytes != before:
            self.note()

    def _drop(self, key: int) -> None:
        before = self.bytes
        super()._drop(key)
        if self.bytes != before:
            self.note()


class _Ledger(Ledger):
    instrument = _Recorder


def memory_profile(
    model: nn.Module, forward: Callable[[], Tensor], optimizer: Any = None, handle: Handle | None = None
) -> MemoryProfile:
    """One training step of a model on the CPU: `forward()`, backward from the loss that it returns, and a step.

    Args:
        forward: runs the model and returns the loss.
        optimizer: None for no step.
        handle: of `alstlib.apply`, where it is attached: what waits in its store on the host is not the device's.
    """
    stores = [handle.store] if handle is not None else []
    with Places(model) as places, _Ledger(stores=stores, place=lambda: category(places.now())) as ledger:
        recorder: Any = ledger._cpu
        if handle is not None:
            watch(handle, places, ledger)
        for p in model.parameters():
            ledger.move(p, WEIGHTS)
            if p.grad is not None:
                ledger.move(p.grad, GRADIENTS)

            def is_gradient(p: Tensor) -> None:
                assert p.grad is not None
                ledger.move(p.grad, GRADIENTS)

            places.callback(p.register_post_accumulate_grad_hook(is_gradient).remove)
        for tensor in _states(optimizer):
            ledger.move(tensor, OPTIMIZER)

        def enter(phase: str) -> None:
            recorder.phase = phase
            recorder.note()

        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            places.callback(head.register_forward_pre_hook(lambda *_: enter("loss")).remove)
        enter("forward")
        loss = forward()
        enter("backward")
        loss.backward()
        if optimizer is not None:
            places.wrap(optimizer, "step", OPTIMIZER)
            enter("optimizer")
            optimizer.step()
        recorder.phase = ""
    return MemoryProfile(recorder.phases, recorder.points)


def _states(optimizer: Any) -> list[Tensor]:
    if optimizer is None:
        return []
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


class _Stopwatch(TorchDispatchMode):
    """Takes the time of each operation on the CPU, without that of the instrument."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places, self.optimizer = places, False
        self.seconds: dict[tuple[str, str], float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self._key(str(func))
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - begin
        return out

    def _key(self, operation: str) -> tuple[str, str]:
        if self.optimizer:
            return "optimizer", OPTIMIZER
        part = category(self.places.now())
        if "attention" in operation:
            part = ATTENTION
        elif part == ATTENTION:
            part = PROJECTIONS
        if torch._C._current_autograd_node() is None:
            return "forward", part
        again = bool(self.places.stack) or torch.is_grad_enabled()  # a graph is made within a backward
        return "recompute" if again else "backward", part


def time_profile(
    model: nn.Module, forward: Callable[[], Tensor], optimizer: Any = None, repeat: int = 3
) -> dict[str, dict[str, float]]:
    """Seconds of one training step on the CPU: {`forward`, `recompute`, `backward`, `optimizer`: {part: seconds}}.

    The time of operations alone; what Python and autograd do between them is left out. A first step warms up; of
    `repeat` further ones the fastest is returned. Gradients are set to None after each.
    """
    best: dict[tuple[str, str], float] = {}
    for i in range(repeat + 1):
        with Places(model) as places, _Stopwatch(places) as watch:
            forward().backward()
            if optimizer is not None:
                watch.optimizer = True
                optimizer.step()
        model.zero_grad(set_to_none=True)
        if i and (not best or sum(watch.seconds.values()) < sum(best.values())):
            best = watch.seconds
    found: dict[str, dict[str, float]] = {}
    for (when, part), seconds in best.items():
        found.setdefault(when, {})[part] = seconds
    return found
