"""What belongs to one call: each wrong input is refused by name, each right one is exact."""

import functools
import time

import pytest
import torch
import yaml
from cases import (
    ALL_OFF,
    ALL_ON,
    attach,
    check_refused,
    check_step,
    lines_of,
    make_model,
    own_step,
    plain_step,
    tokens_of,
)
from operators import error_of, randn
from torch import nn

import alstlib
from alstlib.base.mesh import SPContext
from alstlib.base.reference import relative_error, shift
from alstlib.data.agreement import check_same
from alstlib.data.shard import shard_batch
from alstlib.hf.inputs import take_call

ONE = SPContext()
SECOND = SPContext(sp=2, sp_rank=1)
"""A rank's place without its process group: enough for what is checked locally."""
LENGTH = 12


def ids(rows=1, length=LENGTH):
    return tokens_of(length, rows)


def take(ctx=ONE, **kwargs):
    return take_call(kwargs, ctx)


# ----- what is refused

ARANGE = torch.arange(LENGTH)[None]
REFUSED = yaml.safe_load(r"""
row: &row [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
positions: &positions [*row]
eleven: &eleven [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
later: &later [[12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]]

# of one rank
1:
- [{seq_idx: *positions}, 'seq_idx alone .*give position_ids or cu_seqlens']
- [{cu_seq_lens_q: [0, 5, 12], position_ids: *positions},
  'do not fit cu_seqlens: sample 0, token 5 has position 5 where its document is at 0']
- [{input_ids: null}, needs input_ids or inputs_embeds]
- [{past_key_values: a cache}, 'past_key_values is not supported: call generate\(\) with sp=1']
- [{input_features: [1]}, 'input_features is not supported: tokens attend']
- [{shift_labels: *positions, return_dict: false}, 'return_dict=False .*out.loss']
- [{shift_labels: [*row, *row]}, 'shift_labels \[2, 12\] must have the shape of input_ids \[1, 12\]']
- [{position_ids: *eleven}, 'position_ids \[1, 11\] do not belong to inputs of 1 x 12 tokens']
- [{position_ids: [[0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]]},
  'do not fit documents that begin with 0: sample 0, token 4 has position 1 where']
- [{cu_seqlens: [0, 5, 11]},
  'cu_seqlens=\[0, 5, 11\], which end at 11, must rise from 0 to 12, for 1 x 12 tokens on each of 1 ranks']
- [{position_ids: *positions, cu_seqlens: [0, 8, 5, 12]}, '\[0, 8, 5, 12\], which end at 12, must rise from 0']
- [{attention_mask: [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]},
  'attention_mask has zeros .*pad on the right with labels -100']
- [{attention_mask: [[[[1.0]]]]},
  'attention_mask of shape \[1, 1, 1, 1\], torch.float32, must have the shape of input_ids']
- [{attention_mask: {full: null}}, "attention_mask {'full': None} must have the shape"]
- [{input_ids: [1, 2]}, 'input_ids of shape \[2\], torch.int64, must be a tensor \[B, L\]']
- [{input_ids: 12}, 'input_ids 12 must be a tensor']
- [{cu_seqlens: 12}, cu_seqlens 12 must be one row of whole numbers]
- [{cu_seqlens: [0, 12.0]}, 'cu_seqlens of shape \[2\], torch.float32, must be one row']
- [{labels: *positions, num_items_in_batch: '5'}, num_items_in_batch='5' must be the]

# of the second of two ranks
2:
- [{position_ids: *positions, labels: *positions},
  'labels must be shifted before the sequence is sharded.*SPDataLoader']
- [{}, 'position_ids are missing: each rank']
- [{position_ids: *positions},
  'position_ids of rank 1 do not fit whole samples: .* where its document is at 12; for packed documents']
- [{position_ids: *later, cu_seqlens: [0, 12]},
  'end at 12, must rise from 0 to 24, for 1 x 12 tokens on each of 2 ranks: .* or the offsets are not global']
- [{input_ids: *eleven, position_ids: *eleven, cu_seqlens: [0, 24]},
  'which end at 24, must rise from 0 to 22, for 1 x 11 tokens on each of 2 ranks: the ranks'' shapes disagree']
""")


