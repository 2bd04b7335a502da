"""The referee: what it finds in stacks with known mistakes, and in those that are installed."""

import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import mistakes
import pytest
import referee
import torch
from cases import ROOT, lines_of, values_of
from exactness import flash, page, reproduce, stacks
from exactness.cases import CASES
from exactness.judge import first, verdict
from exactness.ranks import Processes
from setuptools import find_namespace_packages

from alstlib.base.reference import attention
from alstlib.runs import verify as command

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def plain():
    """What plain transformers found, once for each case."""
    return {}


@pytest.mark.parametrize("name", mistakes.KINDS)
def test_a_mistake_is_found_in_its_module(name, plain):
    case = CASES["window"]
    want = referee.reference(Processes(), case, False, plain)
    found = Processes(mistakes.__name__).run(name, case, 2)
    assert isinstance(found, list), found
    judged = verdict(found, want)
    assert (judged["result"], judged.get("first")) == ("wrong", mistakes.KINDS[name][1]), judged


EXPECTED = """
ours                -> uneven    -> exact
ours                -> no labels -> exact
ours-trainer        -> packed    -> exact
accelerate-sp-zero2 -> even      -> wrong
accelerate-cp       -> even      -> exact
accelerate-cp       -> window    -> refused
"""
"""Some cells of the table, with the versions of the lock."""


@pytest.mark.parametrize("stack, case, result", lines_of(EXPECTED))
def test_a_cell(stack, case, result, plain):
    cell = referee.cell_of(Processes(), stack, CASES[case], plain)
    assert cell["result"] == result, cell


@pytest.mark.parametrize("stack", stacks.known())
def test_a_stack_says_what_it_follows(stack):
    made = stacks.load(stack)
    assert made.sources
    assert "torch" in made.requires
    assert hasattr(made, "trainer") or all(hasattr(made, n) for n in ("prepare", "step", "gradients", "update"))
    lines = Path(stacks.__file__).with_name(f"{stack.replace('-', '_')}.py").read_text().splitlines()
    assert len(lines) <= 100


