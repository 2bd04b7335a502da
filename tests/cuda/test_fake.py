"""What finds mistakes of code for CUDA on fake tensors finds them: reads and frees without waiting between streams."""

from __future__ import annotations

import pytest
import torch
from fake import fake_cuda, python_engine
from mutate import mutated

from alstlib.offload.courier import Courier
from alstlib.offload.host_store import HostStore, Ticket


def test_a_read_on_another_stream_without_waiting_is_found() -> None:
    with fake_cuda() as watch:
        x = torch.empty(8, device="cuda:0")
        x.add_(1)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = x * 2
        assert len(watch.problems) == 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        assert len(watch.problems) == 1
        x.add_(1)  # while the other stream reads
        assert len(watch.problems) == 2
        torch.cuda.current_stream().wait_event(side.record_event())
        x.add_(1)
        assert len(watch.problems) == 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.add_(x)
    assert len(watch.problems) == 2


def test_a_host_that_reads_before_a_copy_is_done_is_found() -> None:
    with fake_cuda() as watch:
        x, host = torch.empty(8, device="cuda:0").add_(1), torch.empty(8)
        host.copy_(x, non_blocking=True)
        host.mul_(2)
        assert len(watch.problems) == 1
        host.copy_(x, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        host.mul_(2)
        assert len(watch.problems) == 1
        x.copy_(host, non_blocking=True)
        host.mul_(2)  # while the device reads
        assert len(watch.problems) == 2
        host.copy_(x)
        host.mul_(2)
    assert len(watch.problems) == 2


def test_memory_that_is_freed_while_another_stream_uses_it_is_found() -> None:
    with fake_cuda() as watch:
        x = torch.empty(8, device="cuda:0").add_(1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        del x
        assert len(watch.problems) == 1, watch.problems
        del y


def test_a_write_over_memory_that_another_stream_was_just_given_is_found() -> None:
    """What the other stream has not yet done may still read what the memory held before."""
    with fake_cuda() as watch:
        source, side = torch.empty(8).fill_(1), torch.cuda.Stream()
        for waits in (True, False):
            x = torch.empty(8, device="cuda:0")
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_event(side.record_event())
            del x
            assert len(watch.problems) == (0 if waits else 1)


def test_what_is_kept_comes_back_without_waiting_for_what_left_after_it() -> None:
    """The sums of a page, for example: behind them a checkpoint would come late."""
    with fake_cuda() as watch:
        store, device = HostStore("async", budget=2**30), torch.device("cuda:0")
        tickets = [store.ticket(), store.ticket()]
        for ticket in tickets:
            store.put(ticket, torch.empty(16, device=device).add_(1))
        courier = Courier(store, device)
        courier.send(courier.empty((16,), torch.float32), torch.empty(16, device=device).add_(1))
        store.get(tickets[1], device)
        out, back = store.streams(device)
        assert (out.clock[out.number], back.clock[out.number]) == (3, 2)
        store.get(tickets[0], device)
        assert watch.problems == []


@pytest.mark.parametrize("mistake", [False, True])
def test_a_slab_that_is_used_again_while_it_is_read_is_found(mistake: bool) -> None:
    """Some checkpoints are dropped while they are on their way back. (Further mistakes: tests/device/README.md.)"""
    change = [("accelerator(device).current_stream(device).wait_event(self.fetched[1])", "pass")] if mistake else []
    with mutated(Ticket.release, *change), fake_cuda() as watch:
        store, device = HostStore("async", budget=2**30), torch.device("cuda:0")
        for left in (3, 0):
            tickets = [store.ticket() for _ in range(5)]
            for ticket in tickets:
                store.put(ticket, torch.empty(16, device=device).add_(1))
            while len(tickets) > left:
                store.get(tickets.pop(), device)[0].add_(1)
            del tickets, ticket
    assert bool(watch.problems) == mistake


def test_the_backward_pass_in_python_is_pytorchs() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)

    def loss() -> torch.Tensor:
        h = torch.nn.functional.silu(x @ w)
        return (h * h[:, :1]).sum() + (x * 2).sum()

    want = torch.autograd.grad(loss(), [x, w])
    with python_engine():
        loss().backward()
        chosen = torch.autograd.grad(loss(), [w])
    for got, expected in zip((x.grad, w.grad, *chosen), (*want, want[1])):
        torch.testing.assert_close(got, expected)
