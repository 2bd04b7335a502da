"""`alst plan`: what people and programs read, what is refused, and how long it takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alstlib.hf.public_models import PUBLIC
from alstlib.planner.machine import read_machine
from alstlib.runs.cli import main
from alstlib.units import GIB

EIGHT = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "8", "--gpu-memory", "80GB", "--host-memory", "1.9TB"]


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = main([*EIGHT, "--json", *args])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_says_what_fits_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EIGHT) == 0
    out = capsys.readouterr().out
    for text in ("Longest sequence:", "limits it", "80GB: 79.1 GiB", "1.9TB: 1,770 GiB on each node", "What would help",
                 "A step:", "predicted, nothing was run", "peak in model.layers"):  # fmt: skip
        assert text in out, text


def test_programs_read_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, made = as_json(capsys)
    assert code == 0
    assert made["fits"] is True
    assert made["mode"] == "predicted"
    assert made["longest_sequence"] == made["seq_len"] > 10**6
    assert made["limit"] in ("device", "host")
    device = made["device"]
    assert sum(device["by_category"].values()) == device["peak"] <= device["limit"] == int(79.1 * GIB)
    assert sum(made["host"]["by_category"].values()) == made["host"]["peak"] <= made["host"]["limit"]
    assert made["step_seconds"]["step"] > 0
    assert made["options"]["options.offload"] is True


@pytest.mark.parametrize("more", [[], ["--gpus", "1", "--gpus-per-node", "1"], ["--set", "options.on_host=none"]])
def test_one_label_has_one_number(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    """What would help and the ways are on one page: a label of both must mean the same settings."""
    _, made = as_json(capsys, *more)
    reach = {one["what"]: one["longest_sequence"] for one in made["ways"]}
    assert {h["what"]: h["longest_sequence"] for h in made["help"] for w in reach if h["what"].startswith(w)} == {}
    assert any("chunks of 16K tokens" in h["what"] and h["longest_sequence"] in reach.values() for h in made["help"])


def test_a_length_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--seq-len", "6M"]
    code, made = as_json(capsys, *args)
    assert code == 1
    assert not made["fits"]
    assert made["limit"] == "device"
    assert made["seq_len"] == 6_000_000 > made["longest_sequence"]
    assert main([*EIGHT, *args]) == 1
    out = capsys.readouterr().out
    assert "does not fit (" in out
    assert "short on the device" in out
    assert "It fits with layers in chunks of 16K tokens" in out


def test_a_model_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """A step fits, but rank 0's host cannot take the weights, with any option and for any length."""
    args = ["plan", "--model", "meta-llama/Llama-3.1-70B", "--gpus", "64", "--host-memory", "160GB"]
    args += ["--set", "engine.offload_optimizer=false"]
    why = (
        "Loading the model would take 165.37 GiB of the first node's host memory, and 149.01 GiB is there; it can be "
        "loaded on 32 nodes of 2 GPUs each."
    )
    for asked in ([], ["--seq-len", "64K"]):
        assert main([*args, *asked]) == 1
        out = capsys.readouterr().out
        assert f"Not even a short sequence fits: the model cannot be loaded.\n{why}\n" in out
        assert "tokens: does not fit (the model cannot be loaded, 4" in out
        assert ("No options make it fit here, because the model cannot be loaded." in out) == bool(asked)
        assert main([*args, *asked, "--json"]) == 1
        made = json.loads(capsys.readouterr().out)
        assert (made["fits"], made["limit"], made["longest_sequence"]) == (False, "loading: host", 0)
        assert made["loading"]["why"] == why
        assert made["loading"]["host"] > made["loading"]["host_limit"] == 160 * 10**9
        assert made["loading"]["device"] < made["loading"]["device_limit"]
    assert main([*args, "--gpus-per-node", "2"]) == 0
    assert "cannot be loaded" not in capsys.readouterr().out


def test_options_are_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    plain, chunked = (as_json(capsys, *a)[1] for a in ([], ["--set", "options.chunk=16384", "--host-memory", "9TB"]))
    assert chunked["longest_sequence"] > 1.5 * plain["longest_sequence"]
    assert chunked["options"]["options.chunk"] == 16_384
    shallow = as_json(capsys, "--set", "model.config={num_hidden_layers: 4}")[1]
    assert shallow["model"]["parameters"] < plain["model"]["parameters"] / 3


