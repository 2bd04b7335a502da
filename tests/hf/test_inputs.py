"""What belongs to one call: each wrong input is refused by name, each right one is exact."""

from __future__ import annotations

import gc
import itertools
import re
from typing import Any

import pytest
import torch
from cases import VOCAB, make_model
from torch import Tensor, nn

import alstlib
from alstlib.hf.inputs import OURS, take_call
from alstlib.kernels import spans
from alstlib.mesh import SPContext
from alstlib.reference import relative_error, shift

ONE = SPContext()
LENGTH = 12
ALL_ON = {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "offload": "async", "save_attention": True}


def ids(batch: int = 1, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def take(ctx: SPContext = ONE, **kwargs: Any) -> Any:
    return take_call((), kwargs, ctx)


def rank(index: int, sp: int = 2) -> SPContext:
    """A rank's place without its process group: enough for what is checked locally."""
    return SPContext(sp=sp, sp_rank=index)


# ----- what is refused

ARANGE = torch.arange(LENGTH)[None]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "needs input_ids or inputs_embeds"),
    "cache": ({"input_ids": ids(), "past_key_values": object()}, r"past_key_values, use_cache.* after detach\(\)"),
    "use_cache": ({"input_ids": ids(), "use_cache": True}, "use_cache"),
    "images": ({"input_ids": ids(), "pixel_values": torch.ones(1)}, "pixel_values is not supported: tokens attend"),
    "an encoder's states": (
        {"input_ids": ids(), "encoder_hidden_states": torch.ones(1)},
        "encoder_hidden_states is not",
    ),
    "token types": ({"input_ids": ids(), "token_type_ids": ids()}, "token_type_ids is not supported"),
    "tuple output": (
        {"input_ids": ids(), "shift_labels": ids(), "return_dict": False},
        "return_dict=False .*out.loss",
    ),
    "labels' shape": (
        {"input_ids": ids(), "shift_labels": ids(2)},
        r"shift_labels \[2, 12\] must have the shape of input_ids \[1, 12\]",
    ),
    "labels of embeddings": (
        {"inputs_embeds": torch.zeros(1, 12, 8), "labels": ids(1, 11)},
        r"shift_labels \[1, 11\] must have the shape of input_ids \[1, 12\]",
    ),
    "positions' length": (
        {"input_ids": ids(), "position_ids": ARANGE[:, 1:]},
        r"position_ids \[1, 11\] do not belong to inputs of 1 x 12 tokens",
    ),
    "positions' batch": (
        {"input_ids": ids(2), "position_ids": ARANGE.expand(3, -1)},
        r"position_ids \[3, 12\] do not belong to inputs of 2 x 12 tokens",
    ),
    "positions from 1": ({"input_ids": ids(), "position_ids": ARANGE + 1}, "position_ids must count from 0"),
    "positions with a gap": (
        {"input_ids": ids(), "position_ids": torch.tensor([[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]])},
        "position_ids must count from 0, starting again at 0 with each document",
    ),
    "positions that restart elsewhere": (
        {"input_ids": ids(), "position_ids": torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]])},
        "position_ids must count from 0",
    ),
    "documents' end": (
        {"input_ids": ids(), "cu_documents": torch.tensor([0, 5, 11])},
        r"cu_documents ends at 11, but 1 x 12 tokens on each of 1 ranks are 12",
    ),
    "no documents": ({"input_ids": ids(), "cu_documents": []}, "cu_documents ends at None"),
    "left padding": (
        {"input_ids": ids(), "attention_mask": (ARANGE > 2).long()},
        r"attention_mask has zeros .*pad on the right with labels -100",
    ),
    "hole": ({"input_ids": ids(), "attention_mask": (ARANGE != 5).long()}, "attention_mask has zeros"),
    "4D mask": (
        {"input_ids": ids(), "attention_mask": torch.ones(1, 1, 12, 12)},
        r"attention_mask of shape \[1, 1, 12, 12\] is not supported; give position_ids and cu_documents",
    ),
    "mask of masks": ({"input_ids": ids(), "attention_mask": {"full": None}}, "attention_mask dict is not supported"),
    "loss on padding": (
        {"input_ids": ids(), "shift_labels": ids(), "attention_mask": (ARANGE < 9).long()},
        "attention_mask has zeros",
    ),
}


@pytest.mark.parametrize("kwargs, message", REFUSED.values(), ids=REFUSED)
def test_wrong_inputs_are_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(**kwargs)


