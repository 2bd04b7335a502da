"""Mistakes in the code that moves tensors between a GPU and its host are found by what watches streams: each of these,
made in a copy of one function, gives problems, and without it there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cases import small_pages
from fake import Watch, fake_cuda
from mutate import mutated
from steps import steps

from alstlib.hf import hidden_states
from alstlib.offload.courier import Arrival, Courier
from alstlib.offload.host_store import HostStore, Ticket


def train() -> list[str]:
    """Training steps whose hidden states, keys and values lie on the host, in four chunks and pages."""
    with small_pages(), steps("llama", 64, 1, chunk=16, offload=True, on_host="hidden+kv") as step:
        step()
        return step.watch.problems


def visit() -> list[str]:
    """A tensor that goes to the host and comes back while others do, as the sums of a page."""
    with fake_cuda() as watch:
        device = torch.device("cuda:0")
        courier = Courier(HostStore("async", budget=2**30), device)
        host = courier.empty((8,), torch.float32)
        for i in range(4):
            x = torch.empty(8, device=device).add_(i)
            sent = courier.send(host, x)
            del x
            y = courier.fetch(host, after=sent).get()[0]
            y.add_(1)
            del y
        courier.finish()
        return watch.problems


def keep() -> list[str]:
    """Checkpoints that are kept and read, last in, first out; once the rest of them is dropped."""
    with fake_cuda() as watch:
        _keep(watch)
        return watch.problems


def _keep(watch: Watch) -> None:
    store, device = HostStore("async", budget=2**30), torch.device("cuda:0")
    for dropped in (False, True, False):
        tickets = []
        for i in range(5):
            x = torch.empty(16, device=device).add_(i)
            tickets.append(store.ticket())
            store.put(tickets[-1], x)
            x = x + 1
        while tickets and not (dropped and len(tickets) == 3):
            (x,) = store.get(tickets.pop(), device)
            x.add_(1)


class Mutation(NamedTuple):
    owner: Any
    name: str
    """Of the function, an attribute of its owner."""
    changes: Sequence[tuple[str, str]]
    """Pieces of its source, and what they become."""
    found_by: Sequence[Callable[[], list[str]]]


ROOM = "self.parts = [_room_for(part, courier.device) for part in parts]"
WAIT_BEFORE_FETCH = "back.wait_stream(compute)  # the buffers' memory may still be in use there"
MUTATIONS = {
    "a fetch does not wait until its buffers are free": Mutation(
        Arrival, "__init__", [(WAIT_BEFORE_FETCH, "pass")], [train, visit]
    ),
    "a fetch does not wait for what was sent": Mutation(
        Arrival, "__init__", [("back.wait_event(after)", "pass")], [train, visit]
    ),
    "the computation does not wait for a fetch": Mutation(
        Arrival,
        "get",
        [("self.courier.here.current_stream(self.courier.device).wait_event(self.event)", "pass")],
        [train],
    ),
    "a send does not wait for the computation": Mutation(
        Courier, "send", [("out.wait_stream(compute)", "pass")], [train]
    ),
    "what is sent does not live until it is": Mutation(
        Courier, "send", [("self._leaving.append((x, done))", "pass")], [train]
    ),
    "what was sent is freed early": Mutation(Courier, "send", [("compute.wait_event(done_before)", "pass")], [train]),
    "the host does not wait at the end of a pass": Mutation(
        Courier, "finish", [("stream.synchronize()", "pass")], [train]
    ),
    "the computation does not wait for a checkpoint": Mutation(
        HostStore, "get", [("compute.wait_event(event)", "pass")], [keep]
    ),
    "a checkpoint is fetched before it is kept": Mutation(
        HostStore, "_fetch", [("back.wait_event(ticket.sent)", "pass")], [keep]
    ),
    "a checkpoint is fetched into memory in use": Mutation(
        HostStore, "_fetch", [("back.wait_stream(here.current_stream(device))", "pass")], [keep]
    ),
    "what is kept does not live until it is": Mutation(
        HostStore, "put", [("self._leaving.append((x, ticket.sent))", "pass")], [keep]
    ),
    "buffers are those of the side stream": Mutation(
        Arrival,
        "__init__",
        [
            (f"{ROOM}\n", "pass\n"),
            ("for to, part in zip(self.parts, parts):", f"{ROOM}\n        for to, part in zip(self.parts, parts):"),
        ],
        [train],
    ),
    "a checkpoint is kept before it is made": Mutation(
        HostStore, "put", [("out.wait_stream(compute)", "pass")], [keep]
    ),
    "rotary tables are used before they are there": Mutation(
        hidden_states, "_rotary", [("courier.finish()", "pass")], [train]
    ),
    "a fetch is done when the computation is": Mutation(
        Arrival, "__init__", [("self.event = back.record_event()", "self.event = compute.record_event()")], [train]
    ),
    "a slab is used again while it is read": Mutation(
        Ticket,
        "release",
        [("accelerator(device).current_stream(device).wait_event(self.fetched[1])", "pass")],
        [keep],
    ),
}
"""That `finish` waits for both streams cannot be seen to be needed: the computation has waited for every fetch."""


@pytest.mark.parametrize("run", [train, visit, keep])
def test_without_a_mistake_nothing_is_found(run: Callable[[], list[str]]) -> None:
    assert run() == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name: str) -> None:
    owner, function, changes, found_by = MUTATIONS[name]
    with mutated(getattr(owner, function), *changes):
        assert all(run() for run in found_by)