def test_the_reference_as_the_paper_ran_it(capsys: pytest.CaptureFixture[str]) -> None:
    ours, paper = as_json(capsys)[1], as_json(capsys, "--preset", "paper")[1]
    assert paper["preset"] == "paper"
    assert paper["longest_sequence"] >= 3_700_000  # which it reached
    assert (
        paper["step_seconds"]["step"] > 1.3 * ours["step_seconds"]["step"] * (paper["seq_len"] / ours["seq_len"]) ** 2
    )
    assert paper["help"] == []
    assert main([*EIGHT, "--preset", "paper", "--seq-len", "3.7M"]) == 0
    assert "as the ALST paper ran it" in capsys.readouterr().out
    assert main([*EIGHT, "--preset", "paper", "--gpus", "24"]) == 2
    assert "preset 'paper' cannot share 32/8 heads over sp=24 ranks" in capsys.readouterr().err


def test_terms_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    made = as_json(capsys, "--context", "2GiB", "--nccl", "0", "--fragmentation", "0.1", "--process", "0")[1]
    device = made["device"]["by_category"]
    assert device["CUDA context"] == 2 * GIB
    assert device["NCCL"] == 0
    assert device["fragments"] == pytest.approx(7.91 * GIB, abs=10)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "meta-llama/Llama-3.1-9B"], "did you mean 'meta-llama/Llama-3.1-8B'"),
        (["--set", "options.tile=true"], "did you mean 'tiles'"),
        (["--set", "options.tiles"], "must have the form FIELD=VALUE"),
        (["--gpu", "H101"], "did you mean 'H100'"),
        (["--gpu-memory", "80 gigs"], "gpu_memory='80 gigs' is not a number with a unit"),
        (["--seq-len", "many"], "seq-len='many' is not a number"),
        (["--seq-len", "3"], "must be at least 8: one token for each rank"),
        (["--gpus", "-1"], "gpus=-1"),
        (["--gpus", "0"], "the GPUs of this machine, and it has none"),
        (["--fragmentation", "2"], "a share of at least 0 and below 1"),
        (["--set", "engine.sp=3"], "sp=3 does not divide 8 GPUs"),
        (["--rates", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alstlib.planner.devices.device_count", lambda: 0)
    assert main([*EIGHT, *args]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["meta-llama/Llama-3.1-8B"]))
    own, public = as_json(capsys, "--model", str(tmp_path))[1], as_json(capsys)[1]
    assert own["longest_sequence"] == public["longest_sequence"]
    (tmp_path / "config.json").write_text(json.dumps({**PUBLIC["meta-llama/Llama-3.1-8B"], "model_type": "rwkv"}))
    assert main([*EIGHT, "--model", str(tmp_path)]) == 2
    assert "has no form" in capsys.readouterr().err


def test_a_plan_is_quick() -> None:
    """The least processor time of three, from the start of Python to its end: others may use the machine too. A
    fast core takes less than one second."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "alstlib.runs.cli", *EIGHT, "--json"], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) <= 2.0


def test_a_measured_hosts_memory_is_free_beside_the_ranks(tmp_path: Path, capsys: Any) -> None:
    """`alst check` asks for it while its ranks' processes are there; a host that is named has yet to hold them."""
    rates = ("matmul", "attention_forward", "attention_backward", "host", "host_memory")
    metrics = {
        "rates": {name: [1e12] for name in rates}, "device_name": "some GPU", "gpu_memory": 80 * GIB, "capability": 9,
        "ranks": 8, "ranks_of_node": 8, "host_memory": 800 * GIB, "overheads": {"context": GIB, "nccl": GIB},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps({"metrics": metrics}))
    assert read_machine(tmp_path).overheads.process == 0
    options = ["plan", "--model", EIGHT[2], "--json", "--machine", str(tmp_path), "--seq-len", "100K"]
    for more, there in ([], 0), (["--host-memory", "800GiB"], 4 * GIB), (["--process", "1GiB"], GIB):
        assert main([*options, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["host"]["by_category"]["process"] == there
        assert found["host"]["limit"] == 100 * GIB