def tensors(fields):
    """Lists as tensors."""
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in fields.items()}


@pytest.mark.parametrize("ranks, fields, message", [(ranks, *row) for ranks in (1, 2) for row in REFUSED[ranks]])
def test_wrong_inputs_are_refused_by_name(ranks, fields, message):
    check_refused(message, take, SECOND if ranks == 2 else ONE, **{"input_ids": ids(), **tensors(fields)})


# ----- what is taken


def test_what_is_ours_does_not_reach_the_model():
    kwargs = {
        "input_ids": ids(2), "shift_labels": ids(2), "cu_seqlens": [0, 12, 24], "step_tokens": 24,
        "num_items_in_batch": 5, "attention_mask": torch.ones(2, LENGTH), "position_ids": ARANGE, "own": 1,
    }  # fmt: skip
    call = take_call(kwargs, ONE)
    assert kwargs.keys() == {"input_ids", "position_ids", "own", "use_cache"}
    assert kwargs["use_cache"] is False
    assert (call.documents, call.divisor) == ((0, 12, 24), 5)


DOCUMENTS = yaml.safe_load("""
positions: &positions [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
given:
- [{}, null]
- [{position_ids: *positions}, [0, 12, 24]]
- [{position_ids: [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]}, [0, 5, 12, 24]]
- [{position_ids: *positions, cu_seqlens: [0, 24]}, [0, 24]]
- [{cu_seq_lens_q: [0, 12, 24], cu_seqlens: [0, 24], max_length_q: 12}, [0, 24]]
- [{position_ids: [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]],
  cu_seqlens: [0, 7, 12, 19, 24]}, [0, 7, 12, 19, 24]]
# right padding beside the offsets may have the position 0
- [{position_ids: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]],
  cu_seqlens: [0, 12, 24]}, [0, 12, 24]]
""")["given"]


@pytest.mark.parametrize("fields, documents", DOCUMENTS, ids=str)
def test_documents_of_one_rank(fields, documents):
    assert take(input_ids=ids(2), **tensors(fields)).documents == (documents and tuple(documents))


def test_documents_of_a_shard_are_global_and_labels_are_shifted_once():
    tokens = ids()
    given = {"input_ids": tokens, "position_ids": torch.tensor([[*range(6, 8), *range(10)]])}
    assert take(SECOND, **given, cu_seqlens=[0, 6, 14, 24]).documents == (0, 6, 14, 24)
    for more, labels in (({}, shift(tokens)), ({"shift_labels": tokens}, tokens)):
        assert torch.equal(take(input_ids=tokens, labels=tokens, **more).labels, labels)


# ----- exactness on one rank


@pytest.fixture(params=["gqa", "gpt2"])
def model(request):
    return make_model(request.param)


RIGHT = torch.arange(LENGTH) < torch.tensor([[8], [11]])
CALLS = {
    "labels": {},
    "a number of labels": {"num_items_in_batch": 40},
    "ones": {"attention_mask": torch.ones(2, LENGTH).long()},
    "padding on the right": {"attention_mask": RIGHT.long()},
    "padding, as bool": {"attention_mask": RIGHT},
    "embeddings": {"input_ids": None, "inputs_embeds": randn(2, LENGTH, 32, dtype=torch.float32)},
}


