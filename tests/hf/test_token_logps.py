"""Log-probabilities and statistics of whole models, over ranks, against plain transformers; the trainers' tests have
them under engines."""

import copy
import functools

import pytest
import torch
import yaml
import zoo
from cases import attach, batch, check_refusals, each_document, gradients, make_model, on_ranks, worst_error
from operators import logps_of, randn
from test_block_step import LENGTH, PACKED, sample
from torch import nn

import alstlib
from alstlib.base import reference
from alstlib.base.reference import relative_error
from alstlib.data.shard import shard_batch
from alstlib.planner.measure.verify import in_full

WAYS = yaml.safe_load("""
- [{tiles: {mlp: true, loss: 4, norm: true}}, null]
- [{tiles: false, checkpoint: false}, null]
- [{chunk: 4}, null]
- [{tiles: {mlp: true, norm: true}, chunk: 4}, null]
- [{offload: sync, on_host: hidden+kv, chunk: 4}, null]
- [{}, 3]
- [{offload: sync, on_host: hidden+kv}, 4]
- [{}, 64]
""")
"""Options, and the length of a block. A slice of one of two ranks has 11 tokens: chunks of 4, 4 and 3."""


def plain(model, data, temperature=1.0):
    """Log-probabilities, entropies, correctness and mean logits [B, S] of plain transformers, documents one by one."""
    found = []
    for part in each_document(data):
        labels = reference.shift(part["labels"])
        logits = model(input_ids=part["input_ids"], use_cache=False).logits / temperature
        found.append((logps_of(logits, labels), *reference.head_statistics(logits.detach(), labels)))
    return tuple(torch.cat(parts, 1) for parts in zip(*found))


def part_of(whole, world, rank):
    """This rank's slice of [B, S], padded with zeros."""
    return nn.functional.pad(whole, (0, -whole.shape[1] % world)).chunk(world, 1)[rank]


def whole_sequences(sums):
    """A loss that is not linear in the log-probabilities."""
    return -nn.functional.logsigmoid(sums[0] - sums[1]) + (sums / 20).exp().mean()


def exact(rank, world, name, data, temperature):
    """Values, statistics and gradients of an fp64 model, of a loss of tokens and of whole sequences; and the loss's
    statistics, which are those of all tokens that count."""
    ctx, model, weights = alstlib.SPContext.create(world), zoo.build(name, torch.float64), randn(*data["labels"].shape)
    with in_full():
        twin = copy.deepcopy(model)
        data["labels"][:, 1:4] = twin(data["input_ids"]).logits.argmax(-1)[:, :3]  # some are right
        want, *wanted = plain(twin, data, temperature)
        lengths = data.get("document_lengths", [[LENGTH]] * len(want))
        sums = torch.stack([x.sum() for row, some in zip(want, lengths) for x in row.split(some)])
        loss = whole_sequences(sums) + (want.square() * weights).sum()
        loss.backward()
        want, valid = want.detach(), int((want != 0).sum())
        given, grads, mine = shard_batch(data, world, rank), gradients(twin), part_of(weights, world, rank)
        means = [float(of_tokens.sum()) / valid for of_tokens in wanted[:2]]
        assert 0 < means[1] < 1

        def objective(logps):
            own = (logps.square() * mine).sum() * world
            return whole_sequences(alstlib.sequence_logps(logps, given, ctx)) + own

        logps_of_model = functools.partial(alstlib.token_logps, model, given, temperature=temperature)
        for options, block in WAYS:
            with attach(model, ctx, **options):
                model.zero_grad()
                if block:
                    out = alstlib.block_step(model, given, block, objective=objective, temperature=temperature)
                    assert float(out.mean) == pytest.approx(-float(want.sum()) / valid, rel=1e-10)
                    assert world > 1 or float(out.loss) == pytest.approx(float(loss.detach()), rel=1e-10)
                else:
                    objective(logps_of_model()).backward()
                assert worst_error(gradients(model, world), grads)[0] < 1e-10, (options, block)
                with torch.no_grad():
                    logps, found = logps_of_model(block=block), logps_of_model(block=block, statistics=True)
                pairs = zip((logps, found.logps, found.entropy, found.mean_logits), (want, want, *wanted[::2]))
                for got, whole in pairs:
                    assert relative_error(got, part_of(whole, world, rank)) < 1e-11, (options, block)
                assert torch.equal(found.correct, part_of(wanted[1], world, rank)), (options, block)
                assert (logps.shape, logps.dtype) == (given["shift_labels"].shape, torch.float64)
                if temperature == 1.0 and not block:
                    out = alstlib.causal_lm_loss(model, given, statistics=True)
                    assert [out.entropy.item(), out.accuracy.item()] == pytest.approx(means, rel=1e-11)
                    assert not any(t.requires_grad for t in (out.entropy, out.accuracy))
                    assert alstlib.causal_lm_loss(model, given).entropy is None


@pytest.mark.parametrize(
    "name, world, documents, temperature",
    [("llama, 9 heads on 3", 2, PACKED, 1.0), ("gemma2", 3, None, 0.7), ("gemma2", 1, PACKED, 1.0)],
)
def test_values_and_gradients_of_plain_transformers(pools, name, world, documents, temperature):
    """Whole layers, chunks, whose tokens are dealt out anew, and blocks; packed documents; soft caps."""
    data = sample(documents, rows=1 if documents else 2)
    on_ranks(pools, world, exact, name, data, temperature)


# ----- one process


def test_sums_of_documents():
    """Padding of a packed batch is none; without offsets each row is one; whatever is summed keeps its gradient."""
    ids, ctx = torch.ones(2, 10, dtype=torch.long), alstlib.SPContext()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    data = {"input_ids": ids, "labels": ids, "attention_mask": mask, "document_lengths": [[3, 4], [10]]}
    values = torch.arange(24.0).view(2, 12).requires_grad_()
    padded = shard_batch(data, 1, 0, pad_to=12)
    assert alstlib.sequence_logps(values, padded, ctx).tolist() == [3, 18, sum(range(12, 22))]
    (alstlib.sequence_logps(values, {}, ctx) * torch.tensor([2.0, -1.0])).sum().backward()
    assert values.grad.unique(dim=1).tolist() == [[2.0], [-1.0]]
    assert alstlib.sequence_logps(torch.tensor([[2.0**24, 1.0, 1.0, 1.0]]), {}, ctx).item() == 2**24 + 3


REFUSED = r"""
alstlib.token_logps(model, given, block=4)                          | call token_logps under torch.no_grad
step(temperature=0.5)                                               | temperature=0.5 is of an objective
step(engine_divides_by=2, objective=torch.sum)                      | leave engine_divides_by out
step(4, objective=lambda x: x) | must return a tensor of one number, the loss; it returned of shape \[1, 21\]
alstlib.token_logps(experts, given) | have no load-balancing loss: use output_router_logits=False
"""


def test_refusals():
    given, model, experts = batch(21), make_model(), zoo.build("mixtral")
    with attach(model), attach(experts) as handle:
        step = functools.partial(alstlib.block_step, model, given)
        check_refusals(REFUSED, {**globals(), **locals()})
        assert handle.state is None
        experts.config.output_router_logits = False
        assert alstlib.token_logps(experts, given).shape == (1, 21)
