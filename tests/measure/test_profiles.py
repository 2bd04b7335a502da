"""Profiles of a step: bytes add up to the ledger's, states are what they are, passes are told apart."""

import pytest
import torch
from cases import make_model
from step_profiles import PHASES, memory_profile, time_profile

import alstlib
from alstlib.figures import step_plots
from alstlib.offload.ledger import Ledger
from alstlib.planner.model_states import GRADIENTS, OPTIMIZER, WEIGHTS

LENGTH, VOCAB = 96, 512
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)


def trained(length=LENGTH, **shape):
    """A model, its optimizer after a first step, and input."""
    model = make_model("gqa", **{**SHAPE, **shape})
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, ids


def plain_profile(length=LENGTH):
    model, optimizer, ids = trained(length)
    return model, memory_profile(model, lambda: model(input_ids=ids, labels=ids).loss, optimizer)


def test_states_are_what_they_are():
    """fp32 and AdamW: 4 bytes of weights, 8 of moments (and a counter for each tensor), 4 of gradients."""
    model, found = plain_profile()
    numbers = sum(p.numel() for p in model.parameters())
    counters = 4 * len(list(model.parameters()))
    first, last = found.points[0], found.points[-1]
    assert first == {WEIGHTS: 4 * numbers, OPTIMIZER: 8 * numbers + counters}
    assert {name: last.get(name, 0) for name in STATES} == {**first, GRADIENTS: 4 * numbers}
    assert sum(last.values()) - sum(last[name] for name in STATES) < 100  # all activations are gone: a loss is left


def test_phases_come_in_order():
    _, found = plain_profile()
    assert len(found.phases) == len(found.points)
    assert list(dict.fromkeys(found.phases)) == list(PHASES)
    assert sorted(found.phases, key=PHASES.index) == found.phases


def test_peak_is_the_ledgers():
    model, optimizer, ids = trained()

    def forward():
        loss = model(input_ids=ids, labels=ids).loss
        return loss

    found = memory_profile(model, forward)
    optimizer.zero_grad()
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    weights = sum(p.nbytes for p in model.parameters())
    with Ledger() as ledger:
        before = ledger.device_bytes
        forward().backward()
    assert found.peak_bytes - weights == pytest.approx(ledger.device_peak - before, rel=0.001)
    assert moments == 8 * weights // 4 + 4 * len(list(model.parameters()))
    assert found.peak_phase in ("loss", "backward")
    assert found.peak["loss"] >= 2 * LENGTH * VOCAB * 4  # log-probabilities, and their gradient


def test_twice_the_tokens_are_twice_the_activations():
    (_, one), (_, two) = plain_profile(LENGTH), plain_profile(2 * LENGTH)
    for name in (WEIGHTS, OPTIMIZER):
        assert two.peak[name] == one.peak[name]
    for name in set(one.peak) - {*STATES}:
        assert two.peak[name] == pytest.approx(2 * one.peak[name], rel=0.02), name


def test_what_waits_on_the_host_is_not_the_devices():
    model, _, ids = trained(num_hidden_layers=6)
    batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None], "shift_labels": ids.roll(-1, 1)}
    found = {}
    for offload in (False, True):
        with alstlib.apply(model, None, alstlib.Options(offload=offload, save_attention=False)) as handle:
            profile = memory_profile(model, lambda: alstlib.causal_lm_loss(model, batch).loss, handle=handle)
            found[offload] = max(point.get("checkpoints", 0) for point in profile.points)
            assert "loss" in profile.phases
        model.zero_grad()
    one_input = LENGTH * SHAPE["hidden_size"] * 4
    assert found[False] >= 6 * one_input
    assert found[True] <= 2 * one_input  # while layers still read it


@pytest.mark.parametrize("attached", [False, True])
def test_passes_are_told_apart(attached):
    model, optimizer, ids = trained()
    options = alstlib.Options(tiles=attached, checkpoint=attached, save_attention=attached)
    with alstlib.apply(model, None, options):
        batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None], "shift_labels": ids.roll(-1, 1)}
        found = time_profile(model, lambda: alstlib.causal_lm_loss(model, batch).loss, optimizer, repeat=1)
    assert set(found) == {"forward", "backward", "optimizer", *(["recompute"] if attached else [])}
    for when in ("forward", "backward"):
        assert {"attention", "projections", "mlp", "loss", "hidden states"} <= set(found[when])
    assert all(seconds > 0 for parts in found.values() for seconds in parts.values())
    if attached:
        assert "attention" not in found["recompute"], "outputs are kept: no kernel runs again"
        assert found["recompute"]["mlp"] > 0
    assert all(p.grad is None for p in model.parameters())


def test_attention_runs_again_where_its_output_is_not_kept():
    model, _, ids = trained()
    batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None], "shift_labels": ids.roll(-1, 1)}
    with alstlib.apply(model, None, alstlib.Options(save_attention=False)):
        found = time_profile(model, lambda: alstlib.causal_lm_loss(model, batch).loss, repeat=1)
    assert found["recompute"]["attention"] > 0


def test_figures_have_every_part():
    _, found = plain_profile()
    axes = step_plots.step_memory(found.phases, found.points, "one step", (WEIGHTS, OPTIMIZER)).axes[0]
    legend = [text.get_text() for text in axes.get_legend().get_texts()][::-1]
    assert legend[:2] == [WEIGHTS, OPTIMIZER]
    assert set(legend) == {name for point in found.points for name in point}
    assert set(PHASES) <= {text.get_text() for text in axes.texts}
    assert any("peak" in text.get_text() for text in axes.texts)
    bars = step_plots.parts({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 4.0}}, "seconds", limit=(3.5, "what there is")).axes[
        0
    ]
    assert {text.get_text().strip() for text in bars.texts} == {"3", "4", "what there is"}
    named = step_plots.parts({"a": {"x": 1.0, "nothing": 0.0}}, "seconds", ends=["1 step"]).axes[0]
    assert [text.get_text().strip() for text in named.texts] == ["1 step"]
    assert [text.get_text() for text in named.get_legend().get_texts()] == ["x"]
