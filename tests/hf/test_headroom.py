"""Attention outputs that stay on the device: from measured steps, never more than fits, the same on all ranks."""

from unittest import mock

import pytest
import torch
import yaml
from cases import attach, check_step, on_ranks, plain_step, sample_of, step
from test_layer_runner import LAYERS, LENGTH, OUTPUT, TILES, model_of

import alstlib
from alstlib.offload import headroom
from alstlib.offload.headroom import Headroom

CPU = torch.device("cpu")


class Meter:
    """A device of 1,000 bytes whose steps need `need` bytes beside what is there, as PyTorch's allocator would count
    them; and the headroom that is worked out from it."""

    def __init__(self, monkeypatch):
        self.size, self.now, self.peak, self.room = 1000, 0, 0, Headroom()
        monkeypatch.setattr(headroom, "device_memory", lambda device: self.read())

    def read(self):
        return self.now, self.peak, self.size - self.now

    def forward(self, rows, need, wants=2000):
        """One forward: what it kept of the bytes that it wants to keep. That stays, as all that it needs, for now."""
        kept = min(wants, self.room.begin(rows, self.read()))
        self.room.keep(kept)
        self.now += need + kept
        self.peak = max(self.peak, self.now)
        assert self.now <= self.size
        return kept

    def step(self, rows, need, wants=2000):
        """One step: what it kept."""
        kept = self.forward(rows, need, wants)
        self.room.look(CPU)
        self.now -= need + kept
        return kept


@pytest.fixture
def meter(monkeypatch):
    return Meter(monkeypatch)


HISTORIES = yaml.safe_load("""
# nine tenths of the 900 bytes that are free, less the need: it does not creep; then an optimizer made its state
the first step keeps nothing and later ones what is left: [0, [[100, 10, 300, 2000, 0], [0, 10, 300, 2000, 510],
  [0, 10, 300, 2000, 510], [0, 10, 300, 2000, 510], [0, 10, 300, 2000, 510], [200, 10, 300, 2000, 330]]]
longer samples need more and shorter ones not less: [0, [[0, 10, 300, 0, 0], [0, 20, 550, 2000, 300],
  [0, 5, 170, 2000, 600], [0, 10, 300, 2000, 600]]]
# while the model was loaded
an earlier peak counts as needed: [700, [[100, 10, 300, 0, 0], [0, 10, 300, 2000, 210]]]
a peak that is reset between steps changes nothing: [reset, [[0, 10, 300, 2000, 0], [0, 10, 300, 2000, 600],
  [0, 10, 300, 2000, 600], [0, 10, 300, 2000, 600]]]
""")
"""The peak before, or that it is reset; and steps: bytes that others have taken before it, its tokens, what it needs,
what it wants to keep, and what it keeps."""


@pytest.mark.parametrize("peak, steps", HISTORIES.values(), ids=HISTORIES)
def test_a_history_of_steps(meter, peak, steps):
    meter.peak = 0 if peak == "reset" else peak
    for taken, *how, kept in steps:
        meter.now += taken
        meter.peak = meter.now if peak == "reset" else max(meter.peak, meter.now)
        assert meter.step(*how) == kept


def test_two_forwards_before_their_backwards_are_one(meter):
    """As preference losses have it: the first must leave room for the second."""
    for wants in (0, 2000, 2000):
        kept = [meter.forward(10, 200, wants) for _ in range(2)]
        for _ in kept:
            meter.room.look(CPU)
        meter.now = 0
    assert kept == [900 - 400, 0]


def test_a_forward_without_a_backward_keeps_nothing(meter):
    assert [meter.room.begin(10, meter.read()) for _ in range(3)] == [0, 0, 0]


# ----- a model


def keeps(rank, world, fits, chunk):
    """The first step keeps nothing, the second what fits of all outputs on the fullest device; each is exact."""
    memory = (0, 1000, int((1000 + fits[rank] * OUTPUT // world) / headroom.SHARE) + 1)
    ctx, model, data = alstlib.SPContext.create(world), model_of(), sample_of(LENGTH)
    want = plain_step(model, data)
    with (
        mock.patch.object(headroom, "device_memory", return_value=memory),
        attach(model, ctx, **TILES, chunk=chunk) as handle,
    ):
        for kept in (0, min(fits) / LAYERS):
            check_step(step(model, data, ctx), want)
            assert handle.plan.attention_kept == kept


@pytest.mark.parametrize("chunk", [None, 20])
@pytest.mark.parametrize("fits", [[0], [1], [LAYERS], [10 * LAYERS, 1]], ids=str)
def test_a_model_keeps_what_fits_with_exact_gradients(pools, fits, chunk):
    on_ranks(pools, len(fits), keeps, fits, chunk)
