"""GPUs by name, and the answers about several machines: which hold a length, and how far each reaches."""

import argparse
import json
import re

import pytest
from quick_steps import quick  # noqa: F401

from alstlib.planner import command
from alstlib.planner.gpus import GPUS, OTHER_NAMES, label_bytes, rates_named, rates_of
from alstlib.planner.question import NEEDED
from alstlib.runs.cli import main

EIGHT_B = ["plan", "--model", "meta-llama/Llama-3.1-8B"]
SIX = ["H100", "H200", "B200", "A100-40GB", "RTX4090", "GH200"]


def read(*args):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.read(parser.parse_args([*EIGHT_B[1:], *args]))


def as_json(capsys, *args):
    code = main([*EIGHT_B, "--json", *args])
    return code, json.loads(capsys.readouterr().out)["machines"]


@pytest.mark.parametrize("written, name", [
    ("h100", "H100"), ("H100-80GB", "H100"), ("NVIDIA H100 SXM5", "H100"), ("h200", "H200"), ("B200", "B200"),
    ("A100", "A100"), ("a100 80gb", "A100"), ("A100-80GB", "A100"), ("A100_40GB", "A100-40GB"),
    ("RTX 4090", "RTX4090"), ("rtx-4090", "RTX4090"), ("4090", "RTX4090"), ("GeForce RTX 4090", "RTX4090"),
    ("gh200", "GH200"),
])  # fmt: skip
def test_gpus_have_the_names_that_people_write(written, name):
    assert rates_of(written) is GPUS[name]


@pytest.mark.parametrize("written, near", [("H101", "H100"), ("B300", "B200"), ("A100-20GB", "A100-40GB")])
def test_another_name_is_refused_with_the_nearest(written, near):
    with pytest.raises(ValueError, match=f"unknown gpu '{written}'; did you mean '{near}'"):
        rates_of(written)


@pytest.mark.parametrize("driver, name", [
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", "GH200"),
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA B200", "B200"),
    ("NVIDIA GeForce RTX 4090", "RTX4090"), ("Tesla T4", ""),
])  # fmt: skip
def test_a_gpu_is_known_by_its_drivers_name(driver, name):
    found = rates_named(driver)
    assert (found.name if found else "") == name


def test_rates_are_below_the_data_sheets():
    assert {*OTHER_NAMES.values()} <= {*GPUS}
    for name, rates in GPUS.items():
        assert rates.name == name
        kernels = (rates.matmul, rates.attention_forward, rates.attention_backward, rates.flash2_forward)
        assert all(0 < rate < rates.peak for rate in kernels), name
        assert rates.node_host > 1e9
        assert rates.usable < label_bytes("200GB")


def test_the_smallest_machines_that_hold_a_length(capsys):
    """One line for each GPU; half of them do not hold it, whatever the settings, and the whole machine does."""
    code, found = as_json(capsys, "--seq-len", "2M")
    assert code == 0
    assert [one["gpu"] for one in found] == list(GPUS)
    request = read("--seq-len", "2M")
    for one in found:
        rates, gpus = GPUS[one["gpu"]], one["gpus"]
        assert (one["fits"], one["seq_len"]) == (True, 2_000_000)
        assert gpus == 1 or not command.answer(request, rates, gpus // 2).found.fits
        fields = [f"--set={name}={value}" for name, value in one["changes"].items()]
        assert main([*EIGHT_B, "--seq-len=2M", f"--gpus={gpus}", f"--gpu={one['gpu']}", *fields]) == 0
    capsys.readouterr()
    assert {one["gpus"] for one in found} >= {1, 2, 8}
    assert any(one["changes"] for one in found)
    assert not all(one["changes"] for one in found)


def test_people_read_a_line_for_each_machine(capsys):
    found = as_json(capsys, "--seq-len", "2M")[1]
    assert main([*EIGHT_B, "--seq-len", "2M"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"alst: looking at {name}" for name in GPUS]
    for one in found:
        line = next(line for line in shown.out.splitlines() if line.startswith(f"{one['gpus']} x {one['gpu']} "))
        needs = next(needs for needs, changes in NEEDED.items() if changes == one["changes"])
        assert line.split()[3] == str(one["nodes"])
        assert f"{one['device']['peak'] / 2**30:,.0f}/{one['device']['limit'] / 2**30:,.0f}" in line
        assert f"{one['tokens_per_second_per_gpu']:,.0f}" in line
        assert re.search(rf" {one['mfu']:.0%}( +{needs})? *$", line)
    out = " ".join(shown.out.split())
    assert "chunks: --set options.chunk=16384" in out
    assert "Assumed: host memory for each GPU, as clouds have it (--host-memory): H100 238 GB" in out
    assert "the model was trained on up to 131,072 tokens" in out


def test_a_length_that_no_machine_holds(capsys, monkeypatch):
    monkeypatch.setattr(command, "MOST", 2)
    assert main([*EIGHT_B, "--seq-len", "50M", "--gpu", "RTX4090,A100"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"2 x RTX4090 .* - +lacks .* of (device|host)", out)
    assert as_json(capsys, "--seq-len", "50M", "--gpu", "A100")[1][0]["fits"] is False


def test_several_gpus_are_compared(capsys):
    code, found = as_json(capsys, "--gpu", ",".join(SIX), "--gpus", "8")
    assert code == 0
    assert [one["gpu"] for one in found] == SIX
    assert [one["nodes"] for one in found] == [1, 1, 1, 1, 1, 8]
    by_name = {one["gpu"]: one for one in found}
    for one in found:
        main([*EIGHT_B, "--gpu", one["gpu"], "--gpus", "8", "--json"])
        alone = json.loads(capsys.readouterr().out)
        assert one["seq_len"] == alone["longest_sequence"]
        assert one["step_seconds"] == alone["step_seconds"]
    assert by_name["H200"]["seq_len"] > by_name["H100"]["seq_len"] > by_name["A100-40GB"]["seq_len"]
    main([*EIGHT_B, "--gpu", ",".join(SIX), "--gpus", "8"])
    out = capsys.readouterr().out
    assert re.search(r"8 x H100 .* device *\n", out)
    assert re.search(r"8 x H200 .* host, k=2 *\n", out)


def test_a_length_on_several_machines(capsys):
    code, found = as_json(capsys, "--gpu", "h100, rtx 4090", "--gpus", "8", "--seq-len", "4M")
    assert code == 0
    assert [one["fits"] for one in found] == [True, False]
    main([*EIGHT_B, "--gpu", "h100, rtx 4090", "--gpus", "8", "--seq-len", "4M"])
    assert "8 x RTX4090 " in (out := capsys.readouterr().out)
    assert re.search(r"lacks [\d.]+ GiB of\s+host", out)


@pytest.mark.parametrize("args, says", [
    (["--gpu", "H100,H200", "--gpu-memory", "80GB"], "name one with --gpu"),
    (["--gpu", "H100,H20"], "did you mean 'H200'"),
    (["--gpus", "8", "--gpu", "H100,H200", "--seq-len", "4"], "must be at least 8"),
])  # fmt: skip
def test_what_cannot_be_compared(args, says, capsys):
    assert main([*EIGHT_B, *args]) == 2
    assert says in capsys.readouterr().err
