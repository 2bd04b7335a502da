"""Steps on trees of trajectories: the gradients of plain transformers on the trajectories one by one."""

import contextlib
import copy
import random

import pytest
import torch
import zoo
from cases import attach, check_refusals, check_step, gradients, make_model, on_ranks, peak, same, with_lora
from matrix import WITH_ROUTERS, Case, build, engine_of
from matrix import gradients as of_engine
from operators import logps_of

import alstlib
from alstlib.base.reference import shift
from alstlib.planner.measure.verify import in_full
from alstlib.trees.tree_step import OfStatistics
from alstlib.trees.trie import trajectory_of, tree_of

HOST = {"offload": "sync", "on_host": "hidden+kv"}


def grown(seed, depth, most):
    """Paths of a random tree: at each branch up to three children, of up to `most` tokens."""
    dice = random.Random(seed)

    def below(left):
        own = [dice.randrange(3, 90) for _ in range(dice.randint(1, most))]
        children = [path for _ in range(dice.randint(1, 3)) for path in below(left - 1)] if left else [[]]
        return [own + path for path in children]

    return below(depth)


def tokens(n, seed):
    return [random.Random(seed + i).randrange(3, 90) for i in range(n)]


TREES = {
    "a chain": [tokens(19, 0)[:n] for n in (19, 7, 8, 1, 19)],
    "a star": [[*tokens(7, 0), 4 + i, *tokens(2 + 2 * i, 40 + i)] for i in range(3)],
    "one token shared": [[5, *tokens(6, i)] for i in (10, 30, 50)],
    "nothing shared": [tokens(6, 0), tokens(9, 100)],
    "depth 5": grown(8, 4, 3)[:5],  # branches after 2, 4, 6 and 7 tokens
}


def trajectories_of(paths):
    """With weights of either sign, and labels that are not counted, in some trajectories of shared tokens too."""
    dice, made = random.Random(0), []
    for path in paths:
        labels = [-100 if dice.random() < 0.3 else token for token in path]
        made.append({"input_ids": path, "labels": labels, "weights": [dice.uniform(-1, 2) for _ in path]})
    return made


def plain(model, trajectories, objective=None, divisor=None):
    """Loss, gradients and log-probabilities of plain transformers, one trajectory at a time."""
    twin, logps, weights, count = copy.deepcopy(model), [], [], 0
    for one in trajectories:
        labels = shift(torch.tensor([one["labels"]]))
        logits = twin(input_ids=torch.tensor([one["input_ids"]]), use_cache=False).logits
        logps.append(logps_of(logits, labels)[0])
        weights.append(torch.tensor([*one["weights"][1:], 0.0], dtype=logits.dtype))
        count += int((labels != -100).sum())
    loss = -sum((w * x).sum() for w, x in zip(weights, logps)) / (divisor or count)
    loss = loss if objective is None else objective(logps)
    loss.backward()
    return loss.detach(), gradients(twin), [x.detach() for x in logps]


def preference(logps):
    """A loss that is not linear in the log-probabilities, of sums over whole trajectories."""
    sums = torch.stack([x.sum() for x in logps])
    return -torch.nn.functional.logsigmoid(sums[0] - sums[1:]).mean() + (sums / 10).exp().mean()


def exact(
    rank, world, name, paths, blocks = (3,), dtype = torch.float64,
    objective = None, lora = False, **options,
):  # fmt: skip
    ctx, data = alstlib.SPContext.create(world), trajectories_of(paths)
    model = inner = build_model(name, dtype)
    if lora:
        model = with_lora(model, ["q_proj", "up_proj"])
    with in_full() if dtype == torch.float64 else contextlib.nullcontext():
        loss, want, logps = plain(model, data, objective)
        with attach(inner, ctx, **options) as handle:
            for block in blocks:
                model.zero_grad()
                out = alstlib.tree_step(model, data, block, objective=objective)
                bound = 1e-10 if dtype == torch.float64 else 1e-5
                check_step((out.loss.item(), gradients(model, world)), (loss.item(), want), bound, bound)
                torch.testing.assert_close(out.logps, logps, rtol=bound * 10, atol=bound * 10)
                assert handle.store.leased == 0
                if world == 1:
                    assert out.computed == unique(paths)
                assert out.tokens == sum(map(len, paths))
            with torch.no_grad():
                again = alstlib.tree_step(model, data, blocks[0])
            assert same(again.logps, out.logps) or len(blocks) > 1


def build_model(name, dtype):
    case = Case(name, engine="average" if dtype == torch.float64 else "zero0")
    return build(case, {"output_router_logits": False} if name in WITH_ROUTERS else None)


def unique(paths):
    return len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tree", TREES)
def test_gradients_of_the_paths_one_by_one(pools, tree, world):
    """Blocks of a token, of some, so that branches lie inside of what would be one, and of all tokens."""
    on_ranks(pools, world, exact, "llama, 9 heads on 3", TREES[tree], (1, 3, 64))


MODELS = [
    "mistral",
    "gemma2",
    "deepseek_v3",
    "mixtral",
    "gpt2",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "jamba",
    "minimax",
    "kimi_linear",
]
"""Windows, soft caps, latents, experts, learned positions; states of every kind, and a convolution alone."""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_layers(pools, name, world):
    on_ranks(pools, world, exact, name, TREES["depth 5"])


@pytest.mark.parametrize("options", [HOST, {"checkpoint": False, "tiles": False}], ids=str)
@pytest.mark.parametrize("name", ["mistral", "qwen3_next"])
def test_options(pools, name, options):
    on_ranks(pools, 2, exact, name, TREES["depth 5"], **options)


