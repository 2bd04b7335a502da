"""The device as DeepSpeed knows devices."""

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from device import module


class LateAccelerator(CPU_Accelerator):
    """What differs from the CPU: its name, and what `torch.latecpu` has: streams, events, memory, random states."""

    def __init__(self):
        super().__init__()
        self._name, self._communication_backend_name = module.NAME, "late"
        self.here = torch.get_device_module(module.device())

    def create_op_builder(self, class_name):
        """Not the CPU's collectives in shared memory, which GPUs have not, and which take two minutes to compile."""
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    def is_synchronized_device(self):
        return False

    def device_count(self):
        return 1

    def device_name(self, device_index=None):
        return module.NAME if device_index is None else f"{module.NAME}:{device_index}"

    def current_device_name(self):
        return f"{module.NAME}:0"

    @property
    def Stream(self):
        return self.here.Stream

    @property
    def Event(self):
        return self.here.Event

    def available_memory(self, device_index=None):
        return self.here.mem_get_info()[0]

    def on_accelerator(self, tensor):
        return tensor.device.type == module.NAME


def _of_the_module(name):
    return lambda self, *args, **named: getattr(self.here, name)(*args, **named)


for name in ("stream", "current_stream", "synchronize", "reset_peak_memory_stats"):
    setattr(LateAccelerator, name, _of_the_module(name))


def install():
    """Make it DeepSpeed's device in this process."""
    if not isinstance(get_accelerator(), LateAccelerator):
        set_accelerator(LateAccelerator())
