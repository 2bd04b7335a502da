"""Closed forms: every tensor of a step factors into its sizes, and what is committed is what the code does today."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alstlib.measure import hybrid_forms
from alstlib.measure.calibrate import text_of, without_unused
from alstlib.measure.forms import HEADS, LAYERS, SIZES, SMALL, WIDTH, Way, factor, moments, trace
from alstlib.measure.pruning import with_experts
from alstlib.planner.moments import FILE, SAME, forms, product


@pytest.mark.parametrize(
    "way",
    [
        Way("llama", heads="whole", keep="host+attention"),
        Way("llama", dtype="fp32", keep="all", mlp=False, norm=False, loss=False),
        Way("qwen3", heads="shared", keep="device"),
        Way("llama", heads="whole", keep="host", norm=False, chunk=True),
    ],
    ids=lambda way: way.name,
)
def test_the_committed_forms_are_those_of_the_code(way: Way) -> None:
    made = json.loads(FILE.read_text())
    committed = [made["moments"][i] for i in made["ways"][way.name]]
    assert text_of(moments(way)[0]) == committed


@pytest.mark.parametrize("how", [{"heads": "whole", "keep": "host+attention"}, {"keep": "all", "norm": False}], ids=str)
def test_decoders_that_are_the_same(how: dict[str, Any]) -> None:
    for name, other in SAME.items():
        assert moments(Way(name, **how)) == moments(Way(other, **how))


def test_every_tensor_factors() -> None:
    snapshots, sizes, tiles, query = trace(Way("llama", heads="whole", keep="host+attention"))
    assert set(tiles) == {"M", "N", "U", "D"}
    assert len(snapshots) > 100
    numbers = {nbytes for alive in snapshots for (_, _, nbytes), _ in alive}
    odd = {n for n in numbers if not (c := factor(n, sizes, query)[0]) == int(c) <= SMALL}
    assert len(numbers) > 40
    assert len(odd) <= 3  # what is left of attention's rows after whole tiles of its row sums


def test_factoring() -> None:
    primes, ranks, query = HEADS["whole"]
    sizes = {**SIZES, **primes}
    heads = primes["P"] * primes["k"] * primes["q"]
    width = WIDTH * heads
    assert ranks == primes["P"]
    assert factor(2 * sizes["R"] * width, sizes, query) == (2, "H R")
    assert factor(4 * sizes["R"] * heads, sizes, query) == (4, "P R k q")
    assert factor(8 * sizes["R"] * ranks * (primes["q"] + 2) * primes["k"] * sizes["d"], sizes, query) == (
        8,
        "P R a d k",
    )
    assert factor(2 * (2 * primes["q"] + 2) * primes["k"] * sizes["R"], sizes, query) == (4, "R b k")


def test_deep_models_have_as_many_checkpoints_as_layers() -> None:
    found, _ = moments(Way("llama", keep="device"))
    heads = [terms for place, terms in found if place == "lm_head"]
    assert any(terms.get(("checkpoints", "H L R")) == 2 for terms in heads)
    assert all(("checkpoints", "H R") not in terms for terms in heads)
    assert LAYERS > 3


def test_a_product_of_names() -> None:
    assert product("R H", {"R": 3, "H": 5}) == 15
    assert product("d^2 k", {"d": 3, "k": 2}) == 18
    assert product("", {}) == 1


def test_all_names_of_the_forms_have_sizes() -> None:
    import random

    known = set(with_experts(random.Random(0)))
    for family in hybrid_forms.FAMILIES:
        for heads in (False, True):
            draw = hybrid_forms.points(family, heads)
            assert draw is not None
            known |= set(draw(random.Random(0)))
    for _, kinds in forms()["moments"]:
        for terms in kinds.values():
            for _, names in terms:
                assert {name.partition("^")[0] for name in names.split()} <= known


def test_moments_that_no_way_has_are_dropped() -> None:
    made = {"moments": ["a", "b", "c"], "ways": {"x": [2, 0]}, "tiles": {}}
    assert without_unused(made) == {"moments": ["a", "c"], "ways": {"x": [1, 0]}, "tiles": {}}
    committed = json.loads(FILE.read_text())
    assert without_unused(committed) == committed
