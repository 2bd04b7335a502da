"""The device as DeepSpeed knows devices."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from device import module
from torch import Tensor


class LateAccelerator(CPU_Accelerator):
    """What differs from the CPU: its name, and what `torch.latecpu` has: streams, events, memory, random states."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = module.NAME, "late"
        self.here: Any = torch.get_device_module(module.device())

    def create_op_builder(self, class_name: str) -> Any:
        """Not the CPU's collectives in shared memory, which GPUs have not, and which take two minutes to compile."""
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return module.NAME if device_index is None else f"{module.NAME}:{device_index}"

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{module.NAME}:0"

    def device(self, device_index: int | None = None) -> Any:
        return self.here.device(device_index)

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: Any = None) -> None:
        self.here.synchronize()

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        self.here.set_rng_state(new_state)

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return self.here.get_rng_state()

    @property
    def Stream(self) -> Any:
        return self.here.Stream

    @property
    def Event(self) -> Any:
        return self.here.Event

    def stream(self, stream: Any) -> Any:
        return self.here.stream(stream)

    def current_stream(self, device_index: Any = None) -> Any:
        return self.here.current_stream()

    def default_stream(self, device_index: Any = None) -> Any:
        return self.here.default_stream()

    def memory_allocated(self, device_index: Any = None) -> int:
        return self.here.memory_allocated()

    def max_memory_allocated(self, device_index: Any = None) -> int:
        return self.here.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        self.here.reset_peak_memory_stats()

    def total_memory(self, device_index: Any = None) -> int:
        return module.TOTAL

    def available_memory(self, device_index: Any = None) -> int:
        return self.here.mem_get_info()[0]

    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory

    def _torch_pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: Tensor, shape: Any) -> Tensor:
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == module.NAME


def install() -> None:
    """Make it DeepSpeed's device in this process."""
    if not isinstance(get_accelerator(), LateAccelerator):
        set_accelerator(LateAccelerator())
