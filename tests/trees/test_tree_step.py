"""Steps on trees of trajectories: the gradients of plain transformers on the trajectories one by one."""

import copy
import random

import pytest
import torch
import zoo
from cases import attach, check_refused, gradients, make_model, on_ranks, worst_error
from matrix import Case, build
from operators import logps_of

import alstlib
from alstlib.base.reference import shift
from alstlib.planner.measure.verify import in_full

HOST = {"offload": "sync", "on_host": "hidden+kv"}


def grown(seed, depth, most=9):
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
    "a star": [[*tokens(13, 0), 4 + i, *tokens(3 + 2 * i, 40 + i)] for i in range(4)],
    "one token shared": [[5, *tokens(9, i)] for i in (10, 30, 50)],
    "nothing shared": [tokens(6, 0), tokens(9, 100)],
    "depth 5": grown(1, 4)[:9],
}


def trajectories_of(paths, seed=0):
    """With weights of either sign, and labels that are not counted, in some trajectories of shared tokens too."""
    dice, made = random.Random(seed), []
    for path in paths:
        labels = [-100 if dice.random() < 0.3 else token for token in path]
        made.append({"input_ids": path, "labels": labels, "weights": [dice.uniform(-1, 2) for _ in path]})
    return made


def plain(model, trajectories, objective=None):
    """Loss, gradients and log-probabilities of plain transformers, one trajectory at a time."""
    twin, logps, weights, count = copy.deepcopy(model), [], [], 0
    for one in trajectories:
        labels = shift(torch.tensor([one["labels"]]))
        logits = twin(input_ids=torch.tensor([one["input_ids"]]), use_cache=False).logits
        logps.append(logps_of(logits, labels)[0])
        weights.append(torch.tensor([*one["weights"][1:], 0.0], dtype=logits.dtype))
        count += int((labels != -100).sum())
    loss = -sum((w * x).sum() for w, x in zip(weights, logps)) / count
    loss = loss if objective is None else objective(logps)
    loss.backward()
    return loss.detach(), gradients(twin), [x.detach() for x in logps]


def preference(logps):
    """A loss that is not linear in the log-probabilities, of sums over whole trajectories."""
    sums = torch.stack([x.sum() for x in logps])
    return -torch.nn.functional.logsigmoid(sums[0] - sums[1:]).mean() + (sums / 10).exp().mean()


def exact(rank, world, name, paths, blocks, dtype=torch.float64, options=None, objective=None, adapt=None):
    ctx = alstlib.SPContext.create(world)
    model, data = build_model(name, dtype), trajectories_of(paths)
    model = adapt(model) if adapt else model
    with in_full():
        loss, want, logps = plain(model, data, objective)
        inner = model.get_base_model() if adapt else model
        with attach(inner, ctx, **(options or {})) as handle:
            for block in blocks:
                model.zero_grad()
                out = alstlib.tree_step(model, data, block, objective=objective)
                bound = 1e-10 if dtype == torch.float64 else 1e-5
                assert float((out.loss - loss).abs() / loss.abs()) < bound, block
                error = worst_error(gradients(model, world), want)
                assert error[0] < bound, (block, error)
                for got, x in zip(out.logps, logps, strict=True):
                    torch.testing.assert_close(got, x, rtol=bound * 10, atol=bound * 10)
                assert handle.store.leased == 0
                if world == 1:
                    assert out.computed == unique(paths)
                assert out.tokens == sum(map(len, paths))
            with torch.no_grad():
                again = alstlib.tree_step(model, data, blocks[0])
            assert all(torch.equal(a, b) for a, b in zip(again.logps, out.logps)) or len(blocks) > 1


def build_model(name, dtype):
    case = Case(name, engine="average" if dtype == torch.float64 else "zero0")
    return build(case, {"output_router_logits": False} if name in ("mixtral", "qwen3_next") else None)


def unique(paths):
    return len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tree", TREES)
def test_gradients_of_the_paths_one_by_one(pools, tree, world):
    """Blocks of a token, of some, so that branches lie inside of what would be one, and of all tokens."""
    on_ranks(pools, world, exact, "llama, 9 heads on 3", TREES[tree], (1, 3, 64))


MODELS = ["mistral", "gemma2", "deepseek_v3", "mixtral", "gpt2", "qwen3_next", "lfm2", "falcon_h1", "jamba", "minimax"]
"""Windows, soft caps, latents, experts, learned positions; states of every kind, and a convolution alone."""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_layers(pools, name, world):
    on_ranks(pools, world, exact, name, TREES["depth 5"], (3,))


@pytest.mark.parametrize("options", [HOST, {"checkpoint": False, "tiles": False}], ids=str)
@pytest.mark.parametrize("name", ["mistral", "qwen3_next"])
def test_options(pools, name, options):
    on_ranks(pools, 2, exact, name, TREES["depth 5"], (3,), options=options)


def test_single_precision():
    exact(0, 1, "llama", TREES["depth 5"], (3,), torch.float32)


@pytest.mark.parametrize("world", [1, 2])
def test_an_objective_of_whole_trajectories(pools, world):
    on_ranks(pools, world, exact, "qwen3_next", TREES["a star"], (3,), objective=preference)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


def test_lora():
    exact(0, 1, "llama", TREES["a star"], (3,), adapt=with_lora)
