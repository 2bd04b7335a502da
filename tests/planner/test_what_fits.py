"""The table of the page: what `alst plan` answers, kept where it is there, and small enough for a page."""

import itertools
import json
import random

import pytest
import what_fits
from quick_steps import quick  # noqa: F401

from alstlib.base.units import format_seconds
from alstlib.planner import fits
from alstlib.planner.gpus import GPUS

SMALL = "meta-llama/Llama-3.2-1B"


def test_its_command_says_the_same(monkeypatch, answer):
    gpu, trained = "RTX4090", "an adapter (LoRA, r=16)"
    monkeypatch.setattr(what_fits, "GPUS", {gpu: GPUS[gpu]})
    cells = what_fits.plan(SMALL, 4, {})[gpu][0][[*what_fits.TRAINED].index(trained)]
    asked = what_fits.COMMAND.format(model=SMALL, gpu=gpu, gpus=4, host="96GB") + what_fits.TRAINED[trained]
    assert what_fits.hosts(GPUS[gpu], 4)[0] == "96GB"
    for more, (tokens, step, rate, limit, *way) in zip(("", f" --set options.chunk={what_fits.CHUNK}"), cells):
        said = answer(f"{asked}{more}".removeprefix("alst "))
        one = next((w for w in said["ways"] if [w["what"]] == way), said)
        assert said["options"]["model.lora"] == {"r": 16}
        assert (one["longest_sequence"], format_seconds(one["longest_step_seconds"])) == (tokens, step)
        if way:
            chunks = what_fits.WAYS_TOLD["layers in chunks"]
            assert tokens == max(w["longest_sequence"] for w in said["ways"] if w["what"] in chunks)
        else:
            assert said["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=0.01)
        assert limit.startswith(one["limit"])


def test_it_goes_on_and_keeps_what_is_there(monkeypatch, tmp_path):
    planned = []
    monkeypatch.setattr(what_fits, "FILE", tmp_path / "table.json")
    monkeypatch.setattr(what_fits, "GPUS", {"H100": GPUS["H100"]})

    def cells(asked):
        planned.append(asked)
        if len(planned) < 3:
            return [[5, "1 s", 1.0, "host"], None]
        return "refused: why" if len(planned) < 7 else [None] * 2

    monkeypatch.setattr(what_fits, "cells", cells)
    monkeypatch.setattr("sys.argv", ["what_fits", "--models", SMALL, "--gpus", "8"])
    what_fits.main()
    assert len(planned) == len(what_fits.HOSTS) * len(what_fits.TRAINED)
    what_fits.main()
    assert planned[6:] == planned[:2]  # the two whose chunks were not known; a refusal stays
    monkeypatch.setattr("sys.argv", ["what_fits", "--models", SMALL, "--gpus", "8", "--again", "--known"])
    what_fits.main()
    kept = [one for host in json.loads(what_fits.FILE.read_text())[f"{SMALL} on 8"]["H100"] for one in host]
    assert kept == [[None] * 2] * 2 + ["refused: why"] * 4  # which only a simulation finds
    monkeypatch.setattr(what_fits, "FILE", tmp_path / "other.json")
    what_fits.main()
    assert not what_fits.FILE.exists()  # nothing is known of it


@pytest.mark.parametrize("refused", [False, True])
def test_what_does_not_fit_is_refused_or_unknown_is_said(monkeypatch, refused):
    asked = what_fits.COMMAND.format(model="meta-llama/Llama-3.1-70B", gpu="RTX4090", gpus=1, host="48GB")
    (none, why), chunked = what_fits.cells(asked)
    assert none == chunked[0] == 0
    assert "of device memory for each GPU" in why

    def lines_at(*_):
        raise ValueError("why not") if refused else fits.NotSimulated("not yet")

    monkeypatch.setattr("alstlib.planner.activations.lines_at", lines_at)
    assert what_fits.cells(asked) == ("why not" if refused else [None, None])


@pytest.mark.simulates
def test_what_is_committed_comes_out_again(monkeypatch):
    """Rows that are drawn anew each time, from what comes with the library."""
    table = json.loads(what_fits.FILE.read_text())
    assert table.pop("about")["mode"] == "predicted"
    assert what_fits.FILE.stat().st_size < 1_000_000
    assert all([*on] == [*GPUS] for on in table.values())
    for key, on in random.sample([*table.items()], 2):
        (name, gpus), (gpu, rows) = key.split(" on "), random.choice([*on.items()])
        monkeypatch.setattr(what_fits, "GPUS", {gpu: GPUS[gpu]})
        with fits.known_only():
            again = what_fits.plan(name, int(gpus), {})[gpu]
        for one, kept in zip(itertools.chain(*again), itertools.chain(*rows), strict=True):
            if isinstance(kept, list):  # what was not simulated when it was kept may be known now
                assert [a for a, k in zip(one, kept, strict=True) if k] == [k for k in kept if k], (key, gpu)
