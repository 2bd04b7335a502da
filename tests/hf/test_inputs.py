"""What belongs to one call: each wrong input is refused by name, each right one is exact."""

import functools
import gc
import re
import time

import pytest
import torch
from cases import ALL_ON, attach, check_step, make_model, own_step, plain_step, tokens_of
from operators import counted
from torch import nn

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.hf.inputs import OURS, take_call
from alstlib.kernels import spans
from alstlib.mesh import SPContext
from alstlib.reference import relative_error, shift

ONE = SPContext()
LENGTH = 12


def ids(rows=1, length=LENGTH):
    return tokens_of(length, rows)


def take(ctx=ONE, **kwargs):
    return take_call((), kwargs, ctx)


def rank(index, sp=2):
    """A rank's place without its process group: enough for what is checked locally."""
    return SPContext(sp=sp, sp_rank=index)


# ----- what is refused

ARANGE = torch.arange(LENGTH)[None]
REFUSED = {
    "packings that disagree": (
        {"cu_seq_lens_q": [0, 5, 12], "cu_seq_lens_k": torch.tensor([0, 6, 12])},
        r"cu_seq_lens_q=\[0, 5, 12\] and cu_seq_lens_k=\[0, 6, 12\] disagree about where documents begin",
    ),
    "packing and positions": (
        {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "position_ids": ARANGE},
        "do not fit cu_seq_lens_q: micro-batch row 0, token 5 has position 5 where its document is at 0",
    ),
    "packing's shape": ({"seq_idx": ARANGE[0]}, r"seq_idx \[12\] must be a tensor \[1, 12\]"),
    "nothing": ({"input_ids": None}, "needs input_ids or inputs_embeds"),
    "cache": ({"past_key_values": object()}, r"past_key_values, use_cache.* after detach\(\)"),
    "images": ({"pixel_values": torch.ones(1)}, "pixel_values is not supported: tokens attend"),
    "tuple output": (
        {"shift_labels": ids(), "return_dict": False},
        "return_dict=False .*out.loss",
    ),
    "labels' shape": (
        {"shift_labels": ids(2)},
        r"shift_labels \[2, 12\] must have the shape of input_ids \[1, 12\]",
    ),
    "positions' length": (
        {"position_ids": ARANGE[:, 1:]},
        r"position_ids \[1, 11\] do not belong to inputs of 1 x 12 tokens",
    ),
    "positions that restart elsewhere": (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]])},
        "position_ids must count from 0",
    ),
    "documents' end": (
        {"cu_seqlens": torch.tensor([0, 5, 11])},
        r"cu_seqlens ends at 11, but 1 x 12 tokens on each of 1 ranks are 12",
    ),
    "documents that fall": (
        {"position_ids": ARANGE, "cu_seqlens": [0, 8, 5, 12]},
        r"\[0, 8, 5, 12\] must rise from 0",
    ),
    "left padding": (
        {"attention_mask": (ARANGE > 2).long()},
        r"attention_mask has zeros .*pad on the right with labels -100",
    ),
    "4D mask": (
        {"attention_mask": torch.ones(1, 1, 12, 12)},
        r"attention_mask of shape \[1, 1, 12, 12\] is not supported; give position_ids and cu_seqlens",
    ),
    "mask of masks": ({"attention_mask": {"full": None}}, "attention_mask dict is not supported"),
}


@pytest.mark.parametrize("kwargs, message", REFUSED.values(), ids=REFUSED)
def test_wrong_inputs_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        take(**{"input_ids": ids(), **kwargs})


SHARDED = {
    "labels": (
        {"position_ids": ARANGE, "labels": ids()},
        "labels must be shifted before the sequence is sharded.*SPDataLoader",
    ),
    "no positions": ({}, "position_ids are missing: each rank"),
    "local positions": (
        {"position_ids": ARANGE},
        "position_ids of rank 1 do not run from 12 to 23: for packed documents or padding give cu_seqlens too",
    ),
    "local documents": (
        {"position_ids": ARANGE + 12, "cu_seqlens": torch.tensor([0, 12])},
        "cu_seqlens ends at 12, but 1 x 12 tokens on each of 2 ranks are 24: .* or the offsets are not global",
    ),
    "another rank's shape": (
        {"input_ids": ids(1, 11), "position_ids": ARANGE[:, :11] + 12, "cu_seqlens": torch.tensor([0, 24])},
        "cu_seqlens ends at 24, but 1 x 11 tokens on each of 2 ranks are 22: the ranks' shapes disagree",
    ),
    "packing of a slice": (
        {"position_ids": ARANGE + 12, "seq_idx": (ARANGE > 4).int()},
        "seq_idx of a slice does not tell where documents begin",
    ),
}


