"""What a tree of trajectories takes: counts of the real tree and of a real step, and the memory of one path."""

import itertools
import re

import pytest
import torch
from cases import attach, lines_of, make_model, mlp_tokens, values_of
from quick_steps import question, quick  # noqa: F401

import alstlib
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.step_time import attention_flops
from alstlib.planner.trees import cost
from alstlib.trees.tree_step import _Walk
from alstlib.trees.trie import trajectory_of, tree_of

LEVELS = """
10,3x4,2x7 -> 3  -> [10, 3, 4, 2, 7]
32,4x12    -> 8  -> [32, 4, 12, 1, 0]
5x20       -> 64 -> [0, 5, 20, 1, 0]
"""
"""A tree, a block, and the tree once more as `paths` takes it."""


def by_blocks(block, more=""):
    return question(f"--model meta-llama/Llama-3.1-8B --gpus 1 --set block={block} {more}")


def paths(root, branches, each, leaves, own):
    fresh = itertools.count(3)

    def some(n):
        return [token % 90 for token in itertools.islice(fresh, n)]

    prefix = some(root)
    inner = [prefix + some(each) for _ in range(branches)]
    return [path + some(own) for path in inner for _ in range(leaves)]


@pytest.mark.parametrize("text, block, sizes", values_of(LEVELS))
def test_counts_are_those_of_a_real_step(monkeypatch, text, block, sizes):
    """Tokens and pairs of the trie; blocks that have a backward, and tokens that run forward, with checkpoints."""
    data = [{"input_ids": path} for path in paths(*sizes)]
    tree = tree_of([trajectory_of(one) for one in data])
    nodes = [path[-1] for path in tree.paths()]
    found, counts = cost(by_blocks(block), text)
    assert counts == {
        "tokens": sum(n.end - n.begin for n in nodes),
        "pairs": sum(n.end**2 - n.begin**2 for n in nodes) // 2,
        "leaves": sum(not n.children for n in nodes),
    }
    model = make_model()
    through, weighted, backwards = mlp_tokens(model), _Walk.weighted, []
    monkeypatch.setattr(_Walk, "weighted", lambda *args: backwards.append(1) or weighted(*args))
    with attach(model, tiles=False):
        alstlib.tree_step(model, data, block)
    kept = found.activations
    assert len(backwards) == kept.blocks
    assert through[0] == pytest.approx(counts["tokens"] * (2 + kept.twice))  # with a graph, and again in backward
    through[0] = 0
    with attach(model, tiles=False), torch.no_grad():
        alstlib.tree_step(model, data, block)
    assert through[0] == counts["tokens"]


def test_a_tree_takes_the_memory_of_its_longest_path():
    """And a chain is a sample: block by block, but for the last block, which runs forward once less."""
    ask = by_blocks(16384)
    (tree, counts), sample = cost(ask, "800K,8x200K"), ask.at(1_000_000)
    assert (tree.device, tree.host, tree.host_needed) == (sample.device, sample.host, sample.host_needed)
    chain, whole = cost(ask, "800K,1x200K")[0].seconds, sample.seconds
    for part in ("attention", "matrix products"):
        assert 0.98 * whole[part] < chain[part] < whole[part]
    assert (counts["tokens"], counts["pairs"]) == (2_400_000, 1_760_000_000_000)
    assert tree.seconds["attention"] / chain["attention"] == pytest.approx(1.76 / 0.5, rel=0.03)


def test_windows_are_counted_once():
    """A layer with a window sees what lies in it, on every branch."""
    shape = read_shape("google/gemma-2-9b")
    found, counts = cost(by_blocks(4096, f"--model {shape.name}"), "100K,4x50K")
    pairs = sum(times * shape.pairs(n) for n, times in ((100_000, 1 - 4), (150_000, 4)))
    flops = attention_flops(shape, counts["tokens"], found.activations.attention_share)
    assert flops == pytest.approx(2 * pairs * shape.heads * (shape.head_dim + shape.value_dim), rel=1e-6)


def test_many_short_leaves_wait_for_weights():
    """Each block of a leaf gathers the weights of all layers, if weights are sharded."""
    ask = by_blocks(16384, "--gpus 16 --gpus-per-node 1")
    few, many = (cost(ask, text)[0].seconds for text in ("100K,4x16K", "100K,64x1K"))
    assert many["waiting for memory and network"] > 10 * few["waiting for memory and network"] > 0


REFUSED = """
8K,axb                        -> tree='a' is not a number
8K,2x4K --gpus 8 --seq-len 1M -> leave out --seq-len
8K,2x4K --preset paper        -> leave out --seq-len and --preset
8K,2x4K --gpu H100,H200       -> are about one kind of GPU
"""


@pytest.mark.parametrize("options, said", lines_of(REFUSED))
def test_refused(alst, options, said):
    assert said in alst(f"plan --tree {options}", 2)


def test_people_and_programs_read_it(alst, answer):
    made = answer("plan --gpus 8 --tree 800K,8x200K")
    assert (made["tokens"], made["one_by_one"]["tokens"]) == (2_400_000, 8_000_000)
    out = " ".join(alst("plan --gpus 8 --tree 800K,8x200K").split())
    assert re.search("2,400,000 tokens; one by one.* 8,000,000 tokens", out)
    assert made["step_seconds"]["step"] < made["one_by_one"]["step_seconds"]["step"] / 2
    answer("plan --gpus 1 --gpu-memory 24GB --tree 80M,8x20M", 1)
