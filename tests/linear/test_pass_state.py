"""Convolution and recurrences over ranks against loops over the tokens of the whole sequence, in fp64."""

import functools

import pytest
import torch
import torch.distributed as dist
import yaml
from cases import on_ranks
from operators import gradients, leaf, nan_memory, randn, worst
from torch import nn

from alstlib import SPContext
from alstlib.base import reference
from alstlib.kernels.spans import Offsets
from alstlib.linear.adapters import lightning
from alstlib.linear.adapters.gated_delta import GatedDeltaRule
from alstlib.linear.adapters.mamba1 import SelectiveScan
from alstlib.linear.convolution import causal_convolution
from alstlib.linear.pass_state import pass_state
from alstlib.linear.rule import StateRule
from alstlib.ulysses.alltoall import Exchange

KEYS, VALUES = 3, 4
TOLERANCE = 1e-11

CASES = yaml.safe_load("""
whole: [2, 18, null]
documents inside, at and across the cuts: [1, 18, [0, 2, 6, 7, 17, 18]]
a document for each rank: [1, 18, [0, 6, 9, 12, 18]]
other documents in each row: [2, 12, [0, 1, 9, 12, 13, 17, 24]]
slices shorter than the convolution: [1, 6, [0, 1, 6]]
slices of one or two tokens, whole: [2, 6, null]
documents of four and five tokens, side by side: [2, 42, [0, 4, 9, 13, 16, 21, 25, 27, 30, 34, 39, 41, 42, 47, 52,
  56, 60, 65, 70, 74, 78, 83, 84]]
""")
"""Samples, tokens of each, and offsets of documents."""


def tokens_of(batch, length, *shapes):
    """A tensor for each of these shapes of a token."""
    return [randn(batch, length, *shape, seed=i) for i, shape in enumerate(shapes)]


def gated_inputs(batch, length, heads, groups):
    shapes = [groups, KEYS], [groups, KEYS], [heads, VALUES], [heads], [heads]
    q, k, v, g, beta = tokens_of(batch, length, *shapes)
    return [q, nn.functional.normalize(k, dim=-1), v, -nn.functional.softplus(g), beta.sigmoid()], []


def gated(*tensors, **how):
    q, k, v, *gates = tensors
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    return reference.gated_delta_rule(q, k, v, *gates, **how)


def kimi_inputs(batch, length, heads, groups):
    """Each key dimension decays by itself."""
    (q, k, v, _, beta), _ = gated_inputs(batch, length, heads, groups)
    return [q, k, v, -nn.functional.softplus(randn(batch, length, heads, KEYS, seed=3)), beta], []


def mamba1_inputs(batch, length, heads, groups):
    tokens = tokens_of(batch, length, [heads * VALUES], [heads * VALUES], [KEYS], [KEYS])
    channels = [randn(heads * VALUES, seed=i) for i in (5, 6)]
    return tokens, [-randn(heads * VALUES, KEYS, seed=4).exp(), *channels]


def mamba1(x, dt, b, c, a, d, bias, **how):
    return reference.mamba1(x, nn.functional.softplus(dt + bias), a, b, c, d, **how)


def scan(*tensors):
    out, state = mamba1(*tensors)
    return out, state.detach()  # as the backward of mamba-ssm's kernel takes it


def mamba_inputs(batch, length, heads, groups):
    x, dt, b, c = tokens_of(batch, length, [heads, VALUES], [heads], [groups, KEYS], [groups, KEYS])
    return [x, nn.functional.softplus(dt), b, c], [-randn(heads, seed=4).exp(), randn(heads, seed=5)]


def mamba(x, dt, b, c, a, d, **how):
    return reference.mamba2(x, dt, a, b, c, d, **how)


def lightning_inputs(batch, length, heads, groups):
    return tokens_of(batch, length, [heads, KEYS], [heads, KEYS], [heads, VALUES]), [randn(heads, seed=4).exp()]


