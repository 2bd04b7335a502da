"""Lesson 14: FLOPs of a packed step, and what a layer waits for."""

from types import SimpleNamespace

from alstlib.base.reference import causal_mask
from alstlib.hf.loading.models import flos
from alstlib.planner.model_shapes import read_shape
from checks import Exercise


def check_packed(packed_flops):
    for matrices, documents, heads, dim, layers, forwards in (
        (1000, [64], 2, 8, 1, 1),
        (700, [31, 1, 65], 3, 5, 2, 1),
        (700, [31, 1, 65], 3, 5, 2, 2),
        (90, [1, 1, 1], 1, 4, 7, 2),
    ):
        tokens = sum(documents)
        starts = [sum(documents[:i]) for i in range(len(documents) + 1)]
        pairs = int(causal_mask(1, tokens, starts).sum()) - tokens / 2  # of the diagonal's squares, the causal half
        one = 2 * 2 * pairs * dim * heads * layers  # two products, a multiplication and an addition each
        want = 2 * matrices * tokens * (2 + 2) + one * (forwards + 2)
        got = packed_flops(matrices, list(documents), heads, dim, layers, forwards)
        assert abs(got - want) < 1e-9 * want, (
            f"matrices={matrices}, documents={documents}, heads={heads}, head_dim={dim}, layers={layers}, "
            f"attention_forwards={forwards}: {got:,.0f} is {got / want:.3f} times the FLOPs that a step runs"
        )
    return "packing saves attention work: the squares of the parts are less than the square of the sum"


def whole_square(matrices, documents, heads, head_dim, layers, attention_forwards):
    tokens = sum(documents)
    return 8 * matrices * tokens + (attention_forwards + 2) * 2 * tokens**2 * head_dim * heads * layers


def full_matrix(matrices, documents, heads, head_dim, layers, attention_forwards):
    squares = sum(n * n for n in documents)
    return 8 * matrices * sum(documents) + (attention_forwards + 2) * 4 * squares * head_dim * heads * layers


def no_recompute(matrices, documents, heads, head_dim, layers, attention_forwards):
    squares = sum(n * n for n in documents)
    return 6 * matrices * sum(documents) + (attention_forwards + 2) * 2 * squares * head_dim * heads * layers


def check_crossing(crossing):
    for name in ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"):
        shape = read_shape(name)
        tokens = crossing(shape)
        total = flos(tokens, tokens, shape.dense_parameters, shape.heads, shape.head_dim, shape.layers)["paper"]
        share = 1 - 8 * shape.dense_parameters * tokens / total
        assert abs(share - 0.5) < 0.0025, f"{name}: attention is {share:.1%} of the FLOPs at {tokens:,.0f} tokens"
    return "a wider and deeper model has its crossing at a longer length"


def models_convention(shape):
    return shape.dense_parameters / (shape.head_dim * shape.heads * shape.layers)


def with_embedding(shape):
    return 1.1 * shape.parameters / (2 * shape.head_dim * shape.heads * shape.layers)


def check_shortest(shortest):
    lanes = ["computing", "exchange", "copies", "states"]
    for seconds in (
        {"states": 0.0171, "copies": 0.0},
        {"states": 0.001, "copies": 0.0445},
        {"states": 0.04, "copies": 0.0},
    ):

        def spans_at(length, seconds=seconds):
            busy = [
                SimpleNamespace(lane="computing", end=0.7e-6 * length),
                SimpleNamespace(lane="exchange", end=1e-6 * length),
            ]
            return {"forward": [*busy, *(SimpleNamespace(lane=lane, end=end) for lane, end in seconds.items())]}

        late = max(seconds.values())
        want = next(n * 1000 for n in range(1, 100) if late <= 1e-6 * (n * 1000))
        got = shortest(spans_at, lanes)
        assert got % 1000 == 0, f"{got} is no multiple of 1,000"
        assert got == want, (
            f"with weights that take {seconds['states']} s and copies {seconds['copies']} s: {got:,}, not {want:,}"
        )
    return "from there on, gathering weights and copying to the host cost no time"


def always_the_first(spans_at, lanes):
    return 1000


def weights_only(spans_at, lanes):
    def ends(length, wanted):
        return max(s.end for s in spans_at(length)["forward"] if s.lane in wanted)

    return next(n for n in range(1000, 100_000, 1000) if ends(n, lanes[3:]) <= ends(n, lanes[:2]))


EXERCISES = {
    1: Exercise(
        check=check_packed,
        hints=(
            "What is summed over the documents, and what over the tokens? Only attention looks at pairs of tokens.",
            "Matrices: 2 N FLOPs for each token, two forward passes, and a backward that counts as two more.",
            "Attention: one forward takes 4 d heads layers for each pair of tokens; the causal half of a document "
            "of s tokens has s squared over 2 pairs, and backward counts as two forwards.",
        ),
        mistakes=(whole_square, full_matrix, no_recompute),
    ),
    2: Exercise(
        check=check_crossing,
        hints=(
            "Set the two terms of the paper's count equal: the one with N S, and the one with S squared.",
            "8 N S is the work of the matrices; attention is 16 S² d heads layers.",
        ),
        mistakes=(models_convention, with_embedding),
    ),
    3: Exercise(
        check=check_shortest,
        hints=(
            "Compare two ends: the last of the lanes that take turns, and the last of the others.",
            "Try 1,000, 2,000, ... and stop at the first length at which the others do not end later.",
        ),
        mistakes=(always_the_first, weights_only),
    ),
}
