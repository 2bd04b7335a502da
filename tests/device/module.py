"""`torch.latecpu`, the Python module of the device: what alstlib, DDP, FSDP2 and DeepSpeed ask of `torch.cuda`."""

import contextlib
from types import ModuleType, SimpleNamespace

import torch
from device import build

NAME = "latecpu"
TOTAL = 2**36
"""Bytes that the device says it has."""
NEVER = -1
"""Delay of a copy that runs only when somebody waits for it, which is the latest that a program may rely on."""

_extension = None


def extension():
    """The C++ side; registers the device in this process, once and for good."""
    global _extension
    if _extension is None:
        _extension = build.load()
        torch.utils.rename_privateuse1_backend(NAME)
        _extension.init()
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend()
    return _extension


def device():
    extension()
    return torch.device(NAME, 0)


@contextlib.contextmanager
def late(delay, seed=0):
    """Copies on other streams than the default one begin up to `delay` microseconds late, or with NEVER when somebody
    waits for them. Afterwards nothing is under way, and the delay is the usual one.

    Raises:
        AssertionError: something on another stream did not wait for the default stream.
    """
    extension().set_late(delay, seed)
    extension().races()
    try:
        yield
    finally:
        extension().set_late(500, 0)
        found = extension().races()
    assert not found, "\n".join(found)


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **ids):
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device(NAME, 0), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, **_):
        return super().__new__(cls, device=torch.device(NAME, 0), enable_timing=enable_timing, blocking=blocking)


class _Runtime:
    """The two calls of CUDA's runtime that pin memory which is there already."""

    def cudaHostRegister(self, data, nbytes, flags):
        _extension.host_register(data, nbytes)
        return 0

    def cudaHostUnregister(self, data):
        _extension.host_unregister(data)
        return 0


def _properties(device=None):
    return SimpleNamespace(name=NAME, total_memory=TOTAL, major=0, minor=0, multi_processor_count=1)


def _seed(seed):
    _extension.default_generator().manual_seed(seed)


def limit(fraction, device=None):
    """As `torch.cuda.set_per_process_memory_fraction`, which takes no device without a number."""
    if device is not None and torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _extension.set_limit(int(fraction * TOTAL))


def _module():
    made = ModuleType(f"torch.{NAME}")
    made.__dict__.update(
        Stream=Stream, Event=Event, cudart=_Runtime,
        stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(),
        synchronize=lambda device=None: _extension.synchronize(),
        is_available=lambda: True, is_initialized=lambda: True, init=lambda: None, _lazy_init=lambda: None,
        device_count=lambda: 1, current_device=lambda: 0, set_device=lambda device: None, device=contextlib.nullcontext,
        get_device_name=lambda device=None: NAME, get_device_properties=_properties,
        memory_allocated=lambda device=None: _extension.memory()[0],
        max_memory_allocated=lambda device=None: _extension.memory()[1],
        memory_reserved=lambda device=None: _extension.memory()[2],
        reset_peak_memory_stats=lambda device=None: _extension.reset_peak(),
        mem_get_info=lambda device=None: (TOTAL - _extension.memory()[2], TOTAL), empty_cache=lambda: None,
        set_per_process_memory_fraction=limit,
        get_rng_state=lambda device=NAME: _extension.default_generator().get_state(),
        set_rng_state=lambda state, device=NAME: _extension.default_generator().set_state(state),
        manual_seed=_seed, manual_seed_all=_seed,
        _is_in_bad_fork=lambda: False, get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda *_, **__: True,
    )  # fmt: skip
    return made