def test_single_precision():
    exact(0, 1, "llama", TREES["depth 5"], dtype=torch.float32)


HOW = {
    "an objective of whole trajectories": ("qwen3_next", {"objective": preference}),
    "LoRA": ("llama", {"lora": True}),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_other_losses_and_weights(pools, how, world):
    name, more = HOW[how]
    on_ranks(pools, world, exact, name, TREES["a star"], **more)


def test_an_objective_of_trajectories_without_labels():
    """As where all completions of a micro-batch are masked: every parameter has a gradient, which is 0."""
    model = make_model()
    data = [{"input_ids": path, "labels": [-100] * len(path)} for path in TREES["a star"]]
    with attach(model):
        out = alstlib.tree_step(model, data, 3, objective=OfStatistics(lambda found: sum(x.logps.sum() for x in found)))
    assert float(out.loss) == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


# ----- engines


UNEQUAL = [("a star", None), ("nothing shared", "depth 5")]
"""The trees of two replicas in two micro-batches; None: the replica has none."""


def accumulated(rank, world, kind, name):
    """The loss of the last micro-batch, and the gradients that an engine has added up of both."""
    ctx = alstlib.SPContext.create(1)
    deep = kind.startswith("zero")
    model = build_model(name, torch.float32 if deep else torch.float64)
    data = [[trajectories_of(TREES[tree]) if tree else [] for tree in trees] for trees in UNEQUAL]
    with contextlib.nullcontext() if deep else in_full():
        _, want, _ = plain(model, [one for trees in data for tree in trees for one in tree], divisor=50)
        loss = plain(model, [one for tree in data[1] for one in tree], divisor=50)[0]
        with attach(model, ctx):
            engine = engine_of(model, kind, 2)
            for last, trees in enumerate(data):
                known = None if deep else bool(last)
                out = alstlib.tree_step(engine, trees[rank], 3, divisor=50, last_micro_batch=known)
                if deep and not last:
                    engine.step()
            bound = 1e-5 if deep else 1e-10
            check_step((float(out.loss), of_engine(model, kind)), (float(loss), want), bound, bound)
            if deep:
                engine.destroy()


@pytest.mark.parametrize(
    "kind, name",
    [("ddp", "llama"), ("fsdp2", "qwen3_next"), ("zero1", "llama"), ("zero2", "llama"), ("zero3", "llama")],
)
def test_replicas_with_unequal_trees(ranks2, kind, name):
    """Under each engine gradients are reduced once, and a replica without trajectories does not let others wait."""
    ranks2(accumulated, kind, name)


# ----- cost


def peaks(paths, train=True, **options):
    """Bytes on the device and on the host that a step of a model with many keys takes at most."""

    def run(model):
        with torch.set_grad_enabled(train):
            alstlib.tree_step(model, [{"input_ids": path} for path in paths], 8)

    return peak(make_model(hidden_size=256, num_key_value_heads=4), run, **options)


@pytest.mark.parametrize("options", [{}, HOST], ids=str)
def test_memory_is_that_of_one_path(options):
    """Of four paths, of which each has two blocks of its own, which the other three do not see."""
    paths = [[*tokens(8, 0), 4 + i, *tokens(15, 200 + 60 * i)] for i in range(4)]
    for tree, path in zip(peaks(paths, **options), peaks(paths[:1], **options)):
        assert tree <= 1.1 * path


@pytest.mark.parametrize("options", [{}, HOST], ids=str)
def test_pages_of_another_path_go_without_backward_too(options):
    """Forward alone, of a path whose many short nodes give its long leaf other blocks than the next path's leaf has."""
    stem = tokens(12, 0)
    long = [*stem, *tokens(48, 100)]
    paths = [long, *([*stem[:n], 91] for n in range(2, 12)), [stem[0], 92, *tokens(48, 300)]]
    for tree, path in zip(*(peaks(some, train=False, **options) for some in (paths, [long]))):
        assert tree <= 1.1 * path


def test_a_prefix_is_shared_up_to_a_multiple_of_the_ranks():
    paths = [[5, 6, 7, 8, 9, one] for one in (10, 11)]
    tree = tree_of([trajectory_of({"input_ids": path}) for path in paths], 3)
    nodes = [one[-1] for one in tree.paths()]
    assert [(node.begin, node.end, len(node.tokens)) for node in nodes] == [(0, 3, 3), (3, 6, 3), (3, 6, 3)]
    assert [place.tolist() for place in tree.places] == [[0, 1, 2, 3, 4, -1], [0, 1, 2, 5, 6, -1]]


# ----- refusals


REFUSED = r"""
step()                                                   | no replica has a trajectory
step({**path, "advantages": 1})                          | this one has: input_ids, advantages
step({**path, "weights": [1, 2]})                        | weights \[2\]
step({**path, "labels": [1, -1, 2]})                     | labels .* must be whole numbers from 0 on
step(path, objective=sum, divisor=3)                     | leave divisor and engine_divides_by out
step(path, objective=lambda logps: logps[0])             | must return a tensor of one number
step(path, name="llama, dynamic NTK")                    | depend on the longest position
step(path, name="mixtral")                               | use output_router_logits=False
"""


def test_refusals():
    def step(*data, name="llama", **how):
        with attach(zoo.build(name)) as handle:
            alstlib.tree_step(handle.model, [*data], **how)

    check_refusals(REFUSED, {"step": step, "path": {"input_ids": [5, 6, 7]}})
