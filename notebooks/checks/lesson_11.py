"""Lesson 11: bytes of an exchange, a slope and a share."""

import json
from pathlib import Path

import numpy as np

from checks import Exercise

RESULTS = Path(__file__).resolve().parents[2] / "papermill_runs/results/peers-cpu"


def counted(tokens, q, kv, d, layers, sp, element):
    """The same by counting, tensor by tensor, what rank 0 sends to each other rank."""
    sent = 0
    for other in range(1, sp):
        query_heads = [h for h in range(q) if h * sp // q == other]
        kv_needed = {h * kv // q for h in query_heads}
        for _ in range(layers):
            rows = tokens // sp
            to_heads = (len(query_heads) + 2 * len(kv_needed)) * rows * d * element  # q, k and v of own rows
            sent += 2 * to_heads  # in forward and for backward
            sent += len(query_heads) * rows * (d * element + 4)  # dO of own rows, and delta
            own = [h for h in range(q) if h * sp // q == 0]
            back = (len(own) + 2 * len({h * kv // q for h in own})) * rows * d * element  # dq, dk, dv of own heads
            sent += len(own) * rows * d * element + back  # the output, then the gradients
    return sent


def check_exchange(exchange_bytes):
    for tokens, q, kv, d, layers, sp, element in (
        (2048, 8, 2, 64, 4, 2, 4), (96, 8, 8, 5, 1, 4, 2), (120, 12, 3, 7, 3, 3, 4), (64, 8, 2, 16, 2, 8, 2),
    ):  # fmt: skip
        got, want = (
            exchange_bytes(tokens, q, kv, d, layers, sp, element),
            counted(tokens, q, kv, d, layers, sp, element),
        )
        assert abs(got - want) < 1e-9 * want + 1, (
            f"tokens={tokens}, q={q}, kv={kv}, d={d}, layers={layers}, sp={sp}, element={element}: "
            f"{got:,.0f} bytes are {got / want:.4f} times what a rank sends"
        )
    for file in RESULTS.glob("[0-9]*/result.json"):
        result = json.loads(file.read_text())
        model, metrics = result["config"]["model"]["config"], result["metrics"]
        q, kv, layers = (model[k] for k in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers"))
        got = exchange_bytes(metrics["seq_len"], q, kv, model["hidden_size"] // q, layers, 2, 4)
        want = metrics["peers"]["ours"]["wire_bytes"]
        assert got == want, f"{metrics['seq_len']:,} tokens: {got:,}, but {want:,} bytes were counted in the run"
    return "and the bytes that were counted in the stored runs are the same, to the last one"


def without_delta(tokens, q, kv, d, layers, sp, element):
    return tokens // sp * (5 * q + 6 * max(kv, sp)) * d * element * (sp - 1) // sp * layers


def own_part_too(tokens, q, kv, d, layers, sp, element):
    return tokens // sp * ((5 * q + 6 * max(kv, sp)) * d * element + 4 * q) * layers


def too_few_heads(tokens, q, kv, d, layers, sp, element):
    return tokens // sp * ((5 * q + 6 * kv) * d * element + 4 * q) * (sp - 1) // sp * layers


def check_stretch(last_stretch):
    rng = np.random.default_rng(0)
    for count in (2, 3, 5):
        lengths = rng.choice(np.arange(256, 10_000), count, replace=False)
        peaks = {int(n): int(rng.integers(10**6, 10**9)) for n in lengths}
        ordered = np.array(sorted(peaks.items()), float)
        want = np.polyfit(ordered[-2:, 0], ordered[-2:, 1], 1)[0]
        got = last_stretch(dict(peaks))
        assert abs(got - want) <= 1e-6 * abs(want), f"{peaks}: {got:,.1f} bytes for each token, not {want:,.1f}"
    return "look at the last stretch before you extend a line"


def whole_range(peaks):
    a, *_, b = sorted(peaks)
    return (peaks[b] - peaks[a]) / (b - a)


def as_given(peaks):
    a, b = list(peaks)[-2:]
    return (peaks[b] - peaks[a]) / (b - a)


def not_divided(peaks):
    a, b = sorted(peaks)[-2:]
    return peaks[b] - peaks[a]


def check_outside(outside_kernels):
    for steps, kernels in (([3.0, 9.0, 4.0], [2.0, 2.5, 7.0]), ([5.0, 1.0, 4.0, 3.0], [1.0, 2.0]), ([2.0], [3.0])):
        want = 1 - float(np.median(kernels)) / float(np.median(steps))
        got = outside_kernels(list(steps), list(kernels))
        assert abs(got - want) < 1e-9, f"steps {steps}, kernels {kernels}: {got:.3f}, not {want:.3f}"
    return "it can come out below zero, because the kernels' time is an estimate too"


def of_means(steps, kernels):
    return 1 - (sum(kernels) / len(kernels)) / (sum(steps) / len(steps))


def of_minima(steps, kernels):
    return 1 - min(kernels) / min(steps)


def never_negative(steps, kernels):
    return max(0.0, 1 - float(np.median(kernels)) / float(np.median(steps)))


EXERCISES = {
    1: Exercise(
        check=check_exchange,
        hints=(
            "How many bytes belong to one row of a rank's slice, over all heads that are exchanged?",
            "units(q, kv, sp) heads of d numbers each, and delta: q numbers of 4 bytes.",
            "Times the rows of a rank, times the layers, times the share that goes to other ranks, (sp - 1) / sp.",
        ),
        mistakes=(without_delta, own_part_too, too_few_heads),
    ),
    2: Exercise(
        check=check_stretch,
        hints=("Sort the lengths first.", "The difference of two peaks over the difference of their lengths."),
        mistakes=(whole_range, as_given, not_divided),
    ),
    3: Exercise(
        check=check_outside,
        hints=("`statistics.median` of each list.", "The difference of the two medians over the step's median."),
        mistakes=(of_means, of_minima, never_negative),
    ),
}
