"""Attention outputs that stay on the device: from measured steps, never more than fits, the same on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from cases import plain_run, worst_error
from test_checkpointed_layers import LAYERS, LENGTH, OUTPUT, TILES, batch, gradients, model_of

import alstlib
from alstlib.offload import headroom
from alstlib.offload.headroom import Headroom

CPU = torch.device("cpu")


class Meter:
    """A device of `size` bytes whose steps need `need(rows)` beside `base`, as PyTorch's allocator would count them."""

    def __init__(self, monkeypatch: Any, size: int, base: int = 0) -> None:
        self.size, self.now, self.peak = size, base, base
        monkeypatch.setattr(headroom, "device_memory", lambda device: self.read())

    def read(self) -> tuple[int, int, int]:
        return self.now, self.peak, self.size - self.now

    def step(self, room: Headroom, rows: int, need: int, wants: int) -> int:
        """One step: what it kept of the bytes that it wants to keep."""
        kept = min(wants, room.begin(rows, self.read()))
        room.keep(kept)
        self.peak = max(self.peak, self.now + need + kept)
        room.look(CPU)
        assert self.now + need + kept <= self.size
        return kept


def test_the_first_step_keeps_nothing_and_later_ones_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, room = Meter(monkeypatch, 1000, base=100), Headroom()
    assert meter.step(room, 10, 300, wants=2000) == 0
    kept = [meter.step(room, 10, 300, wants=2000) for _ in range(4)]
    assert kept == [810 - 300] * 4  # nine tenths of the 900 that are free, less the need: it does not creep
    meter.now += 200  # an optimizer made its state
    assert meter.step(room, 10, 300, wants=2000) == 630 - 300


def test_longer_samples_need_more_and_shorter_ones_not_less(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, room = Meter(monkeypatch, 1000), Headroom()
    meter.step(room, 10, 300, wants=0)
    assert meter.step(room, 20, 550, wants=2000) == 900 - 600
    assert meter.step(room, 5, 170, wants=2000) == 900 - 300
    assert meter.step(room, 10, 300, wants=2000) == 900 - 300


def test_a_peak_that_is_reset_between_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, room = Meter(monkeypatch, 1000), Headroom()
    for _ in range(4):
        kept = meter.step(room, 10, 300, wants=2000)
        meter.peak = meter.now
    assert kept == 900 - 300


def test_an_earlier_peak_counts_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, room = Meter(monkeypatch, 1000, base=100), Headroom()
    meter.peak = 700  # while the model was loaded
    meter.step(room, 10, 300, wants=0)
    assert meter.step(room, 10, 300, wants=2000) == 810 - 600


def test_two_forwards_before_their_backwards_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As preference losses have it: the first must leave room for the second."""
    meter, room = Meter(monkeypatch, 1000), Headroom()
    for wants in (0, 2000, 2000):
        kept = []
        for _ in range(2):
            kept.append(min(wants, room.begin(10, meter.read())))
            room.keep(kept[-1])
            meter.now += 200 + kept[-1]
            meter.peak = max(meter.peak, meter.now)
            assert meter.now <= meter.size
        for _ in kept:
            room.look(CPU)
        meter.now = 0
    assert kept == [900 - 400, 0]


def test_a_forward_without_a_backward_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, room = Meter(monkeypatch, 1000), Headroom()
    assert [room.begin(10, meter.read()) for _ in range(3)] == [0, 0, 0]


# ----- a model


@pytest.mark.parametrize("chunk", [None, 20])
@pytest.mark.parametrize("fits", [0, 1, LAYERS])
def test_a_model_keeps_what_fits_with_exact_gradients(monkeypatch: pytest.MonkeyPatch, fits: int, chunk: Any) -> None:
    def read(device: torch.device) -> tuple[int, int, int]:
        return 0, 1000, int((1000 + fits * OUTPUT) / headroom.SHARE) + 1

    monkeypatch.setattr(headroom, "device_memory", read)
    model, data = model_of(), batch()
    _, want = plain_run(model, [{"input_ids": data["input_ids"], "labels": data["input_ids"]}])
    with alstlib.apply(model, None, alstlib.Options(**TILES, chunk=chunk)) as handle:
        for kept in (0, fits / LAYERS):
            model.zero_grad()
            alstlib.causal_lm_loss(model, data).loss.backward()
            assert handle.attention_kept == kept
            assert worst_error(gradients(model), want)[0] < 1e-5


def uneven_devices(rank: int, world: int) -> float:
    ctx = alstlib.SPContext.create(world)
    model, whole = model_of(), batch()
    rows = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    shard = {k: v[:, rows] for k, v in whole.items()}
    documents = torch.tensor([0, LENGTH], dtype=torch.int32)
    fits = [10 * LAYERS, 1][rank] * OUTPUT // world
    memory = (0, 1000, int((1000 + fits) / headroom.SHARE) + 1)
    with (
        mock.patch.object(headroom, "device_memory", return_value=memory),
        alstlib.apply(model, ctx, alstlib.Options(**TILES)) as handle,
    ):
        for _ in range(2):
            alstlib.causal_lm_loss(model, {**shard, "cu_documents": documents}, ctx).loss.backward()
        return handle.attention_kept


def test_ranks_agree_on_the_fullest_device(ranks2: Any) -> None:
    assert ranks2(uneven_devices) == [1 / LAYERS] * 2
