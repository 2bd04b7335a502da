"""`alst plan`: what people and programs read, what is refused, and how long it takes."""

import argparse
import json
import re
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from quick_steps import quick  # noqa: F401

from alstlib import tables
from alstlib.config import RunConfig, row_config
from alstlib.hf.models import flos
from alstlib.hf.public_models import PUBLIC, TRAINED
from alstlib.planner import command, fits, rendering
from alstlib.planner.gpus import rates_of
from alstlib.planner.machine import Machine, read_machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import predict
from alstlib.runs.cli import main
from alstlib.units import GIB, format_bytes, format_seconds

EIGHT = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "8", "--gpu-memory", "80GB", "--host-memory", "1.9TB"]


def parser():
    made = argparse.ArgumentParser()
    command.add_arguments(made)
    return made


def as_json(capsys, *args):
    code = main([*EIGHT, "--json", *args])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_says_what_fits_and_why(capsys):
    assert main(EIGHT) == 0
    out = capsys.readouterr().out
    for text in ("Longest sequence:", "limits it", "80GB: 79.1 GiB", "1.9TB: 1,770 GiB on each node", "What would help",
                 "A step of it takes", "predicted, nothing was run", "highest in model.layers"):  # fmt: skip
        assert text in out, text


def test_what_is_computed_is_said_before_it(capsys):
    main(EIGHT)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (about ")[0] for line in said] == [
        "alst: looking for the longest sequence that fits", "alst: looking at what would help",
        "alst: comparing the ways to run the model",
    ]  # fmt: skip


def test_lines_are_short(capsys, monkeypatch):
    monkeypatch.setattr("alstlib.planner.command.console", lambda: tables.console(80))
    for args in (EIGHT, [*EIGHT, "--gpus", "2", "--seq-len", "6M"], [*EIGHT[:3], "--seq-len", "2M"]):
        main(args)
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines) <= 80
        assert not [line for line in lines if line.endswith("...")]


def test_programs_read_json(capsys):
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
def test_one_label_has_one_number(capsys, more):
    """What would help and the ways are on one page: a label of both must mean the same settings."""
    _, made = as_json(capsys, *more)
    reach = {one["what"]: one["longest_sequence"] for one in made["ways"]}
    assert {h["what"]: h["longest_sequence"] for h in made["help"] for w in reach if h["what"].startswith(w)} == {}
    assert any("chunks of 16K tokens" in h["what"] and h["longest_sequence"] in reach.values() for h in made["help"])


def test_a_length_that_does_not_fit(capsys):
    args = ["--seq-len", "6M"]
    code, made = as_json(capsys, *args)
    assert code == 1
    assert not made["fits"]
    assert made["limit"] == "device"
    assert made["seq_len"] == 6_000_000 > made["longest_sequence"]
    assert main([*EIGHT, *args]) == 1
    out = capsys.readouterr().out
    assert "6,000,000 tokens: does not fit: " in out
    assert "short on the device" in out
    assert "What works:" in out
    assert "layers in chunks of 16K tokens" in out
    assert "2 nodes" in out
    assert {one["seq_len"] for one in made["works_with"]} == {6_000_000}


def test_a_model_that_cannot_be_loaded(capsys):
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
        assert "Nothing fits, not even 512 tokens: the model cannot be loaded." in out
        assert why in " ".join(out.split())
        assert ("64,000 tokens: does not fit: loading the model would take 165.37 GiB" in out) == bool(asked)
        assert "What works:" in out
        assert main([*args, *asked, "--json"]) == 1
        made = json.loads(capsys.readouterr().out)
        assert (made["fits"], made["limit"], made["longest_sequence"]) == (False, "loading: host", 0)
        assert made["loading"]["why"] == why
        assert made["loading"]["host"] > made["loading"]["host_limit"] == 160 * 10**9
        assert made["loading"]["device"] < made["loading"]["device_limit"]
    assert main([*args, "--gpus-per-node", "2"]) == 0
    assert "cannot be loaded" not in capsys.readouterr().out


def test_options_are_those_of_a_run(capsys):
    plain, chunked = (as_json(capsys, *a)[1] for a in ([], ["--set", "options.chunk=16384", "--host-memory", "9TB"]))
    assert chunked["longest_sequence"] > 1.5 * plain["longest_sequence"]
    assert chunked["options"]["options.chunk"] == 16_384
    shallow = as_json(capsys, "--set", "model.config={num_hidden_layers: 4}")[1]
    assert shallow["model"]["parameters"] < plain["model"]["parameters"] / 3


