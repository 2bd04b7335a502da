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


def _generator():
    return _extension.default_generator()


def _get_rng_state(device=NAME):
    return _generator().get_state()


def _set_rng_state(state, device=NAME):
    _generator().set_state(state)


def _seed(seed):
    _generator().manual_seed(seed)


def _memory(device=None):
    return _extension.memory()[0]


def _peak(device=None):
    return _extension.memory()[1]


def _reserved(device=None):
    return _extension.memory()[2]


def limit(fraction, device=None):
    """As `torch.cuda.set_per_process_memory_fraction`, which takes no device without a number."""
    if device is not None and torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _extension.set_limit(int(fraction * TOTAL))


@contextlib.contextmanager
def _device(device):
    yield


def _module():
    made = ModuleType(f"torch.{NAME}")
    made.Stream, made.Event = Stream, Event
    made.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    made.current_stream = lambda device=None: torch.accelerator.current_stream()
    made.default_stream = lambda device=None: Stream(stream_id=0, device_index=0, device_type=_type())
    made.set_stream = torch.accelerator.set_stream
    made.synchronize = lambda device=None: _extension.synchronize()
    made.is_available = made.is_initialized = lambda: True
    made.init = made._lazy_init = lambda: None
    made.device_count = lambda: 1
    made.current_device = lambda: 0
    made.set_device = lambda device: None
    made.device = _device
    made.get_device_name = lambda device=None: NAME
    made.get_device_properties = _properties
    made.get_device_capability = lambda device=None: (0, 0)
    made.memory_allocated, made.max_memory_allocated = _memory, _peak
    made.memory_reserved = made.max_memory_reserved = _reserved
    made.reset_peak_memory_stats = made.reset_max_memory_allocated = lambda device=None: _extension.reset_peak()
    made.mem_get_info = lambda device=None: (TOTAL - _reserved(), TOTAL)
    made.empty_cache = lambda: None
    made.set_per_process_memory_fraction = limit
    made.cudart = _Runtime
    made.get_rng_state, made.set_rng_state = _get_rng_state, _set_rng_state
    made.get_rng_state_all = lambda: [_get_rng_state()]
    made.set_rng_state_all = lambda states: _set_rng_state(states[0])
    made.manual_seed = made.manual_seed_all = _seed
    made.initial_seed = lambda: _generator().initial_seed()
    made._is_in_bad_fork = lambda: False
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.is_bf16_supported = lambda *_, **__: True
    return made


def _type():
    return torch.Stream(device=torch.device(NAME, 0)).device_type