RULES = {
    "gated delta rule": (gated_inputs, gated, GatedDeltaRule(gated), (2, 2)),
    "Kimi delta attention": (kimi_inputs, gated, GatedDeltaRule(gated), (2, 2)),
    "Mamba-1": (mamba1_inputs, mamba1, SelectiveScan(scan, softplus=True), (2, 1)),
    "Mamba-2": (
        mamba_inputs, mamba, StateRule(mamba, lambda x, dt, b, c, a, d: (dt * a).sum(1)[..., None, None]), (2, 1)
    ),
    "lightning attention": (
        lightning_inputs, reference.lightning,
        StateRule(
            lambda q, k, v, slopes, initial_state: lightning.decayed_attention(q, k, v, slopes, 4, initial_state),
            lambda q, k, v, slopes: (-slopes * q.shape[1]).expand(q.shape[0], -1)[..., None, None],
        ), (2, 2),
    ),
}  # fmt: skip
"""Inputs (of each token, and further ones), the oracle, the recurrence, and its heads and groups."""


def convolution_of(filters):
    channels, width = filters.shape
    return lambda x: nn.functional.conv1d(x, filters[:, None], padding=width - 1, groups=channels)[..., : x.shape[-1]]


def summed(got, count, world):
    """Gradients of which those after the first `count` are of weights, whose sum over all ranks is the gradient."""
    for grad in got[count:] if world > 1 else ():
        if grad is not None:
            dist.all_reduce(grad)
    return list(got)


def on_rank(
    rank, world, name, case, sizes = None, frozen = None,
    chunk = None, filtered = 0, again = False,
    ways = (pass_state,), tolerance = TOLERANCE,
):  # fmt: skip
    """This rank's part, by each way, is that of the oracle on the whole sequence and of the first way; returns, for
    each way, the bytes that it sends in a pass without gradients, and then with them.

    Args:
        sizes: heads and groups.
        frozen: the input that needs no gradient.
        chunk: of how many tokens of this rank are made one after the other.
        filtered: width of a convolution of its first input that precedes the recurrence; 0: there is none.
        again: the pass without gradients leaves what it knows for the other one.
    """
    (batch, length, documents), (make, plain, rule, usual) = case, RULES[name]
    tokens, weights = make(batch, length, *(sizes or usual))
    count, stop, size = len(tokens), len(tokens) + len(weights), tokens[0][0, 0].numel()
    constant = count if name == "lightning attention" else None  # its slopes
    whole = [leaf(t, needs=i not in (frozen, constant)) for i, t in enumerate([*tokens, *weights])]
    whole += [leaf(randn(size, filtered, seed=8))] * bool(filtered)
    offsets = None if documents is None else Offsets(documents)

    def oracle(*ts):
        x = ts[0]
        if filtered:
            x = reference.causal_convolution(x.flatten(2).transpose(1, 2), ts[-1], documents=documents)
        return plain(x.transpose(1, 2).view_as(ts[0]) if filtered else x, *ts[1:stop], documents=documents)[0]

    def over(way, exchange, known, *ts):
        outs, state, before, rows = [], None, None, chunk or ts[0].shape[1]
        for lo in range(0, ts[0].shape[1], rows):
            part, how = [t[:, lo : lo + rows] for t in ts[:count]], {"first": lo * world, "length": length}
            if filtered:
                x, filters = part[0].flatten(2).transpose(1, 2), convolution_of(ts[-1])
                more = {"start": before, "known": known[0], **how}
                x, before = causal_convolution(filters, x, filtered, exchange, offsets, **more)
                part[0] = x.transpose(1, 2).reshape_as(part[0])
            out, state = way(rule, part, ts[count:stop], exchange, offsets, start=state, known=known[1], **how)
            outs.append(out)
        return torch.cat(outs, 1)

    dout = randn(*oracle(*whole).shape, seed=9)
    want = gradients(oracle, whole, dout)
    own = torch.cat([p.chunk(world)[rank] for p in torch.arange(length).split(world * chunk if chunk else length)])
    mine = [leaf(t[:, own], needs=t.requires_grad) for t in whole[:count]] + whole[count:]
    group, found, bytes_sent = SPContext.create(world).sp_group, [], []
    for way in ways:
        exchange, known = Exchange(group), [{}, {}] if again else [None, None]
        with nan_memory(), torch.no_grad():
            first = over(way, exchange, known, *mine)
        sent = exchange.bytes_sent
        with nan_memory():
            got = gradients(functools.partial(over, way, exchange, known), mine, dout[:, own])
        bytes_sent.append((sent, exchange.bytes_sent - sent))
        found.append(summed(got, count + 1, world))
        oracles = [None if t is None else t[:, own] for t in want[: count + 1]] + list(want[count + 1 :])
        errors = worst([first], [got[0]]), worst(got, oracles, want), worst(got, found[0], want)
        assert max(errors) < tolerance, (way, errors)
    return bytes_sent


