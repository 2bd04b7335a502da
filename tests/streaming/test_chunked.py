"""Layers streamed in row chunks: exact against the whole layer, in O(chunk) memory, no work and no byte in vain."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import attach, batch, make_model, passes, peak, small_pages, step
from operators import EXACT, error_of, gradients, leaf, nan_memory, randn, worst
from torch import Tensor, nn

import alstlib
from alstlib.kernels import paged
from alstlib.mesh import SPContext
from alstlib.offload.host_store import HostStore
from alstlib.offload.ledger import Ledger
from alstlib.reference import attention
from alstlib.streaming.chunked import RowChunk, Stream
from alstlib.ulysses.attention import UlyssesAttention

HEADS, KV, WIDTH = 4, 2, 4
E = HEADS * WIDTH


def toy(x: Tensor, weights: Sequence[Tensor], attend: Any) -> Tensor:
    """A layer: projections, attention, residual, MLP. Its attention is whatever `attend` does."""
    qkv = (x.tanh() @ weights[0].T).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
    x = x + attend(*qkv.split([HEADS, KV, KV], 1)).transpose(1, 2).flatten(2)
    return x + (x @ weights[1].T).tanh() @ weights[2].T


def toy_weights(layers: int = 2, dtype: torch.dtype = torch.float64, frozen: Sequence[int] = ()) -> list[Tensor]:
    """Projections, MLP and sinks of each layer, one list."""
    shapes = [((HEADS + 2 * KV) * WIDTH, E), (24, E), (E, 24), (HEADS,)] * layers
    made = [randn(*s, seed=2 + i, scale=0.3, dtype=dtype) for i, s in enumerate(shapes)]
    return [leaf(w, needs=i % 4 not in frozen) for i, w in enumerate(made)]


def whole_layers(x: Tensor, *weights: Tensor, sinks: bool = False, **rule: Any) -> Tensor:
    for ws in zip(*[iter(weights)] * 4):
        how = {"scale": WIDTH**-0.5, "sinks": ws[3] if sinks else None, **rule}
        x = toy(x, ws, lambda q, k, v, how=how: attention(q, k, v, **how)[0])
    return x


def streamed_layers(
    x: Tensor, *weights: Tensor, op: UlyssesAttention, store: HostStore, chunk: int, keep: bool,
    documents: list[int] | None = None, **how: Any,
) -> Tensor:  # fmt: skip
    """The same in row chunks."""
    for *ws, _ in zip(*[iter(weights)] * 4):

        def run(part: Tensor, piece: RowChunk, ws: Any = ws) -> Tensor:
            return toy(part, ws, functools.partial(piece.attend, op, documents=documents))

        def trains(ws: Any = ws) -> list[Tensor]:
            return [w for w in ws if w.requires_grad]

        x = Stream(run=run, chunk=chunk, ranks=1, store=store, keep=keep, params=trains, **how)(x)
    return x


WHERE: list[dict[str, Any]] = [
    {}, {"kv_on_host": True}, {"travels": True}, {"travels": True, "kv_on_host": True},
]  # fmt: skip
"""Where what is as long as the sequence lies."""


CASES: dict[str, dict[str, Any]] = {
    "even": {"rows": 12, "chunk": 4},
    "ragged": {"rows": 13, "chunk": 5},
    "one row": {"rows": 1, "chunk": 3},
    "chunks of one row": {"rows": 5, "chunk": 1},
    "one chunk": {"rows": 7, "chunk": 7},
    "batch": {"rows": 9, "chunk": 4, "batch": 2},
    "documents": {"rows": 13, "chunk": 5, "documents": [0, 1, 6, 13]},
    "documents of a batch": {"rows": 8, "chunk": 3, "batch": 2, "documents": [0, 5, 8, 9, 16]},
    "document over a row's end": {"rows": 8, "chunk": 3, "batch": 2, "documents": [0, 5, 11, 16]},
    "frozen": {"rows": 11, "chunk": 4, "frozen": (0, 2)},
    "input without gradient": {"rows": 11, "chunk": 4, "needs": False},
    "many pages": {"rows": 17, "chunk": 2, "documents": [0, 1, 6, 17]},
    "many pages of a batch": {"rows": 9, "chunk": 1, "batch": 2},
}


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("mode", ["none", "sync"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_streamed_layers_are_whole_layers(case: dict[str, Any], dtype: torch.dtype, mode: Any, keep: bool) -> None:
    rows, count, documents = case["rows"], case.get("batch", 1), case.get("documents")
    x = leaf(randn(rows, count, E, dtype=dtype).transpose(0, 1), needs=case.get("needs", True))  # not contiguous
    upstream = randn(count, rows, E, seed=1, scale=3.0, dtype=dtype)
    inputs, before = [x, *toy_weights(2, dtype, case.get("frozen", ()))], x.detach().clone()
    want = gradients(functools.partial(whole_layers, documents=documents), inputs, upstream, torch.float64)
    found = []
    for where in WHERE if mode != "none" else WHERE[:1]:
        store, op = HostStore(mode), UlyssesAttention(SPContext())
        how = {**where, "chunk": case["chunk"], "keep": keep, "documents": documents, "store": store, "op": op}
        with nan_memory(), small_pages():
            got = gradients(functools.partial(streamed_layers, **how), inputs, upstream)
        found.append([t if t is None else t.clone() for t in got])  # which may lie in a slab
        del got
        gc.collect()
        assert torch.equal(x.detach(), before), "the input was changed"
        assert store.nbytes == sum(s.bytes.numel() for s in store.free), "a slab was not given back"
    assert worst(found[0], want) < EXACT[dtype]
    for way, got in zip(WHERE, found):
        assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(got, found[0])), way


# ----- a whole model


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    ("kind", "tile", "mlp"),
    [("gqa", True, 2), ("gqa", 4, 2), ("qwen3", True, 2), ("gpt2", 4, 2), ("gemma2", True, 2), ("gemma2", 4, 2.9)],
)
def test_what_runs_how_often(monkeypatch: pytest.MonkeyPatch, kind: str, tile: Any, mlp: float, save: bool) -> None:
    """Attention once or twice; the MLP twice, even where its output is normalised, unless tiles are smaller than the
    chunk there; projections of all but the last chunk once more, for their keys and values."""
    model, rows, kernel = make_model(kind), [0], paged.forward
    monkeypatch.setattr(paged, "forward", lambda *a, **kw: (rows.append(a[1].shape[2]), kernel(*a, **kw))[1])
    found, tiles = passes(monkeypatch, model), {"mlp": tile, "loss": True, "norm": True}
    with attach(model, tiles=tiles, save_attention=save, chunk=6) as handle:
        for _ in range(2):  # the first step learns the layers
            rows.clear()
            for counts in found.values():
                counts[:] = [0, 0]
            before = handle.attention.forward_calls
            step(model, batch())
        assert handle.attention.forward_calls - before == 2 * (1 if save else 2)
    per_row = [n / 20 / 2 for n in (sum(rows), sum(found["mlp"]), sum(found["query"]))]
    assert per_row == [1 if save else 2, mlp, 2 + 18 / 20]


@pytest.mark.slow
def test_working_memory_is_of_the_chunk() -> None:
    """From 256 to 512 rows the peak grows by what stays whole: layer input, output, gradients, keys and values (and
    their fp32 gradients); nothing of the MLP, queries or norms."""
    width, kv = 32, 16  # two key/value heads of 8

    def peak_of(length: int, chunk: int | None) -> int:
        gc.collect()  # models of earlier tests, which would be freed in between
        model = make_model("gqa", num_hidden_layers=3, intermediate_size=256, max_position_embeddings=2048)
        more = {"tiles": {"loss": 64, "norm": True}, "offload": "sync", "save_attention": True}
        return peak(model, batch(length), chunk=chunk, **more)

    # per row: x (turns into its gradient), the gradient that came in, K, V, dK, dV, cos and sin, tokens and labels
    whole = 4 * (2 * width + 2 * kv + 2 * kv + 2 * 8) + 5 * 8
    growth = (peak_of(512, 64) - peak_of(256, 64)) / 256
    assert growth < 1.1 * whole, (growth, whole)
    assert (peak_of(512, None) - peak_of(256, None)) / 256 > 3 * growth  # the reading can fail


def test_kept_outputs_leave_the_device_with_their_chunk() -> None:
    """Attention outputs that wait on the host for backward are nowhere on the device while later chunks run."""
    rows, chunk = 256, 8
    peaks = []
    for keep in (False, True):
        x, store = randn(1, rows, E).requires_grad_(), HostStore("sync")
        with Ledger("cpu", [store]) as ledger:
            start = ledger.device_bytes
            streamed_layers(x, *toy_weights(1), op=UlyssesAttention(SPContext()), store=store, chunk=chunk, keep=keep)
            peaks.append(ledger.device_peak - start)
    one = chunk * (E + HEADS) * x.element_size()  # a chunk's output and logsumexp
    assert peaks[1] - peaks[0] < 4 * one


# ----- refusals


def refused(rank: int, world: int) -> list[str]:
    ctx, model = SPContext.create(world), make_model("gqa")
    shard = {k: v for k, v in batch(24, world=world, rank=rank).items() if not k.endswith("tokens")}
    ids, labels = shard["input_ids"], shard["shift_labels"]
    embeds = model.model.embed_tokens(ids).detach()
    wrong = [{"input_ids": None, "inputs_embeds": embeds}, {"shift_labels": None}, {"output_hidden_states": True},
             {"own_tensor": labels}]  # fmt: skip
    with alstlib.apply(model, ctx, alstlib.Options(chunk=5)):
        return [error_of(model, **{k: v for k, v in {**shard, **w}.items() if v is not None}) for w in wrong]


def test_calls_whose_rows_cannot_be_dealt_out(ranks2: Any) -> None:
    for messages in ranks2(refused):
        assert "give input_ids, not inputs_embeds" in messages[0]
        assert "would be out of order: give shift_labels" in messages[1]
        assert "would be out of order" in messages[2]
        assert "cannot deal out own_tensor" in messages[3]


def test_layers_that_cannot_be_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gqa")
    layer = model.model.layers[1]
    attend = layer.self_attn.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        attend(*args, **kwargs)
        return attend(*args, **kwargs)

    with attach(model, chunk=6):
        layer.self_attn.forward = twice
        with pytest.raises(ValueError, match="calls attention more than once cannot run in chunks; use chunk=None"):
            step(model, batch())
    del layer.self_attn.forward
    with attach(model, chunk=6):
        with pytest.raises(ValueError, match=r"takes an input \[20, 3, 2\] that cannot be cut into chunks"):
            layer(torch.randn(1, 20, 32), extra=torch.ones(20, 3, 2))
        with pytest.raises(ValueError, match="takes a further input that needs a gradient"):
            layer(torch.randn(1, 20, 32), extra=torch.ones(1, 20, 2, requires_grad=True))
    monkeypatch.setattr(layer, "forward", lambda hidden_states: hidden_states)
    with pytest.raises(ValueError, match=r"layer 1 \(LlamaDecoderLayer\) takes no cache"):
        attach(model, chunk=6)


def test_backward_twice() -> None:
    x, how = randn(1, 6, E).requires_grad_(), {"op": UlyssesAttention(SPContext()), "store": HostStore()}
    out = streamed_layers(x, *toy_weights(1), chunk=4, keep=True, **how)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        out.sum().backward()


def test_a_layer_without_attention() -> None:
    weight = nn.Parameter(torch.eye(4))
    stream = Stream(
        run=lambda x, _: x @ weight, chunk=2, ranks=1, store=HostStore(), keep=False, params=lambda: [weight]
    )
    out = stream(torch.randn(1, 5, 4))
    with pytest.raises(ValueError, match="did not call attention"):
        out.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("offload", "on_host"), [(False, "none"), ("sync", "none"), (True, "none"), (True, "hidden+kv")]
)
@pytest.mark.parametrize("save", [True, False])
def test_gpu_streamed_layers_are_whole_layers(offload: Any, save: bool, on_host: Any) -> None:
    """Odd length, ragged chunk, bf16: as near to fp32 as the same model without chunks."""
    sample, errors = batch(301), []
    exact = step_of(make_model("gqa", num_hidden_layers=4), sample)
    more = {"tiles": {"mlp": 50, "loss": 70, "norm": True}, "offload": offload, "save_attention": save}
    for how in (more, {**more, "chunk": 64, "on_host": on_host}):
        model = make_model("gqa", num_hidden_layers=4).to("cuda", torch.bfloat16)
        got = step_of(model, {n: t.cuda() for n, t in sample.items()}, **how)
        errors.append({n: float((g.cpu().float() - exact[n]).norm() / exact[n].norm()) for n, g in got.items()})
    whole, chunked = errors
    assert all(chunked[n] <= 1.5 * max(whole[n], 2e-3) for n in whole), (whole, chunked)


def step_of(model: Any, sample: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    """Gradients of a second step, which meets slabs and streams of the first."""
    with attach(model, **how):
        for _ in range(2):
            got = step(model, sample)[1]
    return got
