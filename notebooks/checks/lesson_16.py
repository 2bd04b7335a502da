"""Lesson 16: chunks under a sliding window, passes of the key projection, and bytes for each token."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from alstlib.base.reference import relative_error

from . import Exercise


def _layer(tokens: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Rows, the three functions of a layer, and a list that `attend` appends its number of keys to."""
    width, heads, size = 6, 2, 3
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    *into, out = torch.randn(4, width, heads * size, generator=generator, dtype=torch.float64)
    turn = torch.randn(tokens, 1, generator=generator, dtype=torch.float64)  # positions matter
    counts: list[int] = []

    def project(some: Any, rows: slice) -> list[Any]:
        return [(some * turn[rows] @ w).unflatten(-1, (heads, size)).transpose(0, 1) for w in into]

    def attend(q: Any, k: Any, v: Any, window: int) -> Any:
        counts.append(k.shape[1])
        back = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        scores = (q @ k.mT).masked_fill((back < 0) | (back >= window), float("-inf"))
        return scores.softmax(-1) @ v

    def rest(some: Any, attended: Any) -> Any:
        return (some + attended.transpose(0, 1).flatten(1) @ out.T).tanh()

    return x, project, attend, rest, counts


def windowed(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(16)
    cases = ((10, 4, 1), (10, 4, 3), (23, 5, 7), (16, 4, 4), (9, 20, 2), (31, 6, 13), (12, 5, 60), (7, 1, 2))
    for tokens, chunk, window in cases:
        x, project, attend, rest, most = _layer(tokens, generator)
        case = f"{tokens} rows in chunks of {chunk}, a window of {window}"
        want = rest(x, attend(*project(x, slice(0, tokens)), window))
        most.clear()
        got = function(x.clone(), chunk, window, project, attend, rest)
        assert most, f"{case}: call attend(q, k, v, window) for each chunk"
        assert max(most) <= chunk + window - 1, (
            f"{case}: a call of attend got {max(most)} keys, and at most {chunk + window - 1} are needed"
        )
        assert got.shape == want.shape, f"{case}: the output is {list(got.shape)}, not {list(want.shape)}"
        error = relative_error(got, want)
        assert error < 1e-12, f"{case}: the output differs by {error:.1g} from the whole layer's"
    return "the whole layer's output for eight windows and chunks, and no key is kept too long"


def _keeps_all(x: Any, chunk: int, window: int, project: Any, attend: Any, rest: Any) -> Any:
    out, keys, values = [], [], []
    for lo in range(0, len(x), chunk):
        rows = slice(lo, min(lo + chunk, len(x)))
        q, k, v = project(x[rows], rows)
        keys.append(k)
        values.append(v)
        out.append(rest(x[rows], attend(q, torch.cat(keys, 1), torch.cat(values, 1), window)))
    return torch.cat(out)


def _own_chunk_only(x: Any, chunk: int, window: int, project: Any, attend: Any, rest: Any) -> Any:
    every = [slice(lo, min(lo + chunk, len(x))) for lo in range(0, len(x), chunk)]
    return torch.cat([rest(x[rows], attend(*project(x[rows], rows), window)) for rows in every])


def _slice_from_the_end(x: Any, chunk: int, window: int, project: Any, attend: Any, rest: Any) -> Any:
    out: list[Any] = []
    kept: list[Any] = []
    for lo in range(0, len(x), chunk):
        rows = slice(lo, min(lo + chunk, len(x)))
        q, *new = project(x[rows], rows)
        kept = [torch.cat(pair, 1) for pair in zip(kept, new)] if kept else new
        out.append(rest(x[rows], attend(q, *kept, window)))
        kept = [t[:, -(window - 1) :] for t in kept]  # all of them where the window is 1
    return torch.cat(out)


def _step(tokens: int, kv_heads: int, chunk: int, watch: Callable[[Any], None] | None = None) -> int:
    """Device peak over the start of a step of a model as the lesson's, in bytes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import alstlib
    from alstlib.planner.measure.ledger import Ledger

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config).train()
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "position_ids": torch.arange(tokens)[None], "shift_labels": ids}
    options = alstlib.Options(tiles={"loss": 256, "norm": True}, offload="sync", chunk=chunk, on_host="none")
    if watch is not None:
        model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, out: watch(args[0].shape[1]))
    with alstlib.apply(model, None, options) as handle:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with Ledger("cpu", [handle.store]) as ledger:
            start = ledger.device_bytes
            alstlib.causal_lm_loss(model, batch).loss.backward()
            return int(ledger.device_peak - start)


@cache
def _times() -> float:
    seen: list[int] = []
    _step(1024, 2, 64, seen.append)  # sixteen chunks too
    return sum(seen) / 1024


@cache
def _bytes() -> float:
    return (_step(4096, 4, 256) - _step(3072, 4, 256)) / 1024


def passes(answer: Callable[[], Any]) -> str:
    mine = answer()
    assert abs(mine / _times() - 1) < 0.01, (
        f"{mine} is not what was counted: list the passes of a step, and which chunks each of them runs"
    )
    return "each row is projected almost three times"


def token_bytes(answer: Callable[[], Any]) -> str:
    mine = answer()
    assert abs(mine / _bytes() - 1) < 0.05, (
        f"{mine:,} is not what was measured: go through the table of what stays as long as the sequence"
    )
    return f"{_bytes():,.0f} bytes measured for each further token"


EXERCISES = {
    1: Exercise(
        check=windowed,
        hints=(
            "Start from the lesson's `forward`. Only one thing changes: which of the keys and values are kept for the "
            "next chunk.",
            "The first row of the next chunk sees the most distant keys: its own and the window - 1 before it.",
            "With n keys kept, those from max(0, n - (window - 1)) on are needed. A slice such as [-m:] keeps "
            "everything when m is 0.",
        ),
        mistakes=(_keeps_all, _own_chunk_only, _slice_from_the_end),
    ),
    2: Exercise(
        check=passes,
        hints=(
            "Keys are projected in forward, before backward, and in the recompute of each chunk.",
            "Before backward all chunks but the last are projected again: the last one's turn comes next anyway.",
        ),
        mistakes=(lambda: 2, lambda: 3),
    ),
    3: Exercise(
        check=token_bytes,
        hints=(
            "Use the formula of the section on what stays as long as the sequence, with K = 4 key/value heads.",
            "The width is 128 and a head 32 wide: 2E + 4KD + 2D elements of 4 bytes.",
        ),
        mistakes=(lambda: 2304, lambda: 4608),
    ),
}