@pytest.mark.parametrize("window, cap", [(-1, 0.0), (3, 0.0), (-1, 2.0)])
def test_the_stand_in_for_flash_attention(window, cap):
    """Documents of 5 and 7 tokens are those of the oracle."""
    q, k, v = (torch.randn(12, heads, 4, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    one = (t.transpose(0, 1)[None] for t in (q, k, v))
    seen = None if window < 0 else window + 1  # with the token itself
    (want,), _ = attention(*one, scale=0.5, documents=[5], window=seen, softcap=cap or None)
    how = {"causal": True, "window_size": (window, window), "softcap": cap}
    ends = torch.tensor([0, 5, 12])
    got = flash.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, **how)
    torch.testing.assert_close(got, want.transpose(0, 1))
    alone = flash.flash_attn_func(q[None, 5:], k[None, 5:], v[None, 5:], **how)
    torch.testing.assert_close(alone[0], got[5:])


def test_the_stand_in_beneath_a_ring():
    """The last queries of a sample see all keys before them, as in the whole sample; so do the gradients."""
    q, k, v, upstream = (torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(n)) for n in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    whole = flash.flash_attn_func(*(t[None] for t in leaves), causal=True)[0, 3:]
    want = torch.autograd.grad(whole, leaves, upstream[3:])
    offsets = {"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 7]), "causal": True}
    rest = q.detach()[3:], k.detach(), v.detach()
    out, lse, *_ = flash._varlen_forward(*rest, **offsets)
    torch.testing.assert_close(out, whole.detach())
    got = [torch.full_like(t, float("nan")) for t in rest]
    flash._varlen_backward(upstream[3:], *rest, out, lse, *got, **offsets)
    torch.testing.assert_close(got, [want[0][3:], *want[1:]])


def test_a_stack_that_is_not_installed_keeps_what_was_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(referee, "versions_of", lambda stack: referee.metadata.version("no-such-package"))
    assert not referee.kept(tmp_path, "verl", "even")
    page.write(tmp_path, {"cells": {"verl": {"even": page.read(referee.RESULT)["cells"]["verl"]["even"]}}})
    assert referee.kept(tmp_path, "verl", "even")


def pinned_by(stack):
    """The versions in its file of requirements."""
    path = Path(stacks.__file__).with_name(f"{stack.replace('-', '_')}.txt")
    return dict(line.split("==") for line in path.read_text().split()) if path.exists() else {}


def test_each_stack_was_judged_with_the_versions_that_are_pinned_beside_it():
    cells = page.read(referee.RESULT)["cells"]
    assert set(cells) == set(stacks.known())
    for name in stacks.known():
        pinned = pinned_by(name)
        wanted = {*stacks.load(name).requires} - ({"torch", "transformers"} - pinned.keys())
        assert wanted <= pinned.keys(), name
        for cell in cells[name].values():
            assert {n: v for n, v in cell["versions"].items() if n in wanted} == {n: pinned[n] for n in wanted}, name
    assert f"liger_kernel=={pinned_by('liger')['liger_kernel']}\n" in (ROOT / "env/cuda-py311.txt").read_text()


@pytest.mark.parametrize("stack", reproduce.TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_a_reproducer_is_short_and_needs_only_its_stack(stack, case):
    if not reproduce.writable(stack, CASES[case], {"result": "wrong"}):
        pytest.skip("the templates cannot say it")
    text = reproduce.script(stack, CASES[case], "wrong")
    compile(text, case, "exec")
    assert len(text.splitlines()) <= 40
    assert "alstlib" not in text
    assert "exactness" not in text


SHOWN = """
deepspeed           -> even   -> false
deepspeed           -> packed -> true
accelerate-sp-zero2 -> lora   -> true
"""


@pytest.mark.parametrize("stack, case, shown", values_of(SHOWN))
def test_a_reproducer_shows_what_is_wrong_and_nothing_else(stack, case, shown, tmp_path):
    (tmp_path / reproduce.file_of(stack, case)).write_text(reproduce.script(stack, CASES[case], "wrong"))
    found, words = referee.reproduced(Processes(), stack, case, tmp_path)
    assert found == shown, words
    assert "norm" in words


def test_a_loss_that_is_no_number_is_shown():
    printed = {1: {"loss": [2.0, 3.0]}, 2: {"loss": [2.0, float("nan")]}}
    script = SimpleNamespace(script=lambda path, ranks, stand_in: [printed[ranks]])
    assert referee.reproduced(script, "deepspeed", "even", Path()) == (True, "loss nan or missing")


@pytest.mark.parametrize("dtype, factor, named", [
    (torch.float32, 1.01, True), (torch.bfloat16, 1.01, False), (torch.bfloat16, 1.1, True),
])  # fmt: skip
def test_rounding_in_bf16_is_no_first_difference(dtype, factor, named):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    want, got = ({"the output of embed": [x], "the output of norm": [x * by]} for by in (1, factor))
    more = {"value_gradients": {}, "gradients": {}}
    found = first([{"values": got, **more}], {"values": want, **more})["first"]
    assert (found == "the output of norm") == named


def test_of_a_model(capsys):
    """As `alst verify tiny --stack ours` asks."""
    assert referee.of_a_model("tiny", "ours", as_json=False) == 0
    assert capsys.readouterr().out.count(": exact") == len(referee.OF_A_MODEL)


REFUSED = """
nobody                    -> there is no stack 'nobody'
deepspeed --sp 4          -> leave out --sp
deepspeed --set chunk=16K -> leave out --set
"""


@pytest.mark.parametrize("stack, said", lines_of(REFUSED))
def test_what_the_command_refuses(alst, nothing_starts, stack, said):
    assert said in alst(f"verify tiny --stack {stack}", 2)


def test_the_command_starts_the_referee(alst, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "call", lambda line: started.append(line) or 1)
    alst("verify tiny --stack accelerate-sp --json", 1)
    assert started[0][1:] == [str(command.REFEREE), "--model", "tiny", "--stack", "accelerate-sp", "--json"]
    assert set(command._stacks()) == set(stacks.known())


def test_the_wheel_holds_the_stacks():
    """Where the command looks for them: beside the package."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert f"papermill_runs.referee.{stacks.__name__}" in find_namespace_packages(str(ROOT), **packages)
    assert command.REFEREE == ROOT / "papermill_runs" / "referee" / "referee.py"
