"""Mistakes in the order of copies: each, made on purpose, gives wrong gradients or is named on the device on a CPU."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from device.module import NEVER
from test_late_engines import trained_alone

from alstlib.offload import courier, host_store

# (class and method, what is replaced, by what, the way that shows it)
MUTATIONS: dict[str, tuple[Any, str, str, str, str]] = {
    "fetch: the buffers may still be read": (courier.Arrival, "__init__", "back.wait_stream(compute)", "pass", "host"),
    "fetch: what was sent is not there yet": (courier.Arrival, "__init__", "back.wait_event(after)", "pass", "host"),
    "fetch: compute does not wait": (
        courier.Arrival, "get", "self.courier.here.current_stream(self.courier.device).wait_event(self.event)", "pass",
        "host",
    ),
    "fetch: an event of the wrong stream": (
        courier.Arrival, "__init__", "back.record_event()", "compute.record_event()", "host",
    ),
    "send: out does not wait": (courier.Courier, "send", "out.wait_stream(compute)", "pass", "host"),
    "send: x is freed": (courier.Courier, "send", "append((x, done))", "append((None, done))", "host"),
    "send: x is freed without a wait": (courier.Courier, "send", "compute.wait_event(done_before)", "pass", "host"),
    "finish: the host does not wait": (courier.Courier, "finish", "stream.synchronize()", "pass", "host"),
    "put: out does not wait": (host_store.HostStore, "put", "out.wait_stream(compute)", "pass", "whole"),
    "put: x is freed": (host_store.HostStore, "put", "append((x, ticket", "append((None, ticket", "whole"),
    "put: x is freed without a wait": (host_store.HostStore, "put", "compute.wait_event(done)", "pass", "whole"),
    "get: compute does not wait": (host_store.HostStore, "get", "compute.wait_event(event)", "pass", "whole"),
    "store: back does not wait": (host_store.HostStore, "_fetch", "back.wait_event(ticket.sent)", "pass", "whole"),
    "store: the buffers may still be read": (
        host_store.HostStore, "_fetch", "back.wait_stream(here.current_stream(device))", "pass", "whole",
    ),
}  # fmt: skip


@contextlib.contextmanager
def mutated(of: Any, method: str, old: str, new: str) -> Iterator[None]:
    source = inspect.getsource(inspect.getmodule(of))
    body = inspect.getsource(getattr(of, method))
    assert body.count(old) == 1
    made: dict[str, Any] = {"__name__": of.__module__, **vars(inspect.getmodule(of))}
    with mock.patch.dict("sys.modules"):
        exec(compile(source.replace(body, body.replace(old, new)), f"<{of.__name__}.{method}>", "exec"), made)
    namespace = dict(vars(inspect.getmodule(of)))
    original = getattr(of, method)
    changed = getattr(made[of.__name__], method)
    function = type(original)(changed.__code__, namespace, original.__name__, original.__defaults__)
    function.__kwdefaults__ = original.__kwdefaults__
    with mock.patch.object(of, method, function):
        yield


def wrong(rank: int, world: int, name: str) -> str:
    """What shows the mistake; empty if nothing does."""
    *where, way = MUTATIONS[name]
    try:
        with mutated(*where):
            error, _ = trained_alone(rank, world, way, NEVER)
    except AssertionError as e:
        return str(e)
    return "" if error < 1e-6 else f"an error of {error}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_seen(late1: Any, name: str) -> None:
    assert late1(wrong, name)[0]