@pytest.mark.parametrize("kwargs, message", SHARDED.values(), ids=SHARDED)
def test_wrong_shards_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        take(rank(1), **{"input_ids": ids(), **kwargs})


# ----- what is taken


def test_what_is_ours_does_not_reach_the_model():
    kwargs = {
        "input_ids": ids(2), "shift_labels": ids(2), "cu_seqlens": torch.tensor([0, 12, 24]), "step_tokens": 24,
        "num_items_in_batch": 5, "attention_mask": torch.ones(2, LENGTH), "position_ids": ARANGE, "own": 1,
    }  # fmt: skip
    call = take_call((), kwargs, ONE)
    assert set(kwargs) == {"input_ids", "position_ids", "own", "use_cache"}
    assert kwargs["use_cache"] is False
    assert not set(OURS) & set(kwargs)
    assert call.inputs.documents == (0, 12, 24)
    assert (call.inputs.divisor, call.saved) == (5, None)
    assert call.inputs.labels is not None


@pytest.mark.parametrize(
    "kwargs, documents",
    [
        ({}, None),
        ({"position_ids": ARANGE}, (0, 12, 24)),
        ({"position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]])}, (0, 5, 12, 24)),
        ({"position_ids": ARANGE, "cu_seqlens": [0, 24]}, (0, 24)),
        ({"seq_idx": (ARANGE > 4).int().expand(2, -1)}, (0, 5, 12, 17, 24)),
        ({"cu_seq_lens_q": [0, 12, 24], "cu_seqlens": [0, 24], "max_length_q": 12}, (0, 24)),
        ({"position_ids": torch.tensor([[*range(7), *range(5)]] * 2), "cu_seqlens": [0, 7, 12, 19, 24]},
         (0, 7, 12, 19, 24)),
        ({"position_ids": torch.tensor([[*range(10), 0, 0]] * 2), "cu_seqlens": [0, 12, 24]}, (0, 12, 24)),
    ],
    ids=str,
)  # fmt: skip
def test_documents_of_one_rank(kwargs, documents):
    """Right padding beside the offsets may have the position 0."""
    assert take(input_ids=ids(2), **kwargs).inputs.documents == documents


def test_documents_of_a_shard_are_global_and_labels_are_shifted_once():
    given = {"input_ids": ids(), "position_ids": torch.tensor([[*range(6, 8), *range(10)]])}
    assert take(rank(1), **given, cu_seqlens=torch.tensor([0, 6, 14, 24])).inputs.documents == (0, 6, 14, 24)
    assert torch.equal(take(input_ids=ids(), labels=ids()).inputs.labels, shift(ids()))
    assert torch.equal(take(input_ids=ids(), labels=ids(), shift_labels=ids()).inputs.labels, ids())
    with pytest.raises(ValueError, match="give the model's inputs by name: input_ids"):
        take_call((ids(), torch.ones(1, LENGTH)), {}, ONE)


# ----- exactness on one rank


@pytest.fixture(params=["gqa", "gpt2"])
def model(request):
    return make_model(request.param)


@pytest.mark.parametrize("options", [{}, ALL_ON], ids=["default", "all on"])
def test_labels_give_hugging_faces_own_loss(model, options):
    """Mean over the valid tokens, or the sum over `num_items_in_batch`; with the same gradients."""
    labels = ids(2)
    labels[0, :7] = -100
    for more in ({}, {"num_items_in_batch": 40}):
        given = {"input_ids": ids(2), "labels": labels, **more}
        want = own_step(model, **given)
        with attach(model, **options):
            check_step(own_step(model, **given), want)


@pytest.mark.parametrize("kind", ["ones", "right", "bool"])
def test_masks_that_may_be_dropped_are_exact(model, kind):
    """All ones, and right padding without loss: plain transformers with the mask."""
    tokens, keep = ids(2), torch.ones(2, LENGTH, dtype=torch.bool)
    if kind != "ones":
        keep[0, 8:], keep[1, 11:] = False, False
    given = {"input_ids": tokens, "attention_mask": keep if kind == "bool" else keep.long()}
    labels, plain = tokens.masked_fill(~keep, -100), model(**given).logits
    want = own_step(model, **given, labels=labels)
    with attach(model, **ALL_ON):
        check_step(own_step(model, **given, labels=labels), want)
        with torch.no_grad():
            assert relative_error(model(**given).logits[keep], plain[keep]) < 1e-5


@pytest.mark.parametrize("how", ["position_ids", "cu_seqlens", "both", "cu_seq_lens", "seq_idx"])
def test_packed_documents_are_those_one_by_one(model, how):
    """Positions that start again, or offsets: logits of each document alone, and gradients of their sum."""
    lengths, tokens = [5, 1, 6], ids()
    packed = shard_batch({"input_ids": tokens, "labels": tokens, "document_lengths": lengths}, 1, 0)
    positions, offsets = {"position_ids": packed["position_ids"]}, {"cu_seqlens": packed["cu_seqlens"]}
    forms = {
        "position_ids": positions, "cu_seqlens": offsets, "both": {**positions, **offsets},
        "cu_seq_lens": {"cu_seq_lens_q": packed["cu_seqlens"], "cu_seq_lens_k": packed["cu_seqlens"]},
        "seq_idx": {"seq_idx": (packed["position_ids"] == 0).cumsum(1).int()},
    }  # fmt: skip
    want = plain_step(model, {"input_ids": tokens, "labels": tokens, "document_lengths": [lengths]})
    with attach(model, **ALL_ON):
        check_step(own_step(model, input_ids=tokens, shift_labels=packed["shift_labels"], **forms[how]), want)
        with torch.no_grad():
            logits = model(tokens, **forms[how]).logits
    assert relative_error(logits, torch.cat([model(p).logits for p in tokens.split(lengths, 1)], 1)) < 1e-5


def test_embeddings_in_place_of_tokens(model):
    given = {"inputs_embeds": model.get_input_embeddings()(ids(2)).detach(), "labels": ids(2)}
    want = own_step(model, **given)
    with attach(model, **ALL_ON):
        check_step(own_step(model, **given), want)


# ----- ranks that disagree


def slice_of(index, rows=LENGTH, batch=1):
    return {
        "input_ids": ids(batch, rows), "position_ids": torch.arange(rows)[None] + index * rows,
        "shift_labels": ids(batch, rows),
    }  # fmt: skip


def loss(model, batch, **given):
    return alstlib.causal_lm_loss(model, batch, **given).loss


def blocks(model, batch, block=5):
    return alstlib.block_step(model, batch, block=block).loss


def call(model, batch):
    return model(**batch).loss


def without_graph(model, batch):
    with torch.no_grad():
        return loss(model, batch)


def alone_wrong(case, place, one):
    """A slice, and what is called with it; on the one rank that is wrong, something else."""
    what, _, how = case.partition(", ")
    run = {"blocks": blocks, "log-probabilities": alstlib.token_logps, "model": call}.get(how, loss)
    good = slice_of(place)
    last = {**good, "position_ids": good["position_ids"] * (good["position_ids"] < 23), "cu_seqlens": [0, 23, 24]}
    kinds = {
        "rows": (slice_of(place, LENGTH - one), run),
        "batch": (slice_of(place, batch=1 + one), run),
        "local positions": (slice_of(0 if one else place), run),
        "the whole sample on every rank": (slice_of(0, 2 * LENGTH), run),
        "documents": (last if one else {**good, "cu_seqlens": [0, 24]}, run),
        "a field": ({**good, "pixel_values": torch.ones(1) if one else None}, run),
        "no positions": ({**good, "position_ids": None if one else good["position_ids"]}, run),
        "calls": (good, blocks if one else loss),
        "block": (good, functools.partial(blocks, block=7 if one else 5)),
        "statistics": (good, functools.partial(loss, statistics=one)),
        "gradients": (good, without_graph if one else loss),
    }
    return kinds[what]


ALONE = {
    "rows": r"the tokens of a rank: \[12, 11\]",
    "rows, model": r"the tokens of a rank: \[12, 11\]",
    "batch, model": r"the batch size: \[1, 2\]",
    "local positions": "position_ids of rank 1 do not run from 12 to 23",
    "local positions, model": "position_ids of rank 1 do not run from 12 to 23",
    "local positions, log-probabilities": "position_ids of rank 1 do not run from 12 to 23",
    "the whole sample on every rank": "position_ids of rank 1 do not run from 24 to 47",
    "documents": r"the documents: \[\(0, 24\), \(0, 23, 24\)\]",
    "a field": "the batch has pixel_values, which would not reach the model",
    "no positions, blocks": "the batch has no position_ids",
    "calls": r"the call: \[causal_lm_loss, block_step\]",
    "block": r"block: \[5, 7\]",
    "statistics": r"statistics: \[False, True\]",
    "gradients": r"torch.is_grad_enabled\(\): \[True, False\]",
}
"""What only rank 1 has another way, and what every rank is told."""
CALLS = (", model", ", log-probabilities")
"""Of one replica."""


def refused_alone(index, world, sp, engine):
    """The message of each case on this rank; the seconds that all of them took; and the loss of a right step after."""
    ctx, model, messages = SPContext.create(sp), make_model("gqa"), {}
    with attach(model, ctx, save_attention=True):
        wrapped = nn.parallel.DistributedDataParallel(model) if engine == "ddp" else model
        start = time.monotonic()
        for case in ALONE:
            if ctx.dp > 1 and case.endswith(CALLS):
                continue  # these are calls of one replica
            batch, run = alone_wrong(case, ctx.sp_rank, index == 1)
            try:
                run(wrapped, batch)
            except ValueError as error:
                messages[case] = str(error)
        seconds = time.monotonic() - start
        return messages, seconds, float(alstlib.causal_lm_loss(wrapped, slice_of(ctx.sp_rank)).mean)


@pytest.mark.parametrize("world, engine", [(2, "bare"), (2, "ddp"), (4, "ddp")])
def test_what_one_rank_refuses_ends_on_all(pools, world, engine):
    """Also in all replicas, with the reason, within seconds, and so that the next step is right."""
    results = pools(world)(refused_alone, 2, engine, timeout=60)
    for messages, seconds, mean in results:
        assert [*messages] == [case for case in ALONE if world == 2 or not case.endswith(CALLS)]
        for case, message in messages.items():
            if world == 2 or case in ("local positions", "a field", "rows"):
                assert re.search(ALONE[case], message), (case, message)
        assert seconds < 20
        assert mean == results[0][2] > 0
    assert results[0][0]["local positions"].startswith("rank 1 refused: ValueError: position_ids of rank 1")


def attached_alone(index, world):
    messages = []
    for options, dropout in (({"chunk": 5 + 2 * index}, 0.0), ({"host_memory": 10**6 + index}, 0.0), ({}, 0.5 * index)):
        model = make_model("gqa", attention_dropout=dropout)
        try:
            attach(model, SPContext.create(world), **options).detach()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_options_that_differ_between_ranks_are_refused_on_all(ranks2):
    """But the hosts' memory may differ."""
    for chunks, memory, dropout in ranks2(attached_alone, timeout=60):
        assert "have different values of Options.chunk: [5, 7], in the order of the ranks" in chunks
        assert memory == ""
        assert "config.attention_dropout=0.5 is not supported" in dropout


# ----- types and shapes


def small_batch(**other):
    return {"input_ids": ids(), "position_ids": ARANGE, "shift_labels": ids(), **other}


def no_scale(q, k, v, causal):
    raise AssertionError("it is not called")


def forward(model, fields):
    return model(**{"input_ids": ids(), **fields})


LEFT = {"attention_mask": (ARANGE > 2).long()}
DIVISOR = "engine_divides_by={!r} must be a whole number of at least 1"
TOKENS = "step_tokens=.* must be the number of labels of the whole optimizer step"
SMOOTHING = "label_smoothing={!r} must be a number from 0 to 1"
WRONG = [
    (forward, {"labels": ids().float()}, "labels has dtype torch.float32; .* torch.int64"),

    (forward, {"input_ids": ids()[0]}, r"input_ids has shape \[12\]; it must be \[B, L\]"),
    (forward, {"input_ids": [[1, 2]]}, "input_ids is of the type list"),

    (forward, {"input_ids": None, "inputs_embeds": torch.ones(12, 32)}, r"inputs_embeds has shape \[12, 32\]"),
    (forward, {"position_ids": ARANGE[0]}, r"position_ids has shape \[12\]"),

    (forward, {"attention_mask": ARANGE[:, :7]}, r"attention_mask \[1, 7\] must have the shape of input_ids \[1, 12\]"),
    (forward, {"cu_seqlens": 12}, "cu_seqlens 12 must be one row of whole numbers"),
    (forward, {"cu_seqlens": torch.tensor([0, 12.0])},
     r"cu_seqlens of shape \[2\] and torch.float32 must be one row"),

    (forward, {"labels": ids(), "num_items_in_batch": "5"}, "num_items_in_batch='5' must be the"),
    (lambda model, batch: loss(model, [batch]), {}, "batch is of the type list; it must be a dict"),
    (loss, {"inputs_embeds": torch.ones(1, 12, 32)},
     "the batch has inputs_embeds, which would not reach the model: leave it out"),


    *((run, LEFT, "attention_mask has zeros") for run in (loss, blocks, alstlib.token_logps)),
    (functools.partial(blocks, block="5"), {}, "block='5' must be an integer of at least 1"),
    (functools.partial(alstlib.token_logps, temperature="1"), {}, "temperature='1' must be a number above 0"),
    (functools.partial(loss, look=3), {}, "look=3 must be a function"),
    (lambda model, _: model.resize_token_embeddings(100), {}, r"resize_token_embeddings\(\) .*: call detach\(\) first"),
    *((functools.partial(loss, engine_divides_by=n), {}, DIVISOR.format(n))
      for n in (float("nan"), "2", 0, True)),
    *((blocks, {"step_tokens": n}, TOKENS)
      for n in (0, -5, float("nan"), "9", torch.tensor(0), torch.tensor(-1.0), torch.tensor(float("nan")))),
    *((functools.partial(loss, label_smoothing=n), {}, SMOOTHING.format(n)) for n in (2.0, -0.1, float("nan"), "0.1")),
]  # fmt: skip


@pytest.mark.parametrize("run, fields, message", WRONG, ids=[message for *_, message in WRONG])
def test_every_wrong_type_shape_or_number_is_named(attached, run, fields, message):
    with pytest.raises(ValueError, match=message):
        run(attached, fields if run is forward else small_batch(**fields))


@pytest.mark.parametrize(
    "given, message",
    [
        ((None, {"chunk": 5}), "options={'chunk': 5} must be Options"),
        ((2,), "ctx=2 must be an SPContext"),
        ((SPContext(sp=2),), r"ctx=SPContext\(sp=2.* no process group .*SPContext.create\(sp=2\)"),
        (
            (None, alstlib.Options(attention=no_scale)),
            r"attention=no_scale must take \(q, k, v, \*, scale, causal\): .*scale",
        ),
    ],
)
def test_wrong_arguments_of_apply_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        alstlib.apply(make_model(), *given)


@pytest.fixture(scope="module")
def attached():
    with attach(make_model()) as handle:
        yield handle.model


def test_fields_that_say_nothing_else_are_taken(attached):
    """What loaders put beside the fields of a batch, and a mask of ones."""
    more = {"step_tokens": 40, "seen_tokens": 12, "labels": ids(), "attention_mask": torch.ones(1, LENGTH)}
    want = loss(attached, small_batch(step_tokens=40)).item()
    for run in (loss, blocks):
        assert run(attached, small_batch(**more)).item() == pytest.approx(want, rel=1e-6)


def test_documents_of_a_call_are_cut_once_and_go_with_it():
    """All layers and passes of a step share what is found about its documents; the next packing finds it gone."""

    def alive():
        gc.collect()
        return sum(type(o) is spans.Span for o in gc.get_objects())

    with attach(make_model("gqa")) as handle, counted(spans.Span, "__init__") as made:
        before = alive()  # of models that other tests still hold
        for documents in (range(1, 17), range(3, 11)):
            made.clear()
            positions = torch.cat([torch.arange(n) for n in documents])[None]
            tokens = ids(1, sum(documents))
            out = handle.model(tokens, labels=tokens, position_ids=positions)
            assert alive() > before, "the reading can tell"
            out.loss.backward()
            assert made.total() == len(documents)
            del out
            assert alive() == before
