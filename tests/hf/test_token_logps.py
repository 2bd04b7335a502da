"""Log-probabilities and statistics of whole models, over ranks and engines, against plain transformers."""

from __future__ import annotations

import copy
from typing import Any

import matrix
import pytest
import torch
import zoo
from cases import ALL_OFF, Fields, attach, gradients, make_model, on_ranks, worst_error
from operators import randn
from test_block_step import LENGTH, PACKED, sample
from torch import Tensor, nn

import alstlib
from alstlib import reference
from alstlib.data.shard import shard_batch
from alstlib.measure.verify import in_full
from alstlib.reference import relative_error

HOST: Fields = {"offload": "sync", "chunk": 4, "on_host": "hidden+kv"}
OPTIONS: list[Fields] = [
    {"tiles": {"mlp": True, "loss": 4, "norm": True}},
    ALL_OFF,
    {"chunk": 4},
    {"tiles": {"mlp": True, "norm": True}, "chunk": 4},
    HOST,
]
"""A rank's slice has 11 tokens: chunks of 4, 4 and 3."""


def plain(model: Any, data: Fields, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, correctness and mean logits [B, S] of plain transformers, documents one by one."""
    lengths = data.get("document_lengths", [[data["input_ids"].shape[1]]])[0]
    found = []
    for ids, labels in zip(data["input_ids"].split(lengths, 1), data["labels"].split(lengths, 1)):
        labels, logits = reference.shift(labels), model(input_ids=ids, use_cache=False).logits / temperature
        logps = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)
        found.append((logps, *reference.head_statistics(logits.detach(), labels)))
    return tuple(torch.cat(parts, 1) for parts in zip(*found))  # type: ignore[return-value]


def part_of(whole: Tensor, world: int, rank: int) -> Tensor:
    """This rank's slice of [B, S], padded with zeros."""
    return nn.functional.pad(whole, (0, -whole.shape[1] % world)).chunk(world, 1)[rank]


def exact(rank: int, world: int, name: str, data: Fields, temperature: float) -> None:
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
def test_values_and_gradients_of_plain_transformers(
    pools: Any, name: str, world: int, documents: Any, temperature: float
) -> None:
    """Whole layers and chunks, whose tokens are dealt out anew; packed documents; soft caps."""
    data = sample(documents, rows=1 if documents else 2)
    on_ranks(pools, world, exact, name, data, temperature)


# ----- sums under engines


def pairs(seed: int, packed: bool) -> Fields:
    """A chosen and a rejected sample, of unequal length: two rows, or two documents of a row; a prompt counts not."""
    ids = torch.randint(3, zoo.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :5] = -100
    if not packed:
        mask = torch.ones_like(ids)
        mask[1, 14:], labels[1, 14:] = 0, -100
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
    ids, labels = (torch.cat([t[:1], t[1:, :14]], 1) for t in (ids, labels))
    return {"input_ids": ids, "labels": labels, "document_lengths": [[LENGTH, 14]]}


def preference(sums: Tensor) -> Tensor:
    """A loss that is no sum over tokens, as DPO's is none."""
    return -nn.functional.logsigmoid(0.3 * (sums[0] - sums[1] + 0.5))


def plain_sums(model: Any, data: Fields) -> Tensor:
    """[2], of a chosen and a rejected sample."""
    logps = plain(model, data)[0]
    return torch.stack([t.sum() for t in logps.split(data["document_lengths"][0], 1)]) if "document_lengths" in data \
        else logps.sum(1)  # fmt: skip


def engine_step(rank: int, world: int, kind: str, sp: int, tied: bool) -> None:
    """Gradients of a preference loss, against one process; and statistics of the loss under the same engine."""
    ctx, model = alstlib.SPContext.create(sp), make_model("gqa", tie_word_embeddings=tied)
    model.model.layers[0].mlp.requires_grad_(False)
    samples = [pairs(i, packed=i == 1) for i in range(ctx.dp)] if ctx.dp > 1 else [pairs(1, packed=True)]
    twin = copy.deepcopy(model)
    sums = [plain_sums(twin, s) for s in samples]
    (sum(preference(s) for s in sums) / ctx.dp).backward()  # type: ignore[union-attr]
    want = gradients(twin)
    batch = shard_batch(samples[ctx.dp_rank], sp, ctx.sp_rank)
    attach(model, ctx, tiles={"mlp": True, "loss": 4, "norm": True})
    engine = matrix.engine_of(model, kind, 1)
    got_sums = alstlib.sequence_logps(alstlib.token_logps(engine, batch), batch, ctx)
    loss = preference(got_sums)
    engine.backward(loss) if kind == "zero3" else loss.backward()
    got = matrix.gradients(model, kind)
    with torch.no_grad():
        out = alstlib.causal_lm_loss(engine, batch, statistics=True)
        every = [plain(twin, s) for s in samples]
    if kind == "zero3":
        engine.destroy()
    valid = sum(int(logps.ne(0).sum()) for logps, *_ in every)
    assert valid == int(out.tokens)
    assert got_sums.dtype == torch.float64
    assert relative_error(got_sums, sums[ctx.dp_rank]) < 1e-6
    error, name = worst_error(got, want)
    assert error < 1e-5, name
    logged = [-out.mean.item(), out.entropy.item(), out.accuracy.item()]  # type: ignore[union-attr]
    assert logged == pytest.approx(
        [sum(float(t.sum()) for t in kind) / valid for kind in list(zip(*every))[:3]], rel=1e-5
    )
    assert logged[1] > 0


@pytest.mark.parametrize(
    ("kind", "sp", "tied"),
    [("ddp", 2, True), ("ddp", 1, False), ("fsdp2", 2, False), ("zero3", 2, False), ("zero3", 1, False)],
)
def test_sums_and_statistics_under_engines(ranks2: Any, kind: str, sp: int, tied: bool) -> None:
    """After the engine's average, gradients are those of the mean over replicas of the loss of the sums."""
    ranks2(engine_step, kind, sp, tied)


# ----- statistics of the loss


def loss_statistics(rank: int, world: int) -> list[list[float]]:
    """Entropy and accuracy for several options, of the loss and block by block; then those of plain transformers."""
    ctx, model, data = alstlib.SPContext.create(world), make_model("gemma2"), sample()
    logits = model(data["input_ids"], use_cache=False).logits.detach()
    best = logits.argmax(-1)
    data["labels"][:, 1:8] = best[:, :7]  # some are right
    labels = reference.shift(data["labels"])
    entropy, correct, _ = reference.head_statistics(logits, labels)
    valid = int((labels != -100).sum())
    assert 7 <= int(correct.sum()) < valid
    batch, found = shard_batch(data, world, rank), []
    for options in OPTIONS:
        with attach(model, ctx, **options):
            out = alstlib.causal_lm_loss(model, batch, statistics=True)
            found.append(out)
            assert alstlib.causal_lm_loss(model, batch).entropy is None
            out.loss.backward()
            if "chunk" not in options:
                found += [alstlib.block_step(model, batch, n, statistics=True) for n in (4, 64)]
                assert alstlib.block_step(model, batch, 4).accuracy is None
    assert not any(out.entropy.requires_grad or out.accuracy.requires_grad for out in found)
    want = [float(entropy.sum()) / valid, int(correct.sum()) / valid]
    return [*([out.entropy.item(), out.accuracy.item()] for out in found), want]


@pytest.mark.parametrize("world", [1, 2])
def test_statistics_are_those_of_all_valid_tokens(pools: Any, world: int) -> None:
    for *found, want in on_ranks(pools, world, loss_statistics):
        assert len(found) == 9
        for got in found:
            assert got == pytest.approx(want, rel=1e-6)


def test_statistics_without_a_valid_token() -> None:
    model, data = make_model("gqa"), sample()
    data["labels"][:] = -100
    with attach(model):
        out = alstlib.causal_lm_loss(model, shard_batch(data, 1, 0), statistics=True)
    assert (out.entropy.item(), out.accuracy.item(), out.mean.item()) == (0, 0, 0)  # type: ignore[union-attr]


# ----- one process


@pytest.mark.parametrize("options", [{}, {"offload": "sync"}, HOST], ids=str)
def test_two_forwards_before_a_backward(options: Fields) -> None:
    """Chosen and rejected one after the other; and an evaluation in between."""
    model, batches = make_model("gqa"), [shard_batch(sample(), 1, 0), shard_batch(sample(PACKED), 1, 0)]
    twin = copy.deepcopy(model)
    (plain(twin, sample())[0].sum() - 2 * plain(twin, sample(PACKED))[0].sum()).backward()
    with attach(model, **options) as handle:
        first, second = (alstlib.token_logps(model, b) for b in batches)
        with torch.no_grad():
            assert torch.equal(alstlib.token_logps(model, batches[0]), first)
        (first.sum() - 2 * second.sum()).backward()
        del first, second
        assert handle.store.leased == 0
    assert worst_error(gradients(model), gradients(twin))[0] < 1e-5


def test_sums_of_documents() -> None:
    """Padding of a packed batch is none; without offsets each row is one; whatever is summed keeps its gradient."""
    ids = torch.ones(2, 10, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    data = {"input_ids": ids, "labels": ids, "attention_mask": mask, "document_lengths": [[3, 4], [10]]}
    batch, ctx = shard_batch(data, 1, 0, pad_to=12), alstlib.SPContext()
    values = torch.arange(24.0).view(2, 12).requires_grad_()
    assert alstlib.sequence_logps(values, batch, ctx).tolist() == [3, 18, sum(range(12, 22))]
    sums = alstlib.sequence_logps(values, {}, ctx)
    assert sums.tolist() == [sum(range(12)), sum(range(12, 24))]
    (sums * torch.tensor([2.0, -1.0])).sum().backward()
    assert torch.equal(values.grad, torch.tensor([2.0, -1.0])[:, None].expand(2, 12))  # type: ignore[arg-type]
    whole = {**data, "attention_mask": torch.ones_like(ids), "document_lengths": [[3, 7], [10]]}
    batch = shard_batch(whole, 1, 0)  # no padding: a row's end is the next row's start
    assert alstlib.sequence_logps(values[:, :10], batch, ctx).numel() == 3
    assert alstlib.sequence_logps(torch.tensor([[2.0**24, 1.0, 1.0, 1.0]]), {}, ctx).item() == 2**24 + 3


def test_refusals() -> None:
    batch, model = shard_batch(sample(), 1, 0), make_model("gqa")
    with pytest.raises(ValueError, match=r"attach the model with alstlib\.apply first"):
        alstlib.token_logps(model, batch)
    with attach(model):
        with pytest.raises(ValueError, match="the batch has no shift_labels"):
            alstlib.token_logps(model, {**batch, "shift_labels": None})
        with pytest.raises(ValueError, match=r"temperature=0 must be a number above 0; 1\.0 leaves"):
            alstlib.token_logps(model, batch, temperature=0)
    experts = zoo.build("mixtral")
    experts.config.output_router_logits = True
    with attach(experts) as handle:
        with pytest.raises(ValueError, match="have no load-balancing loss: use output_router_logits=False"):
            alstlib.token_logps(experts, batch)
        assert handle.call is None
        experts.config.output_router_logits = False
        assert alstlib.token_logps(experts, batch).shape == batch["shift_labels"].shape
