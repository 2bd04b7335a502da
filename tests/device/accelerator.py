"""The device as DeepSpeed knows devices."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from device import module


class LateAccelerator(CPU_Accelerator):
    """What differs from the CPU: its name, and what `torch.latecpu` has: streams, events, memory, random states."""

    def __init__(self):
        super().__init__()
        self._name, self._communication_backend_name = module.NAME, "late"
        self.here: Any = torch.get_device_module(module.device())

    def create_op_builder(self, class_name):
        """Not the CPU's collectives in shared memory, which GPUs have not, and which take two minutes to compile."""
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    def is_synchronized_device(self):
        return False

    def device_name(self, device_index=None):
        return module.NAME if device_index is None else f"{module.NAME}:{device_index}"

    def current_device(self):
        return 0

    def current_device_name(self):
        return f"{module.NAME}:0"

    def device(self, device_index=None):
        return self.here.device(device_index)

    def device_count(self):
        return 1

    def synchronize(self, device_index=None):
        self.here.synchronize()

    def set_rng_state(self, new_state, device_index=None):
        self.here.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return self.here.get_rng_state()

    @property
    def Stream(self):
        return self.here.Stream

    @property
    def Event(self):
        return self.here.Event

    def stream(self, stream):
        return self.here.stream(stream)

    def current_stream(self, device_index=None):
        return self.here.current_stream()

    def default_stream(self, device_index=None):
        return self.here.default_stream()

    def memory_allocated(self, device_index=None):
        return self.here.memory_allocated()

    def max_memory_allocated(self, device_index=None):
        return self.here.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index=None):
        self.here.reset_peak_memory_stats()

    def total_memory(self, device_index=None):
        return module.TOTAL

    def available_memory(self, device_index=None):
        return self.here.mem_get_info()[0]

    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory

    def _torch_pin_memory(self, tensor):
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor, shape):
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)

    def on_accelerator(self, tensor):
        return tensor.device.type == module.NAME


def install():
    """Make it DeepSpeed's device in this process."""
    if not isinstance(get_accelerator(), LateAccelerator):
        set_accelerator(LateAccelerator())
