"""The process group of the device: gloo on its memory, with a record of who called what, and delays."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from device import module


class Call(NamedTuple):
    group: str
    op: str
    device: bool
    """Tensors of the device, and not of the CPU."""


def backend():
    """What `init_process_group` takes; registers the process group in this process."""
    extension = module.extension()
    if not hasattr(dist.Backend, "LATE"):

        def make(options, _):
            store = dist.PrefixStore("late", options.store)
            gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
            return extension.backend(gloo, options.group_id)

        dist.Backend.register_backend("late", make, extended_api=True, devices=[module.NAME])
    return f"cpu:gloo,{module.NAME}:late"


def delay(most):
    """Before each collective, wait for up to so many microseconds, drawn for each rank."""
    module.extension().set_call_delay(most)


def calls():
    """Collectives that this rank has called since the last time that somebody asked, in their order."""
    return [Call(*call) for call in module.extension().calls()]