@pytest.mark.simulates
def test_the_reference_as_the_paper_ran_it(capsys):
    ours, paper = as_json(capsys)[1], as_json(capsys, "--preset", "paper")[1]
    assert paper["preset"] == "paper"
    assert paper["longest_sequence"] >= 3_700_000  # which it reached
    assert (
        paper["step_seconds"]["step"] > 1.3 * ours["step_seconds"]["step"] * (paper["seq_len"] / ours["seq_len"]) ** 2
    )
    assert paper["help"] == []
    assert main([*EIGHT, "--preset", "paper", "--seq-len", "3.7M"]) == 0
    assert "as the ALST paper ran it" in capsys.readouterr().out
    shared = ["--preset", "paper", "--gpus", "24", "--set", "engine.sp=24"]
    assert main([*EIGHT, *shared]) == 2
    assert "preset 'paper' cannot share 32/8 heads over sp=24 ranks" in capsys.readouterr().err


def test_the_sequence_parallel_degree_is_chosen_and_said(capsys):
    """Ours shares any number of heads over any number of ranks; the reference needs whole heads."""
    for more, sp, said in (
        ([], 12, "12: all GPUs share each sample, chosen as the largest that works"),
        (["--preset", "paper"], 4, "4: 4 of the 12 GPUs share each sample, chosen as the largest that works"),
        (["--set", "engine.sp=3"], 3, "3: 3 of the 12 GPUs share each sample"),
    ):
        made = as_json(capsys, "--gpus", "12", "--seq-len", "100K", *more)[1]
        assert (made["sp"], made["understood"]["sp"]) == (sp, said)
    alone = as_json(capsys, "--gpus", "12", "--seq-len", "100K", "--preset", "paper")[1]
    of_four = as_json(capsys, "--gpus", "4", "--seq-len", "100K", "--preset", "paper")[1]
    for part in {"attention", "hidden states", "loss"} & {*alone["device"]["by_category"]}:  # three samples at a time
        assert alone["device"]["by_category"][part] == of_four["device"]["by_category"][part]


def test_what_is_assumed_is_said(capsys):
    node = "1,900 GB on each node, as clouds have with 8 x H100"
    for args, assumed in (
        ([], {"--gpus": "8 GPUs", "--gpu": "H100", "--host-memory": node}),
        (["--gpus", "8"], {"--gpu": "H100", "--host-memory": node}),
        (["--gpus", "8", "--gpu", "h100", "--host-memory", "1TB"], {}),
        (["--gpus", "1", "--gpu-memory", "24GB", "--host-memory", "64GB"], {"--gpu": "the speed of H100"}),
        (
            ["--gpus", "2", "--gpu", "rtx 4090"],
            {"--host-memory": "96 GB on each node, as clouds have with 2 x RTX4090"},
        ),
    ):
        main(["plan", "--model", "meta-llama/Llama-3.2-1B", *args, "--json"])
        made = json.loads(capsys.readouterr().out)
        assert made["assumed"] == assumed
        assert made["longest_sequence"] < 100_000_000
        main(["plan", "--model", "meta-llama/Llama-3.2-1B", *args])
        out = " ".join(capsys.readouterr().out.split())
        assert ("Assumed: " in out) == bool(assumed)
        assert all(f"{text} ({option})" in out for option, text in assumed.items())


