"""GPUs by name, and the answers about several machines: which hold a length, and how far each reaches."""

import re

import pytest
from cases import check_refused, lines_of, unsaid
from quick_steps import asked, quick  # noqa: F401

from alstlib.base.units import GIB
from alstlib.planner import command, progress
from alstlib.planner.gpus import GPUS, OTHER_NAMES, label_bytes, rates_named, rates_of
from alstlib.planner.question import NEEDED


@pytest.fixture
def plan(alst, answer):
    """What people read of a plan for Llama-3.1-8B, and what programs read."""
    return lambda options, status=0: (alst(f"plan {options}", status), answer(f"plan {options}", status))


WRITTEN = """
h100             -> H100
NVIDIA H100 SXM5 -> H100
a100 80gb        -> A100
A100_40GB        -> A100-40GB
rtx-4090         -> RTX4090
4090             -> RTX4090
GeForce RTX 4090 -> RTX4090
"""


@pytest.mark.parametrize("written, name", lines_of(WRITTEN))
def test_gpus_have_the_names_that_people_write(written, name):
    assert rates_of(written) is GPUS[name]


@pytest.mark.parametrize("written, near", lines_of("H101 -> H100\nB300 -> B200\nA100-20GB -> A100-40GB"))
def test_another_name_is_refused_with_the_nearest(written, near):
    check_refused(f"unknown gpu '{written}'; did you mean '{near}'", rates_of, written)


DRIVERS = """
NVIDIA H100 80GB HBM3   -> H100
NVIDIA H200             -> H200
NVIDIA GH200 480GB      -> GH200
NVIDIA A100-SXM4-80GB   -> A100
NVIDIA A100-SXM4-40GB   -> A100-40GB
NVIDIA B200             -> B200
NVIDIA GeForce RTX 4090 -> RTX4090
Tesla T4                -> none
"""


@pytest.mark.parametrize("driver, name", lines_of(DRIVERS))
def test_a_gpu_is_known_by_its_drivers_name(driver, name):
    found = rates_named(driver)
    assert (found.name if found else "none") == name


def test_rates_are_below_the_data_sheets():
    assert {*OTHER_NAMES.values()} <= {*GPUS}
    for name, rates in GPUS.items():
        assert rates.name == name
        kernels = (rates.matmul, rates.attention_forward, rates.attention_backward, rates.flash2_forward)
        assert all(0 < rate < rates.peak for rate in kernels), name
        assert rates.node_host > 1e9
        assert rates.usable < label_bytes("200GB")


def test_the_smallest_machines_that_hold_a_length(plan, alst, monkeypatch):
    """One line for each GPU; half of them do not hold it, whatever the settings, and the whole machine does."""
    monkeypatch.setattr(progress, "EVERY", 0)
    shown, made = plan("--seq-len 2M")
    assert re.findall("(?m)^alst: kinds of GPU: (\\d+) of", shown)[-1] == str(len(GPUS))
    assert [one["gpu"] for one in made["machines"]] == [*GPUS]
    request = asked("--seq-len 2M")
    for one in made["machines"]:
        gpu, gpus, changes, device = (one[name] for name in ("gpu", "gpus", "changes", "device"))
        assert (one["fits"], one["seq_len"]) == (True, 2_000_000)
        assert gpus == 1 or not command.answer(request, command.usual(gpu), gpus // 2).found.fits
        fields = " ".join(f"--set={name}={value}" for name, value in changes.items())
        alst(f"plan --seq-len=2M --gpus={gpus} --gpu={gpu} {fields}")
        (needs,) = (needs for needs, ways in NEEDED.items() if ways == changes)
        line = (
            rf"^{gpus} x {gpu} +{one['nodes']} +{device['peak'] / GIB:,.0f}/{device['limit'] / GIB:,.0f} .* "
            rf"{one['tokens_per_second_per_gpu']:,.0f} +{one['mfu']:.0%}( +{needs})? *$"
        )
        assert re.search(line, shown, re.M), line
    assert {one["gpus"] for one in made["machines"]} >= {1, 2, 8}
    assert {bool(one["changes"]) for one in made["machines"]} == {False, True}
    said = """
chunks: --set options.chunk=16384
Assumed: the host memory that clouds have with such GPUs (--host-memory).
the model was trained on up to 131,072 tokens
"""
    assert unsaid(" ".join(shown.split()), said) == []


def test_a_given_degree_divides_the_gpus_of_every_machine(answer):
    """None with fewer GPUs is tried, which would be refused."""
    for sp in (3, 4):
        (found,) = answer(f"plan --seq-len 500K --gpu H100 --set engine.sp={sp}")["machines"]
        assert (found["fits"], found["gpus"] % sp) == (True, 0)


def test_a_length_that_no_machine_holds(plan, monkeypatch):
    monkeypatch.setattr(command, "MOST", 2)
    shown, made = plan("--seq-len 50M --gpu RTX4090,A100", 1)
    assert re.search(r"2 x RTX4090 .* - +lacks .* of (device|host)", shown)
    assert {one["fits"] for one in made["machines"]} == {False}


def test_several_gpus_are_compared(plan, answer):
    shown, made = plan("--gpu H100,H200,B200,A100-40GB,RTX4090,GH200 --gpus 8")
    reach = {one["gpu"]: one["seq_len"] for one in made["machines"]}
    assert [*reach] == ["H100", "H200", "B200", "A100-40GB", "RTX4090", "GH200"]
    assert [one["nodes"] for one in made["machines"]] == [1, 1, 1, 1, 1, 8]
    for one in made["machines"]:
        alone = answer(f"plan --gpu {one['gpu']} --gpus 8")
        assert (one["seq_len"], one["step_seconds"]) == (alone["longest_sequence"], alone["step_seconds"])
    assert reach["H200"] > reach["H100"] > reach["A100-40GB"]
    assert re.search(r"8 x H100 .* device *\n", shown)
    assert re.search(r"8 x H200 .* host, k=2 *\n", shown)


def test_a_length_on_several_machines(plan):
    shown, made = plan("--gpu 'h100, rtx 4090' --gpus 8 --seq-len 4M")
    assert [one["fits"] for one in made["machines"]] == [True, False]
    assert re.search(r"8 x RTX4090 .*lacks [\d.]+ GiB of\s+host", shown)
