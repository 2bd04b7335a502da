"""Log-probabilities and statistics of whole models, over ranks, against plain transformers; the trainers' tests have
them under engines."""

import copy

import pytest
import torch
import zoo
from cases import ALL_OFF, attach, gradients, make_model, on_ranks, worst_error
from operators import error_of, randn
from test_block_step import PACKED, sample
from torch import nn

import alstlib
from alstlib import reference
from alstlib.data.shard import shard_batch
from alstlib.measure.verify import in_full
from alstlib.reference import relative_error

HOST = {"offload": "sync", "chunk": 4, "on_host": "hidden+kv"}
OPTIONS = [
    {"tiles": {"mlp": True, "loss": 4, "norm": True}},
    ALL_OFF,
    {"chunk": 4},
    {"tiles": {"mlp": True, "norm": True}, "chunk": 4},
    HOST,
]
"""A rank's slice has 11 tokens: chunks of 4, 4 and 3."""


def plain(model, data, temperature=1.0):
    """Log-probabilities, entropies, correctness and mean logits [B, S] of plain transformers, documents one by one."""
    lengths = data.get("document_lengths", [[data["input_ids"].shape[1]]])[0]
    found = []
    for ids, labels in zip(data["input_ids"].split(lengths, 1), data["labels"].split(lengths, 1)):
        labels, logits = reference.shift(labels), model(input_ids=ids, use_cache=False).logits / temperature
        logps = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)
        found.append((logps, *reference.head_statistics(logits.detach(), labels)))
    return tuple(torch.cat(parts, 1) for parts in zip(*found))  # type: ignore[return-value]


def part_of(whole, world, rank):
    """This rank's slice of [B, S], padded with zeros."""
    return nn.functional.pad(whole, (0, -whole.shape[1] % world)).chunk(world, 1)[rank]


def exact(rank, world, name, data, temperature):
    """Values, statistics and gradients of an fp64 model, whose tokens have random upstream gradients."""
    ctx, model = alstlib.SPContext.create(world), zoo.build(name, torch.float64)
    weights = randn(*data["input_ids"].shape, seed=4)
    with in_full():
        twin = copy.deepcopy(model)
        want, entropy, correct, mean = plain(twin, data, temperature)
        (want * weights).sum().backward()
        grads = gradients(twin)
    batch = shard_batch(data, world, rank)
    for options in OPTIONS:
        with attach(model, ctx, **options), in_full():
            model.zero_grad()
            logps = alstlib.token_logps(model, batch, temperature=temperature)
            again = alstlib.token_logps(model, batch, statistics=True, temperature=temperature)
            (logps * part_of(weights, world, rank)).sum().mul(world).backward()
            for got, whole in ((logps, want), (again.entropy, entropy), (again.mean_logits, mean)):
                assert relative_error(got, part_of(whole, world, rank)) < 1e-11, options
            assert relative_error(again.logps, logps) < 1e-11, options
            assert worst_error(gradients(model, world), grads)[0] < 1e-11, options
            assert torch.equal(again.correct, part_of(correct, world, rank)), options
            assert logps.shape == batch["shift_labels"].shape
            assert logps.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "world", "documents", "temperature"),
    [("llama, 9 heads on 3", 2, PACKED, 1.0), ("gemma2", 2, None, 0.7), ("gemma2", 1, PACKED, 1.0)],
)
def test_values_and_gradients_of_plain_transformers(pools, name, world, documents, temperature):
    """Whole layers and chunks, whose tokens are dealt out anew; packed documents; soft caps."""
    data = sample(documents, rows=1 if documents else 2)
    on_ranks(pools, world, exact, name, data, temperature)


# ----- statistics of the loss


def loss_statistics(rank, world):
    """Entropy and accuracy for several options, of the loss and block by block; then those of plain transformers."""
    ctx, model, data = alstlib.SPContext.create(world), make_model("gemma2"), sample()
    logits = model(data["input_ids"], use_cache=False).logits.detach()
    data["labels"][:, 1:8] = logits.argmax(-1)[:, :7]  # some are right
    labels = reference.shift(data["labels"])
    entropy, correct, _ = reference.head_statistics(logits, labels)
    valid = int((labels != -100).sum())
    assert 7 <= int(correct.sum()) < valid
    batch, found = shard_batch(data, world, rank), []
    for options in OPTIONS:
        with attach(model, ctx, **options):
            found.append(alstlib.causal_lm_loss(model, batch, statistics=True))
            assert alstlib.causal_lm_loss(model, batch).entropy is None
            found[-1].loss.backward()
            if "chunk" not in options:
                found += [alstlib.block_step(model, batch, n, statistics=True) for n in (4, 64)]
                assert alstlib.block_step(model, batch, 4).accuracy is None
    assert not any(out.entropy.requires_grad or out.accuracy.requires_grad for out in found)
    want = [float(entropy.sum()) / valid, int(correct.sum()) / valid]
    return [*([out.entropy.item(), out.accuracy.item()] for out in found), want]


@pytest.mark.parametrize("world", [1, 2])
def test_statistics_are_those_of_all_valid_tokens(pools, world):
    for *found, want in on_ranks(pools, world, loss_statistics):
        assert len(found) == 9
        for got in found:
            assert got == pytest.approx(want, rel=1e-6)


# ----- one process


def test_sums_of_documents():
    """Padding of a packed batch is none; without offsets each row is one; whatever is summed keeps its gradient."""
    ids, ctx = torch.ones(2, 10, dtype=torch.long), alstlib.SPContext()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    data = {"input_ids": ids, "labels": ids, "attention_mask": mask, "document_lengths": [[3, 4], [10]]}
    values = torch.arange(24.0).view(2, 12).requires_grad_()
    batch = shard_batch(data, 1, 0, pad_to=12)
    assert alstlib.sequence_logps(values, batch, ctx).tolist() == [3, 18, sum(range(12, 22))]
    sums = alstlib.sequence_logps(values, {}, ctx)
    assert sums.tolist() == [sum(range(12)), sum(range(12, 24))]
    (sums * torch.tensor([2.0, -1.0])).sum().backward()
    assert values.grad.unique(dim=1).tolist() == [[2.0], [-1.0]]  # type: ignore[union-attr]
    batch = shard_batch({"input_ids": ids, "labels": ids, "document_lengths": [[3, 7], [10]]}, 1, 0)
    assert alstlib.sequence_logps(values[:, :10], batch, ctx).numel() == 3  # a row's end is the next row's start
    assert alstlib.sequence_logps(torch.tensor([[2.0**24, 1.0, 1.0, 1.0]]), {}, ctx).item() == 2**24 + 3


def test_refusals():
    batch, model, experts = shard_batch(sample(), 1, 0), make_model("gqa"), zoo.build("mixtral")
    assert "attach the model with alstlib.apply first" in error_of(alstlib.token_logps, model, batch)
    with attach(model):
        assert "the batch has no shift_labels" in error_of(alstlib.token_logps, model, {**batch, "shift_labels": None})
        assert "temperature=0 must be a number above 0; 1.0 leaves" in error_of(
            alstlib.token_logps, model, batch, temperature=0
        )
    with attach(experts) as handle:
        assert "have no load-balancing loss: use output_router_logits=False" in error_of(
            alstlib.token_logps, experts, batch
        )
        assert handle.state is None
        experts.config.output_router_logits = False
        assert alstlib.token_logps(experts, batch).shape == batch["shift_labels"].shape
