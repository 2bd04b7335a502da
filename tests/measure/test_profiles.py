"""Profiles of a step: bytes add up to the ledger's, states are what they are, passes are told apart."""

import pytest
import torch
from cases import batch_of, make_model
from step_profiles import PHASES, memory_profile, time_profile

import alstlib
from alstlib.figures import step_plots
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.model_states import GRADIENTS, OPTIMIZER, WEIGHTS

LENGTH, VOCAB = 96, 512
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192}
STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)


def trained(**shape):
    """A model, its optimizer after a first step, and a batch."""
    model, batch = make_model("gqa", **SHAPE, **shape), batch_of(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plain_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, batch


def plain_loss(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def plain_profile():
    model, optimizer, batch = trained()
    return model, memory_profile(model, lambda: plain_loss(model, batch), optimizer)


def test_states_are_what_they_are_and_phases_come_in_order():
    """fp32 and AdamW: 4 bytes of weights, 8 of moments (and a counter for each tensor), 4 of gradients."""
    model, found = plain_profile()
    tensors = [p.numel() for p in model.parameters()]
    numbers, first, last = sum(tensors), found.points[0], found.points[-1]
    assert first == {WEIGHTS: 4 * numbers, OPTIMIZER: 8 * numbers + 4 * len(tensors)}
    assert {name: last.pop(name) for name in STATES} == {**first, GRADIENTS: 4 * numbers}
    assert sum(last.values()) < 100  # all activations are gone: a loss is left
    assert len(found.phases) == len(found.points)
    assert list(dict.fromkeys(found.phases)) == list(PHASES)
    assert sorted(found.phases, key=PHASES.index) == found.phases


def test_peak_is_the_ledgers():
    model, optimizer, batch = trained()
    found = memory_profile(model, lambda: plain_loss(model, batch))
    optimizer.zero_grad()
    weights = sum(p.nbytes for p in model.parameters())
    with Ledger() as ledger:
        before = ledger.device_bytes
        plain_loss(model, batch).backward()
    assert found.peak_bytes - weights == pytest.approx(ledger.device_peak - before, rel=0.001)
    assert found.peak_phase in ("loss", "backward")
    assert found.peak["loss"] >= 2 * LENGTH * VOCAB * 4  # log-probabilities, and their gradient


def test_what_waits_on_the_host_is_not_the_devices():
    model, _, batch = trained(num_hidden_layers=6)
    found = []
    for offload in (False, True):
        with alstlib.apply(model, None, alstlib.Options(offload=offload, save_attention=False)) as handle:
            profile = memory_profile(model, lambda: alstlib.causal_lm_loss(model, batch).loss, handle=handle)
        found.append(max(point.get("checkpoints", 0) for point in profile.points))
        assert "loss" in profile.phases
        model.zero_grad()
    here, away = (nbytes / (LENGTH * 64 * 4) for nbytes in found)  # inputs of layers
    assert here >= 6
    assert away <= 2  # while layers still read it


@pytest.mark.parametrize("kept", [None, True, False], ids=["plain", "attached", "attention is not kept"])
def test_passes_are_told_apart(kept):
    """Attention runs again where its output is not kept, and nothing does without checkpoints."""
    model, optimizer, batch = trained()
    attached = kept is not None
    options = alstlib.Options(tiles=attached, checkpoint=attached, save_attention=bool(kept))
    with alstlib.apply(model, None, options):
        found = time_profile(model, lambda: alstlib.causal_lm_loss(model, batch).loss, optimizer, repeat=1)
    assert {*found} == {"forward", "backward", "optimizer", *(["recompute"] if attached else [])}
    for when in ("forward", "backward"):
        assert {"attention", "projections", "mlp", "loss", "hidden states"} <= {*found[when]}
    assert all(seconds > 0 for parts in found.values() for seconds in parts.values())
    if attached:
        assert ("attention" in found["recompute"]) != kept
        assert "mlp" in found["recompute"]
    assert all(p.grad is None for p in model.parameters())


def texts_of(part):
    return [text.get_text().strip() for text in part.texts]


def test_figures_have_every_part():
    _, found = plain_profile()
    (axes,) = step_plots.step_memory(found.phases, found.points, "one step", (WEIGHTS, OPTIMIZER)).axes
    legend = texts_of(axes.get_legend())[::-1]
    assert legend[:2] == [WEIGHTS, OPTIMIZER]
    assert {*legend} == {name for point in found.points for name in point}
    assert {*PHASES} <= {*texts_of(axes)}
    assert "peak" in " ".join(texts_of(axes))
    bars = step_plots.parts({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 4.0}}, "seconds", limit=(3.5, "what there is"))
    assert {*texts_of(bars.axes[0])} == {"3", "4", "what there is"}
    (named,) = step_plots.parts({"a": {"x": 1.0, "nothing": 0.0}}, "seconds", ends=["1 step"]).axes
    assert (texts_of(named), texts_of(named.get_legend())) == (["1 step"], ["x"])
