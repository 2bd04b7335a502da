"""Mistakes made on purpose in what moves tensors (between a device and its host, between ranks, between passes) and in
what engines are given: each gives wrong gradients in a whole step, or an error. README.md has the same table."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import matrix
import pytest
import torch
import yaml
from cases import attach, make_model, slopes
from device.module import NEVER, device, late
from matrix import Case
from mutate import changed, mutated

import alstlib
from alstlib.data.loader import SPDataLoader

HERE = Path(__file__)
TABLE = yaml.safe_load(HERE.with_name("mutations.yaml").read_text())


class Mutation(NamedTuple):
    function: Any
    old: str
    """A piece of its source."""
    new: str
    shown_by: Case | str
    """A case of the net, or a way in which a model with dropout runs on the device."""


MUTATIONS = {
    name: Mutation(resolve_name(f"alstlib.{function}"), *pieces, by if isinstance(by, str) else Case(**by))
    for name, (function, *pieces, by) in TABLE["mistakes"].items()
}


def dropout(rank, world, way):
    """The relative error of a gradient's slope against a central difference, on the device, with dropout."""
    model = make_model("gpt2", dtype=torch.float64, n_layer=3, resid_pdrop=0.1, embd_pdrop=0.1).to(device())
    sample = {"input_ids": torch.arange(3, 44)[None], "labels": torch.arange(3, 44)[None]}
    with attach(model, **matrix.TILES["small"], **matrix.WAYS[way]), matrix.full_host(), late(NEVER):
        (batch,) = SPDataLoader([sample], alstlib.SPContext(), device=device())
        slope, want = slopes(model, batch)
    return abs(slope / want - 1)


def run(rank, world, shown_by, name=""):
    """What a case gives, with a mistake by that name; or the error."""
    if name:
        function, old, new, _ = MUTATIONS[name]
        try:
            with mutated(function, (old, new)):
                return run(rank, world, shown_by)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return dropout(rank, world, shown_by) if isinstance(shown_by, str) else matrix.run(rank, world, shown_by)


def found(results, shown_by):
    """What is wrong with what the ranks gave; empty for nothing."""
    if errors := [result for result in results if isinstance(result, str)]:
        return errors[0]
    if isinstance(shown_by, str):
        return "" if results[0] < 1e-5 else f"an error of {results[0]}"
    try:
        matrix.check(results, shown_by)
    except AssertionError as e:
        return str(e)
    return ""


@pytest.fixture
def on_ranks(request):
    def call(shown_by, *more):
        alone = isinstance(shown_by, str)
        pools = request.getfixturevalue("late_pools" if alone or shown_by.device == "late" else "pools")
        return found(pools(1 if alone else shown_by.sp * shown_by.dp)(run, shown_by, *more), shown_by)

    return call


def by_name(shown_by):
    return {f"dropout {one}" if isinstance(one, str) else str(one): one for one in shown_by}


SHOWN_BY = by_name(mutation.shown_by for mutation in MUTATIONS.values())


@pytest.mark.parametrize("name", SHOWN_BY)
def test_without_a_mistake_nothing_is_seen(on_ranks, name):
    assert on_ranks(SHOWN_BY[name]) == ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_seen(on_ranks, name):
    function, old, new, shown_by = MUTATIONS[name]
    changed(function, (old, new))  # raises an error here, where it counts for nothing
    assert on_ranks(shown_by, name)


def test_the_readme_has_the_table():
    text = HERE.with_name("README.md").read_text()
    for name, mutation in MUTATIONS.items():
        assert f"| {name} | `{next(iter(by_name([mutation.shown_by])))}` |" in text