@pytest.mark.parametrize("options", [{}, ALL_ON, ALL_OFF, {"chunk": 5}], ids=str)
@pytest.mark.parametrize("fields", CALLS.values(), ids=CALLS)
def test_calls_are_those_of_plain_transformers(model, fields, options):
    """Hugging Face's own loss, of its own labels, and its gradients; the same loss without gradients; and the logits
    where there are no labels, of tokens that are no padding."""
    given = {"input_ids": ids(2), **fields}
    labels, plain = ids(2).masked_fill(~RIGHT, -100), model(**given).logits
    want = own_step(model, **given, labels=labels)
    with attach(model, **options) as handle:
        check_step(own_step(model, **given, labels=labels), want)
        with torch.no_grad():
            out = model(**given, labels=labels)
            assert relative_error(model(**given).logits[RIGHT], plain[RIGHT]) < 1e-5
        assert out.loss.item() == pytest.approx(want[0], rel=1e-6)
        assert isinstance(out.logits, torch.Tensor) == (options is ALL_OFF)
        assert handle.store.leased == 0


@pytest.mark.parametrize("names", [["cu_seqlens"], ["cu_seq_lens_q", "cu_seq_lens_k"]], ids=str)
def test_packed_documents_are_those_one_by_one(model, names):
    """Offsets alone: each document as if it were alone. The net of whole steps (tests/matrix.py) has positions too."""
    sample = {"input_ids": ids(), "labels": ids(), "document_lengths": [[5, 1, 6]]}
    packed = shard_batch(sample, 1, 0)
    given = {"input_ids": ids(), "shift_labels": packed["shift_labels"], **dict.fromkeys(names, packed["cu_seqlens"])}
    want = plain_step(model, sample)
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


def alone_wrong(place):
    """What every rank is told, what is called, and what rank 1 calls in its place, with these fields of its own."""
    short, local = slice_of(place, LENGTH - 1), "position_ids of rank 1 do not fit whole samples"
    last = torch.where(ARANGE < 11, ARANGE + LENGTH * place, 0)
    return [
        ("the tokens of a rank: [12, 11]", loss, loss, short),
        ("the tokens of a rank: [12, 11]", call, call, short),
        ("the batch size: [1, 2]", call, call, slice_of(place, batch=2)),
        *((local, run, run, slice_of(0)) for run in (loss, call, alstlib.token_logps)),
        ("the documents: [None, (0, 23, 24)]", loss, loss, {"position_ids": last, "cu_seqlens": [0, 23, 24]}),
        ("cannot read images under sequence parallelism: known are", loss, loss, {"pixel_values": ARANGE}),
        ("the batch has no position_ids", blocks, blocks, {"position_ids": None}),
        ("the call: ['causal_lm_loss', 'block_step']", loss, blocks, {}),
        ("block: [5, 7]", blocks, functools.partial(blocks, block=7), {}),
        ("statistics: [False, True]", loss, functools.partial(loss, statistics=True), {}),
        ("torch.is_grad_enabled(): [True, False]", loss, torch.no_grad()(loss), {}),
    ]


def refused_alone(index, world, sp, engine):
    """What this rank was told, and the loss of a right step after. Of several replicas: no calls of the model, which
    are of one of them."""
    ctx, model, said = SPContext.create(sp), make_model(), []
    good = slice_of(ctx.sp_rank)
    with attach(model, ctx, save_attention=True):
        wrapped = nn.parallel.DistributedDataParallel(model) if engine == "ddp" else model
        start = time.monotonic()
        for message, right, wrong, fields in alone_wrong(ctx.sp_rank):
            if ctx.dp == 1 or right in (loss, blocks):
                run, fields = (wrong, fields) if index == 1 else (right, {})
                said.append(error_of(run, wrapped, {**good, **fields}))
                assert (message if ctx.dp == 1 else message.partition(":")[0]) in said[-1]
        assert time.monotonic() - start < 20
        return said, float(alstlib.causal_lm_loss(wrapped, good).mean)


@pytest.mark.parametrize("world, engine", [(2, "bare"), (2, "ddp"), (4, "ddp")])
def test_what_one_rank_refuses_ends_on_all(pools, world, engine):
    """Also in all replicas, with the reason, within seconds, and so that the next step is right."""
    (said, mean), *others = pools(world)(refused_alone, 2, engine, timeout=60)
    assert len(said) == (13 if world == 2 else 9)
    assert all(other == mean > 0 for _, other in others)
    assert any(one.startswith("rank 1 refused: ValueError: position_ids of rank 1") for one in said)