CHUNKED = yaml.safe_load("""
whole: [2, 24, null]
packed: [1, 24, [0, 2, 6, 7, 17, 24]]
rows of their own: [2, 24, [0, 1, 24, 30, 47, 48]]
""")
IN_CHUNKS = {
    **{name: (case, None) for name, case in CASES.items()},
    **{f"{name}-{chunk}": (case, chunk) for name, case in CHUNKED.items() for chunk in (2, 4)},
    "side by side-12": ((1, 72, (0, 2, 6, 11, 15, 20, 25, 29, 33, 38, 42, 47, 49, 53, 58, 62, 67, 71, 72)), 12),
}
"""Also from chunk to chunk of so many tokens."""


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("case, chunk", IN_CHUNKS.values(), ids=IN_CHUNKS)
@pytest.mark.parametrize("name, width", [*((name, 0) for name in RULES), *(("Mamba-2", n) for n in (1, 2, 4, 7))])
def test_a_state_goes_through_all_ranks(pools, name, width, case, chunk, world):
    """By itself, and after a convolution of so many tokens, which sees those of earlier ranks."""
    on_ranks(pools, world, on_rank, name, case, chunk=chunk, filtered=width)


@pytest.mark.parametrize("name", RULES)
def test_gradients_that_nobody_needs_are_not_made(pools, name):
    for frozen in range(3):
        on_ranks(pools, 3, on_rank, name, CASES["documents inside, at and across the cuts"], frozen=frozen)


@pytest.mark.parametrize("case", ["whole", "documents inside, at and across the cuts"])
@pytest.mark.parametrize("name", RULES)
def test_a_recompute_exchanges_only_gradients(pools, name, case):
    kept, plain = (on_ranks(pools, 3, on_rank, name, CASES[case], filtered=4, again=again) for again in (True, False))
    for ((first, again),), ((_, whole),) in zip(kept, plain):
        assert first + again == whole
        assert 0 < again <= first


def test_gradients_of_weights_are_summed_over_documents_in_fp32():
    """1,024 documents of one token, of which each contributes 1: a sum in bf16 ends at 256."""
    count = 1024
    x, step, b, c = (torch.ones(1, count, *shape, dtype=torch.bfloat16) for shape in ((1, 1), (1,), (1, 1), (1, 1)))
    a, d = leaf(-torch.ones(1, dtype=torch.bfloat16)), leaf(torch.zeros(1, dtype=torch.bfloat16))
    out, _ = pass_state(RULES["Mamba-2"][2], (x, step, b, c), (a, d), Exchange(), Offsets(range(count + 1)))
    out.sum().backward()
    assert d.grad.item() == count


@pytest.mark.parametrize("length", [2 * lightning.AT_ONCE, 2 * 3 * lightning.AT_ONCE + 3])
def test_chunks_of_lightning_attention_are_computed_together(length):
    """Whole groups of chunks of two tokens, a group that is not full, and half a chunk."""
    (q, k, v), (slopes,) = lightning_inputs(2, length, 3, 3)
    made = [leaf(x) for x in (q, k, v, randn(2, 3, KEYS, VALUES, seed=5))]
    got = lightning.decayed_attention(*made[:3], slopes, 2, made[3])
    want = reference.lightning(*made[:3], slopes, made[3])
    grads = (torch.autograd.grad(sum((x * x).sum() for x in outs), made) for outs in (got, want))
    assert worst(*((*outs, *each) for outs, each in zip((got, want), grads))) < TOLERANCE


def test_a_second_backward_is_refused():
    tokens, _ = gated_inputs(1, 4, 2, 2)
    out, _ = pass_state(RULES["gated delta rule"][2], [leaf(t) for t in tokens], (), Exchange(), Offsets((0, 2, 4)))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()