SHARDED: dict[str, tuple[dict[str, Any], str]] = {
    "labels": (
        {"input_ids": ids(), "position_ids": ARANGE, "labels": ids()},
        "labels must be shifted before the sequence is sharded.*SPDataLoader",
    ),
    "no positions": ({"input_ids": ids()}, "position_ids are missing: each rank"),
    "documents without positions": (
        {"input_ids": ids(), "cu_documents": torch.tensor([0, 24])},
        "position_ids are missing: each rank",
    ),
    "local positions": (
        {"input_ids": ids(), "position_ids": ARANGE},
        "position_ids of rank 1 do not run from 12 to 23: for packed documents or padding give cu_documents too",
    ),
    "local documents": (
        {"input_ids": ids(), "position_ids": ARANGE + 12, "cu_documents": torch.tensor([0, 12])},
        "cu_documents ends at 12, but 1 x 12 tokens on each of 2 ranks are 24: .* or the offsets are not global",
    ),
    "another rank's shape": (
        {"input_ids": ids(1, 11), "position_ids": ARANGE[:, :11] + 12, "cu_documents": torch.tensor([0, 24])},
        "cu_documents ends at 24, but 1 x 11 tokens on each of 2 ranks are 22: the ranks' shapes disagree",
    ),
    "padding": (
        {"input_ids": ids(), "position_ids": ARANGE + 12, "attention_mask": (ARANGE < 9).long()},
        "attention_mask has zeros",
    ),
}


@pytest.mark.parametrize("kwargs, message", SHARDED.values(), ids=SHARDED)
def test_wrong_shards_are_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(rank(1), **kwargs)


def test_inputs_by_position_are_refused() -> None:
    with pytest.raises(ValueError, match="give the model's inputs by name: input_ids"):
        take_call((ids(), torch.ones(1, LENGTH)), {}, ONE)


# ----- what is taken


def test_what_is_ours_does_not_reach_the_model() -> None:
    kwargs = {
        "input_ids": ids(2), "shift_labels": ids(2), "cu_documents": torch.tensor([0, 12, 24]), "step_tokens": 24,
        "num_items_in_batch": 5, "attention_mask": torch.ones(2, LENGTH), "position_ids": ARANGE, "own": 1,
    }  # fmt: skip
    call = take_call((), kwargs, ONE)
    assert set(kwargs) == {"input_ids", "position_ids", "own", "use_cache"}
    assert kwargs["use_cache"] is False
    assert not set(OURS) & set(kwargs)
    assert call.documents == (0, 12, 24)
    assert (call.divisor, call.saved) == (5, None)
    assert call.shift_labels is not None