def told_apart(index, world):
    says = r"have different values of page: \['1', 1\], in the order of the ranks; give all the same"
    check_refused(says, check_same, SPContext.create(world), {"seed": 1, "page": ("1", 1)[index]}, "give all the same")


def test_a_number_and_its_digits_are_told_apart(ranks2):
    ranks2(told_apart, timeout=60)


def attached_alone(index, world):
    ctx, differ = (
        SPContext.create(world),
        r"have different values of Options.chunk: \[5, 7\], in the order of the ranks",
    )
    check_refused(differ, attach, make_model(), ctx, chunk=5 + 2 * index)
    attach(make_model(), ctx, host_memory=10**6 + index)
    dropping = make_model(attention_dropout=0.5 * index)
    check_refused(r"layer 0 \(LlamaAttention\) has attention dropout 0.5", attach, dropping, ctx)


def test_options_that_differ_between_ranks_are_refused_on_all(ranks2):
    """But the hosts' memory may differ."""
    ranks2(attached_alone, timeout=60)


# ----- types and shapes


WRONG = r"""
model(ids(), ARANGE)                      | give the model's inputs by name: input_ids
loss(model, [batch])                      | batch is of the type list; it must be a dict
loss(model, {**batch, "inputs_embeds": 1}) | has inputs_embeds, which would not reach the model: leave it out
blocks(model, batch, block="5")           | block='5' must be an integer of at least 1
logps(model, batch, temperature="1")      | temperature='1' must be a number above 0
logps(model, batch, temperature=0)        | temperature=0 must be a number above 0
loss(model, batch, look=3)                | look=3 must be a function
loss(model, batch, engine_divides_by=0)   | engine_divides_by=0 must be a number of at least 1
loss(model, batch, engine_divides_by=True) | engine_divides_by=True must be a number of at least 1
blocks(model, {**batch, "step_tokens": float("nan")}) | step_tokens=.* must be the number of labels of the whole
blocks(model, {**batch, "step_tokens": "9"}) | step_tokens=.* must be the number of labels of the whole optimizer step
blocks(model, {**batch, "step_tokens": torch.tensor(float("nan"))}) | step_tokens=.* must be the number of labels of
loss(model, batch, label_smoothing=2.0)   | label_smoothing=2.0 must be a number from 0 to 1
loss(model, batch, label_smoothing=-0.1)  | label_smoothing=-0.1 must be a number from 0 to 1
"""
OF_ALL = """
{"shift_labels": None} | the batch has no shift_labels; it has input_ids, position_ids, shift_labels
{"attention_mask": (ARANGE > 2).long()} | attention_mask has zeros
"""
"""Fields of a batch that no function takes."""
WRONG = lines_of(WRONG, "|")
WRONG += [
    (f"{run}(model, {{**batch, **{fields}}})", says)
    for run in ("loss", "blocks", "logps") for fields, says in lines_of(OF_ALL, "|")
]  # fmt: skip


@pytest.mark.parametrize("call, message", WRONG)
def test_every_wrong_type_shape_or_number_is_named(attached, call, message):
    names = {**globals(), "model": attached, "batch": slice_of(0), "logps": alstlib.token_logps}
    check_refused(message, eval, call, names)


@pytest.fixture(scope="module")
def attached():
    with attach(make_model()) as handle:
        yield handle.model


def test_fields_that_say_nothing_else_are_taken(attached):
    """What loaders put beside the fields of a batch, and a mask of ones."""
    fields = {**slice_of(0), "step_tokens": 40}
    more = {**fields, "seen_tokens": 12, "labels": ids(), "attention_mask": torch.ones(1, LENGTH)}
    want = loss(attached, fields).item()
    assert [run(attached, more).item() for run in (loss, blocks)] == pytest.approx([want] * 2, rel=1e-6)