@pytest.mark.parametrize("gpu, gpus, each", [("H100", 16, 1900e9), ("H100", 4, 950e9), ("GH200", 4, 432 * GIB)])
def test_the_assumed_host_is_that_of_one_node(gpu, gpus, each):
    machine = (
        command.read(parser().parse_args(["--gpus", str(gpus), "--gpu", gpu])).question(rates_of(gpu), gpus).machine
    )
    assert machine.host_memory == each
    assert machine.nodes == (gpus if gpu == "GH200" else -(-gpus // 8))


def test_each_length_has_its_own_step(capsys):
    made = as_json(capsys)[1]
    shape = read_shape(EIGHT[2])
    machine = Machine(gpus=8, host_memory=1_900_000_000_000)
    run = row_config("ours", RunConfig(model={"name": EIGHT[2], "dtype": "bf16"}, engine={"sp": 0}))
    run = run.replace(options={"chunk": None})
    assert made["longest_step_seconds"] == made["step_seconds"]["step"]
    assert made["help"]
    for one in (*made["help"], *made["ways"]):
        how = {"options.checkpoint": True, **one["changes"]}
        at = predict(shape, run.replace(**how), machine, one["longest_sequence"])
        assert one["longest_step_seconds"] == pytest.approx(at.seconds["step"]), one["what"]
    main(EIGHT)
    out = " ".join(capsys.readouterr().out.split())
    for one in (*made["help"], *made["ways"]):
        assert f"{one['longest_sequence']:,} {format_seconds(one['longest_step_seconds'])}" in out


def test_tokens_for_each_gpu_and_mfu(capsys):
    """As a result counts the model's FLOPs; of an adapter, no gradients of the frozen weights."""
    made = as_json(capsys, "--seq-len", "1M")[1]
    step = made["step_seconds"]["step"]
    assert made["tokens_per_second_per_gpu"] == pytest.approx(1e6 / 8 / step)
    shape = read_shape(EIGHT[2])
    counted = flos(10**6, 10**6, shape.dense_parameters, 32, 128, 32)["model"]
    assert made["mfu"] == pytest.approx(counted / 8 / step / 989e12)
    assert 0.3 < made["mfu"] < 0.6
    halved = as_json(capsys, "--seq-len", "1M", "--set", "engine.sp=4")[1]  # two samples at a time
    assert halved["tokens_per_second_per_gpu"] == pytest.approx(1e6 / 4 / halved["step_seconds"]["step"])
    adapter = as_json(capsys, "--seq-len", "1M", "--set", "model.lora={r: 16}")[1]
    products = 2 * shape.dense_parameters * 10**6
    saved = made["mfu"] * step - adapter["mfu"] * adapter["step_seconds"]["step"]
    assert saved * 8 * 989e12 == pytest.approx(products)
    main([*EIGHT, "--seq-len", "1M"])
    said = f"{made['tokens_per_second_per_gpu']:,.0f} tokens/s for each GPU, MFU {made['mfu']:.0%}"
    assert said in capsys.readouterr().out


def test_a_full_host_is_the_reason(capsys):
    """One input in k is kept, the device has to hold the others and has no room for them."""
    args = [*EIGHT, "--gpu", "H200", "--gpu-memory", "141GB"]
    main([*args, "--json"])
    made = json.loads(capsys.readouterr().out)
    question = command.read(parser().parse_args(args[1:])).question(rates_of("H200"), 8)
    beyond = question.beyond(question.longest())
    assert (made["limit"], beyond.limit, beyond.activations.inputs_kept_every) == ("host", "device", 2)
    plenty = replace(question, machine=replace(question.machine, host_memory=None))
    assert plenty.at(beyond.seq_len).fits  # so it is the host
    main(args)
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens; host memory limits it: the host is full with one layer's input in 2 (k=2)" in out
    assert re.search(r"[\d:]+ host, k=2 [\d:]+ layers whole", out)
    assert {one["what"]: one["limit"] for one in made["ways"]}["layers whole"] == "host"


def test_where_nothing_works_it_says_how_to_ask(capsys):
    args = ["plan", "--model", "deepseek-ai/DeepSeek-V3", "--gpus", "1", "--gpu", "A100-40GB"]
    assert main(args) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Nothing that was tried makes it fit" in out
    assert "--seq-len without --gpus says which machines hold a length" in out


@pytest.mark.parametrize("name, args, works", [
    ("Qwen/Qwen3-32B", ["--gpus", "4", "--gpu", "A100-40GB", "--host-memory", "500GB"],
     ["LoRA", "566 GiB of host memory on each node", "2 nodes"]),
    ("microsoft/phi-4", ["--gpus", "1", "--gpu", "RTX4090", "--host-memory", "64GB"],
     ["LoRA and weights on the host", "8 nodes"]),
    ("meta-llama/Llama-3.1-8B", ["--gpus", "8", "--gpu", "H100", "--host-memory", "60GB"],
     ["optimizer on the devices", "LoRA", "167 GiB of host memory on each node", "8 nodes"]),
])  # fmt: skip
def test_where_nothing_fits_it_says_what_is_missing_and_what_works(name, args, works, capsys):
    args = ["plan", "--model", name, *args]
    assert main([*args, "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert [one["what"] for one in made["works_with"]] == works
    assert all(one["seq_len"] > 1000 for one in made["works_with"])
    assert main(args) == 1
    out = " ".join(capsys.readouterr().out.split())
    for where in ("device", "host"):
        has, needs = made[where]["limit"], made[where]["peak"]
        said = f"{format_bytes(needs - has)} of {where} memory for each GPU"
        assert (said in out) == (needs > has), where
    for one in made["works_with"]:
        assert f"{one['seq_len']:,} {format_seconds(one['step_seconds'])}" in out
        more = [f"--set={n}={json.dumps(v)}" for n, v in one["changes"].items()]
        nodes = ["--gpus", str(one["gpus"]), "--gpus-per-node", str(one["gpus"] // one["nodes"])]
        assert main([*args, *more, *nodes, f"--host-memory={one['host_memory']}", f"--seq-len={one['seq_len']}"]) == 0
        capsys.readouterr()


def test_every_category_is_explained(capsys):
    seen = set()
    for name, more in (
        ("meta-llama/Llama-3.1-8B", []), ("Qwen/Qwen3-Next-80B-A3B", []), ("openai/gpt-oss-20b", []),
        ("meta-llama/Llama-3.1-8B", ["--set", "engine.zero_stage=2"]),
        ("meta-llama/Llama-3.1-8B", ["--preset", "paper"]),
        ("meta-llama/Llama-3.1-8B", ["--set", "options.offload=false", "--set", "options.chunk=16384"]),
        ("meta-llama/Llama-3.1-8B", ["--set", "options.attention=flash_attention_2"]),
    ):  # fmt: skip
        made = as_json(capsys, "--model", name, "--seq-len", "1M", *more)[1]
        seen |= {*made["device"]["by_category"], *made["host"]["by_category"]}
        assert {*made["step_seconds"]} - {"step"} <= {*rendering.TIMES}
    assert seen <= {*rendering.MEANING}
    assert len(seen) > 12


def test_host_and_device_are_those_of_a_gpu_and_the_nodes_total_is_named(capsys):
    made, _ = as_json(capsys)[1], main(EIGHT)
    out = capsys.readouterr().out
    for where in ("device", "host"):
        peak, limit = (f"{made[where][n] / GIB:,.2f} GiB" for n in ("peak", "limit"))
        assert re.search(rf"{where}, each GPU +{peak}  of {limit}", out)
    assert f"a node's 8: {8 * made['host']['peak'] / GIB:,.0f} of 1,770 GiB" in " ".join(out.split())


@pytest.mark.parametrize("config, trained", [
    ({}, 40_960), ({"max_position_embeddings": 1000}, 1000),
    ({"max_position_embeddings": 40_960, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
      "original_max_position_embeddings": 32_768}}, 131_072),
])  # fmt: skip
def test_lengths_beyond_the_trained_are_remarked(config, trained, capsys):
    args = ["--model", "Qwen/Qwen3-4B", "--set", f"model.config={json.dumps(config)}"]
    for length, said in ((trained, False), (2 * trained, True)):
        made = as_json(capsys, *args, "--seq-len", str(length))[1]
        assert made["model"]["trained_length"] == trained
        assert any(f"up to {trained:,} tokens" in note and "2.0 times" in note for note in made["notes"]) == said


def test_other_versions_than_those_of_the_simulation_are_remarked(capsys, monkeypatch):
    said = "simulated with torch {torch} and transformers {transformers};".format(**fits.public()[fits.VERSIONS])
    for here in (fits.public()[fits.VERSIONS], {"torch": "2.11.0", "transformers": "5.17.0"}):
        monkeypatch.setattr(fits, "versions", lambda here=here: here)
        notes = as_json(capsys, "--seq-len", "1M")[1]["notes"]
        assert any(said in note for note in notes) == (here["torch"] == "2.11.0")


def test_published_models_have_a_trained_length():
    assert {*TRAINED} <= {*PUBLIC}
    assert len(TRAINED) >= 25


def test_help_says_what_the_exit_status_means(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert command.EXIT in " ".join(capsys.readouterr().out.split())


def test_terms_can_be_set(capsys):
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
    ],
)
def test_what_cannot_be_planned_is_refused(args, says, capsys, monkeypatch):
    monkeypatch.setattr("alstlib.planner.devices.device_count", lambda: 0)
    assert main([*EIGHT, *args]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_model_of_ones_own(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["meta-llama/Llama-3.1-8B"]))
    own, public = as_json(capsys, "--model", str(tmp_path))[1], as_json(capsys)[1]
    assert own["longest_sequence"] == public["longest_sequence"]
    (tmp_path / "config.json").write_text(json.dumps({**PUBLIC["meta-llama/Llama-3.1-8B"], "model_type": "bert"}))
    assert main([*EIGHT, "--model", str(tmp_path)]) == 2
    assert "attention_probs_dropout_prob=0.1 is not supported in attention" in capsys.readouterr().err


def test_a_plan_is_quick():
    """The least processor time of three, from the start of Python to its end: others may use the machine too. A
    fast core takes less than one second."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "alstlib.runs.cli", *EIGHT, "--json"], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) <= 2.0


def test_a_measured_hosts_memory_is_free_beside_the_ranks(tmp_path, capsys):
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