@pytest.mark.parametrize(
    "kwargs, documents",
    [
        ({}, None),
        ({"position_ids": ARANGE}, (0, 12, 24)),
        ({"position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]])}, (0, 5, 12, 24)),
        ({"position_ids": ARANGE, "cu_documents": [0, 24]}, (0, 24)),
    ],
    ids=str,
)
def test_documents_of_one_rank(kwargs: dict[str, Any], documents: Any) -> None:
    assert take(input_ids=ids(2), **kwargs).documents == documents


def test_documents_of_a_shard_are_global() -> None:
    given = {"input_ids": ids(), "position_ids": torch.tensor([[*range(6, 8), *range(10)]])}
    assert take(rank(1), **given, cu_documents=torch.tensor([0, 6, 14, 24])).documents == (0, 6, 14, 24)


def test_labels_are_shifted_once() -> None:
    labels = ids(2)
    assert torch.equal(take(input_ids=ids(2), labels=labels).shift_labels, shift(labels))
    assert take(input_ids=ids(2), labels=labels, shift_labels=labels).shift_labels is labels
    assert take(input_ids=ids(2)).shift_labels is None


# ----- exactness on one rank


@pytest.fixture(params=["gqa", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check_same(model: nn.Module, want: Any, got: Any) -> None:
    want_loss, want_grads = want
    got_loss, got_grads = got
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert all(relative_error(g, w, 1e-6) < 1e-5 for g, w in zip(got_grads, want_grads, strict=True))


@pytest.mark.parametrize("options", [{}, ALL_ON], ids=["default", "all on"])
def test_labels_give_hugging_faces_own_loss(model: Any, options: dict[str, Any]) -> None:
    """Mean over the valid tokens, or the sum over `num_items_in_batch`; with the same gradients."""
    tokens, labels = ids(2), ids(2)
    labels[0, :7] = -100
    for more in ({}, {"num_items_in_batch": 40}):
        loss = model(tokens, labels=labels, **more).loss
        want = (loss.item(), grads(model, loss))
        with alstlib.apply(model, None, alstlib.Options(**options)):
            loss = model(tokens, labels=labels, **more).loss
            check_same(model, want, (loss.item(), grads(model, loss)))


@pytest.mark.parametrize("kind", ["ones", "right", "bool"])
def test_masks_that_may_be_dropped_are_exact(model: Any, kind: str) -> None:
    """All ones, and right padding without loss: plain transformers with the mask."""
    tokens, keep = ids(2), torch.ones(2, LENGTH, dtype=torch.long)
    if kind != "ones":
        keep[0, 8:], keep[1, 11:] = 0, 0
    mask = keep.bool() if kind == "bool" else keep
    labels = tokens.masked_fill(keep == 0, -100)
    plain = model(tokens, attention_mask=mask, labels=labels)
    want = (plain.loss.item(), grads(model, plain.loss))
    with alstlib.apply(model, None, alstlib.Options(**ALL_ON)):
        loss = model(tokens, attention_mask=mask, labels=labels).loss
        check_same(model, want, (loss.item(), grads(model, loss)))
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask).logits
    assert relative_error(logits[keep.bool()], plain.logits[keep.bool()]) < 1e-5


@pytest.mark.parametrize("how", ["position_ids", "cu_documents", "both"])
def test_packed_documents_are_those_one_by_one(model: Any, how: str) -> None:
    """Positions that start again, or offsets: logits of each document alone, and gradients of their sum."""
    lengths, tokens = [5, 1, 6], ids()
    pieces = tokens.split(lengths, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = torch.cat([shift(p) for p in pieces], 1)
    alone = [model(p).logits for p in pieces]
    total = sum(
        nn.functional.cross_entropy(a.flatten(0, 1), shift(p).flatten(), reduction="sum") for a, p in zip(alone, pieces)
    )
    want = (total.item() / 9, grads(model, total / 9))
    offsets = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    given = {"position_ids": positions} if how != "cu_documents" else {}
    given |= {"cu_documents": offsets} if how != "position_ids" else {}
    with alstlib.apply(model, None, alstlib.Options(**ALL_ON)):
        loss = model(tokens, shift_labels=labels, **given).loss
        check_same(model, want, (loss.item(), grads(model, loss)))
        with torch.no_grad():
            logits = model(tokens, **given).logits
    assert relative_error(logits, torch.cat(alone, 1)) < 1e-5


def test_documents_must_rise(model: Any) -> None:
    with alstlib.apply(model), pytest.raises(ValueError, match=r"cu_documents=\[0, 8, 5, 12\] must rise from 0"):
        model(ids(), position_ids=ARANGE, cu_documents=[0, 8, 5, 12])


def test_embeddings_in_place_of_tokens(model: Any) -> None:
    tokens = ids(2)
    embedded = model.get_input_embeddings()(tokens).detach()
    want = model(inputs_embeds=embedded, labels=tokens).loss.item()
    with alstlib.apply(model, None, alstlib.Options(**ALL_ON)):
        loss = model(inputs_embeds=embedded, labels=tokens).loss
        loss.backward()
    assert loss.item() == pytest.approx(want, rel=1e-6)


# ----- ranks that disagree


def refusal(index: int, world: int, case: str) -> str:
    """The message that each rank gets; no rank is left waiting."""
    ctx, batch, rows = SPContext.create(world), 1, LENGTH
    if case == "rows":
        rows -= index
    if case == "batch":
        batch += index
    positions = torch.arange(rows)[None] + index * rows
    if case == "positions":
        positions = positions - index * rows
    model = make_model("gqa")
    with alstlib.apply(model, ctx):
        try:
            if case == "positions":  # alone: the rank whose positions are right would go on to the first exchange
                take(ctx, input_ids=ids(batch, rows), position_ids=positions)
            else:
                model(input_ids=ids(batch, rows), position_ids=positions, shift_labels=ids(batch, rows))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "case, name", [("rows", r"the tokens of a rank: \[12, 11\]"), ("batch", r"batch size: \[1, 2\]")]
)
def test_ranks_of_different_shapes_all_get_an_error(ranks2: Any, case: str, name: str) -> None:
    for message in ranks2(refusal, case, timeout=60):
        assert message.startswith("the ranks of an SP group have different values of")
        assert re.search(name, message)


def test_local_positions_are_refused_where_they_are_wrong(ranks2: Any) -> None:
    first, second = ranks2(refusal, "positions", timeout=60)
    assert first == ""
    assert second.startswith("position_ids of rank 1 do not run from 12 to 23")


def test_positions_must_fit_the_documents() -> None:
    """Positions of a shard or of one long text beside the offsets of packed documents are wrong, and not silently."""
    with pytest.raises(ValueError, match=r"row 0, token 7 has position 7 where its document is at 0"):
        take(input_ids=ids(2), position_ids=ARANGE, cu_documents=[0, 7, 24])
    packed = torch.tensor([[*range(7), *range(5)]])
    assert take(input_ids=ids(), position_ids=packed, cu_documents=[0, 7, 12]).documents == (0, 7, 12)
    padded = torch.tensor([[*range(10), 0, 0]])
    assert take(input_ids=ids(), position_ids=padded, cu_documents=[0, 12]).documents == (0, 12)


def test_documents_of_a_call_are_cut_once_and_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers and passes of a step share what is found about its documents; the next packing finds it gone."""
    made: list[Any] = []
    before = [o for o in gc.get_objects() if type(o) is spans.Span]  # of models that other tests still hold
    init = spans.Span.__init__
    monkeypatch.setattr(spans.Span, "__init__", lambda self, *args: (made.append(args), init(self, *args))[1])
    model = make_model("gqa")
    with alstlib.apply(model):
        for seed in range(4):
            made.clear()
            ends = torch.randperm(63, generator=torch.Generator().manual_seed(seed))[:30].sort().values + 1
            offsets = [0, *ends.tolist(), 64]
            positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(offsets)])[None]
            out = model(torch.ones(1, 64).long(), labels=torch.ones(1, 64).long(), position_ids=positions)
            out.loss.backward()
            assert len(made) == 31
            del out
            gc.collect()
            alive = [o for o in gc.get_objects() if type(o) is spans.Span]
            assert [o for o in alive if not any(o is other for other in before)] == []
