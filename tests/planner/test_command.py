"""`alst plan`: what people and programs read, what is refused, and how long it takes."""

import json
import re
import resource
import shlex
import subprocess
import sys

import pytest
from cases import lines_of, unsaid, values_of
from quick_steps import question, quick  # noqa: F401

from alstlib.base.units import GIB, format_bytes, format_seconds
from alstlib.hf.loading.models import flos
from alstlib.hf.loading.public_models import PUBLIC, TRAINED
from alstlib.planner import command, fits, progress, rendering, tables
from alstlib.planner.machine import read_machine

EIGHT = "--model meta-llama/Llama-3.1-8B --gpus 8 --gpu-memory 80GB --host-memory 1.9TB"


@pytest.fixture
def plan(alst):
    """What people read, in one line: of eight GPUs unless it is said."""
    return lambda more="", status=0, of=EIGHT: " ".join(alst(f"plan {of} {more}", status).split())


@pytest.fixture
def planned(answer):
    """What programs read."""
    return lambda more="", status=0, of=EIGHT: answer(f"plan {of} {more}", status)


SAID = """
Longest sequence:
limits it
80GB: 79.1 GiB
1.9TB: 1,770 GiB on each node
What would help
A step of it takes
predicted, nothing was run
highest in model.layers
alst: what would help: 1 of
alst: ways to run the model: 1 of
"""


def test_a_plan_says_what_fits_and_why_and_what_is_computed_before_it(plan, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0)
    assert unsaid(plan(), SAID) == []


@pytest.mark.simulates
def test_advice_ends_in_time(plan, planned, monkeypatch):
    """What is not known by then is left out, which is said."""
    known = fits._known
    monkeypatch.setattr(fits, "_known", lambda text: [] if "options.chunk" in text else known(text))
    for module in (rendering, command):
        monkeypatch.setattr(module, "PATIENCE", 0)
    out, found = plan(), planned()
    assert rendering.LATE in out
    assert rendering.LATE in found["notes"]
    assert "layers whole" in out
    assert "in chunks" not in out
    monkeypatch.setattr(fits, "_known", known)
    assert rendering.LATE not in plan()


def test_a_disk_is_counted(plan, planned):
    of = "--model meta-llama/Llama-3.1-8B --gpus 8 --host-memory 0.6TB --seq-len 2M"
    disk = "--disk 10TB --disk-rate 20GB/s --disk-life 7000TB"
    found = planned(disk, of=of)
    written, step = 8 * found["disk"]["peak"], found["step_seconds"]["step"]
    assert found["days_of_disk"] == pytest.approx(7e15 / written * step / 86400)
    ends = f"which is at the end of its life after {found['days_of_disk']:,.0f} days"
    said = f"""
10TB: 9,313 GiB on each node, 20 GB/s
Each step writes {format_bytes(written)} to a node's disk, {ends}
"""
    assert unsaid(plan(disk, of=of), said) == []


def test_states_in_files_are_counted(plan, planned):
    of = "--model meta-llama/Llama-3.1-8B --gpus 1 --host-memory 64GB --seq-len 50K --disk-life 1200TB"
    more = "--set engine.offload_optimizer=nvme --set engine.nvme_path=/scratch"
    found = planned(more, of=of)
    disk, step = found["disk"], found["step_seconds"]["step"]
    assert (found["fits"], disk["limit"], disk["written"]) == (True, None, sum(disk["by_category"].values()))
    assert found["days_of_disk"] == pytest.approx(1200e12 / disk["written"] * step / 86400)
    assert found["understood"]["disk"] == "no limit, 5 GB/s"
    said = f"""
buffers of files
disk, each GPU
of 1,862.65 GiB
spare on the disk
Each step writes {format_bytes(disk["written"])} to a node's disk
"""
    assert unsaid(plan(f"{more} --disk 2TB", of=of), said) == []


def test_lines_are_short(alst, monkeypatch):
    monkeypatch.setattr("alstlib.planner.command.console", lambda: tables.console(80))
    for options, status in ((EIGHT, 0), (f"{EIGHT} --gpus 2 --seq-len 6M", 1), ("--seq-len 2M", 0)):
        lines = alst(f"plan {options}", status).splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line.endswith("...")]


def test_people_and_programs_read_the_same(plan, planned):
    """Of a GPU, and of a node what its GPUs take together."""
    made, out = planned(), plan()
    assert (made["fits"], made["mode"], made["options"]["options.offload"]) == (True, "predicted", True)
    assert made["longest_sequence"] == made["seq_len"] > 10**6
    for where in ("device", "host"):
        peak, limit, parts, *_ = made[where].values()
        assert sum(parts.values()) == peak <= limit
        assert f"{where}, each GPU {peak / GIB:,.2f} GiB of {limit / GIB:,.2f} GiB" in out
    assert made["device"]["limit"] == int(79.1 * GIB)
    assert f"a node's 8: {8 * peak / GIB:,.0f} of 1,770 GiB" in out


@pytest.mark.parametrize("more", ["", "--gpus 1 --gpus-per-node 1", "--set options.on_host=none"])
def test_one_label_has_one_number(planned, more):
    """What would help and the ways are on one page: a label of both must mean the same settings."""
    made = planned(more)
    ways, helps = ({one["what"]: one["longest_sequence"] for one in made[part]} for part in ("ways", "help"))
    assert not [(label, way) for label in helps for way in ways if label.startswith(way)]
    assert any("chunks of 16K tokens" in label and reach in ways.values() for label, reach in helps.items())


def test_a_length_that_does_not_fit(plan, planned):
    made = planned("--seq-len 6M", 1)
    assert (made["fits"], made["limit"]) == (False, "device")
    assert made["seq_len"] == 6_000_000 > made["longest_sequence"]
    said = """
6,000,000 tokens: does not fit:
short on the device
What works:
layers in chunks of 16K tokens
2 nodes
"""
    assert unsaid(plan("--seq-len 6M", 1), said) == []
    assert {one["seq_len"] for one in made["works_with"]} == {6_000_000}
    assert not any("longest_sequence" in one for one in made["works_with"])


def test_a_model_that_cannot_be_loaded(plan, planned):
    """A step fits, but rank 0's host cannot take the weights, with any option and for any length."""
    of = "--model meta-llama/Llama-3.1-70B --gpus 64 --host-memory 160GB --set engine.offload_optimizer=false"
    why = "loading the model would take 165.37 GiB of the first node's host memory, and 149.01 GiB is there"
    for length in ("", "--seq-len 64K"):
        out, made = plan(length, 1, of), planned(length, 1, of)
        assert made["loading"]["why"] == why
        assert f"Nothing fits, not even 512 tokens: {why}." in out
        assert ("64,000 tokens: does not fit: loading the model would take 165.37 GiB" in out) == bool(length)
        assert [one["what"] for one in made["works_with"]] == ["166 GiB of host memory on each node"]
        assert (made["fits"], made["limit"], made["longest_sequence"]) == (False, "loading: host", 0)
    assert "would take" not in plan("--gpus-per-node 2", 0, of)


@pytest.mark.simulates
def test_the_reference_as_the_paper_ran_it(plan, planned):
    ours, paper = planned(), planned("--preset paper")
    assert (paper["preset"], paper["help"]) == ("paper", [])
    slower = paper["step_seconds"]["step"] / ours["step_seconds"]["step"]
    assert slower > 1.3 * (paper["seq_len"] / ours["seq_len"]) ** 2
    assert "as the ALST paper ran it" in plan("--preset paper --seq-len 3.7M")  # which it reached


def test_the_sequence_parallel_degree_is_chosen_and_said(planned):
    """Ours shares any number of heads over any number of ranks; the reference needs whole heads."""
    for more, sp, said in (
        ("", 12, "12: all GPUs share each sample, chosen as the largest that works"),
        ("--set engine.sp=3", 3, "3: 3 of the 12 GPUs share each sample"),
        ("--preset paper", 4, "4: 4 of the 12 GPUs share each sample, chosen as the largest that works"),
    ):
        made = planned(f"--gpus 12 --seq-len 100K {more}")
        assert (made["sp"], made["understood"]["sp"]) == (sp, said)
    alone, of_four = (one["device"]["by_category"] for one in (made, planned("--gpus 4 --seq-len 100K --preset paper")))
    for part in {"attention", "hidden states", "loss"} & {*alone}:  # three samples at a time
        assert alone[part] == of_four[part]


ASSUMED = """
"" -> 1 -> {--gpus: 8 GPUs, --gpu: H100, --host-memory: "1,900 GB on each node, as clouds have with 8 x H100"}
--gpus 16 -> 2 -> {--gpu: H100, --host-memory: "1,900 GB on each node, as clouds have with 8 x H100"}
--gpus 8 --gpu h100 --host-memory 1TB -> 1 -> {}
--gpus 1 --gpu-memory 24GB --host-memory 64GB -> 1 -> {--gpu: the speed of H100}
--gpus 2 --gpu 'rtx 4090' -> 1 -> {--host-memory: "96 GB on each node, as clouds have with 2 x RTX4090"}
--gpus 4 --gpu GH200 -> 4 -> {--host-memory: "464 GB on each node, as clouds have with 1 x GH200"}
"""


def test_what_is_assumed_is_said(plan, planned):
    """The host of one node among them, of which GH200s have one each."""
    for of, nodes, assumed in values_of(ASSUMED):
        of = f"--model meta-llama/Llama-3.2-1B {of}"
        made, out = planned(of=of), plan(of=of)
        assert (made["assumed"], made["nodes"]) == (assumed, nodes)
        assert made["longest_sequence"] < 100_000_000
        assert ("Assumed: " in out) == bool(assumed)
        assert all(f"{text} ({option})" in out for option, text in assumed.items())


def test_each_length_has_its_own_step(plan, planned):
    made, out = planned(), plan()
    ask = question(EIGHT)
    assert made["longest_step_seconds"] == made["step_seconds"]["step"]
    assert made["help"]
    for one in (*made["help"], *made["ways"]):
        length, seconds = one["longest_sequence"], one["longest_step_seconds"]
        at = ask.with_changes({"options.checkpoint": True, **one["changes"]}).at(length)
        assert seconds == pytest.approx(at.seconds["step"]), one["what"]
        assert f"{length:,} {format_seconds(seconds)}" in out


def test_tokens_for_each_gpu_and_mfu(plan, planned):
    """As a result counts the model's FLOPs; of an adapter, no gradients of the frozen weights."""
    ways = ("", "--set engine.sp=4", "--set 'model.lora={r: 16}'")
    made, halved, adapter = (planned(f"--seq-len 1M {more}") for more in ways)
    for one, samples in ((made, 1), (halved, 2)):  # at a time
        assert one["tokens_per_second_per_gpu"] == pytest.approx(samples * 1e6 / 8 / one["step_seconds"]["step"])
    whole, less = (one["mfu"] * one["step_seconds"]["step"] * 8 * 989e12 for one in (made, adapter))
    dense = question(EIGHT).shape.dense_parameters
    assert whole == pytest.approx(flos(10**6, 10**6, dense, 32, 128, 32)["model"])
    assert 0.3 < made["mfu"] < 0.6
    assert whole - less == pytest.approx(2 * dense * 10**6)
    said = f"{made['tokens_per_second_per_gpu']:,.0f} tokens/s for each GPU, MFU {made['mfu']:.0%}"
    assert said in plan("--seq-len 1M")


def test_a_full_host_is_the_reason(plan, planned):
    """One input in k is kept, the device has to hold the others and has no room for them."""
    more = "--gpu H200 --gpu-memory 141GB"
    made, out = planned(more), plan(more)
    ask = question(f"{EIGHT} {more}")
    beyond = ask.beyond(ask.longest())
    assert (made["limit"], beyond.limit, beyond.activations.inputs_kept_every) == ("host", "device", 2)
    assert ask.on(host_memory=None).at(beyond.seq_len).fits  # so it is the host
    assert "tokens; host memory limits it: the host is full with one layer's input in 2 (k=2)" in out
    assert re.search(r"[\d:]+ host, k=2 [\d:]+ layers whole", out)
    assert {one["what"]: one["limit"] for one in made["ways"]}["layers whole"] == "host"


def test_where_nothing_works_it_says_how_to_ask(plan):
    out = plan("", 1, "--model deepseek-ai/DeepSeek-V3 --gpus 1 --gpu A100-40GB")
    assert "Nothing that was tried makes it fit" in out
    assert "--seq-len without --gpus says which machines hold a length" in out


WORKS = """
Qwen/Qwen3-32B --gpus 4 --gpu A100-40GB --host-memory 500GB \
-> a disk of 2 TB on each node and optimizer on the disk, LoRA, 566 GiB of host memory on each node, 2 nodes
microsoft/phi-4 --gpus 1 --gpu RTX4090 --host-memory 64GB \
-> a disk of 2 TB on each node and optimizer and weights on the disk, LoRA and weights on the host, 8 nodes
meta-llama/Llama-3.1-8B --gpus 8 --gpu H100 --host-memory 60GB \
-> optimizer on the devices, LoRA, 167 GiB of host memory on each node, 8 nodes
"""


@pytest.mark.parametrize("of, works", lines_of(WORKS))
def test_where_nothing_fits_it_says_what_is_missing_and_what_works(of, works, plan, planned):
    of = f"--model {of}"
    made, out = planned("", 1, of), plan("", 1, of)
    assert ", ".join(one["what"] for one in made["works_with"]) == works
    for where in ("device", "host"):
        missing = made[where]["peak"] - made[where]["limit"]
        assert (f"{format_bytes(missing)} of {where} memory for each GPU" in out) == (missing > 0), where
    for one in made["works_with"]:
        assert one["seq_len"] > 1000
        assert f"{one['seq_len']:,} {format_seconds(one['step_seconds'])}" in out
        more = [f"--set={n}={json.dumps(v)}" for n, v in one["changes"].items()]
        more += [f"--gpus={one['gpus']}", f"--gpus-per-node={one['gpus'] // one['nodes']}"]
        more += [f"--disk={one['disk']}"] if one["disk"] else []
        plan(shlex.join([*more, f"--host-memory={one['host_memory']}", f"--seq-len={one['seq_len']}"]), 0, of)


def test_every_category_is_explained(planned):
    seen = set()
    for more in (
        "", "--model Qwen/Qwen3-Next-80B-A3B", "--model openai/gpt-oss-20b", "--set engine.zero_stage=2",
        "--preset paper", "--set options.offload=false --set options.chunk=16384",
        "--set options.attention=flash_attention_2",
    ):  # fmt: skip
        made = planned(f"--seq-len 1M {more}")
        seen |= {*made["device"]["by_category"], *made["host"]["by_category"]}
        assert {*made["step_seconds"]} - {"step"} <= {*rendering.TIMES}
    assert seen <= {*rendering.MEANING}
    assert len(seen) > 12


LENGTHS = """
{}                              -> 40960
{max_position_embeddings: 1000} -> 1000
{max_position_embeddings: 40960, rope_parameters: {rope_type: yarn, rope_theta: 1000000.0, factor: 4.0, \
original_max_position_embeddings: 32768}} -> 131072
"""


@pytest.mark.parametrize("config, trained", values_of(LENGTHS))
def test_lengths_beyond_the_trained_are_remarked(config, trained, planned):
    for times in (1, 2):
        length = f"--model Qwen/Qwen3-4B --seq-len {times * trained}"
        made = planned(f"{length} --set 'model.config={json.dumps(config)}'")
        assert made["model"]["trained_length"] == trained
        assert any(f"up to {trained:,} tokens" in n and "2.0 times" in n for n in made["notes"]) == (times > 1)


def test_other_versions_than_those_of_the_simulation_are_remarked(planned, monkeypatch):
    theirs = fits.public()[fits.VERSIONS]
    said = "simulated with torch {torch} and transformers {transformers};".format(**theirs)
    for here in (theirs, {"torch": "2.11.0", "transformers": "5.17.0"}):
        monkeypatch.setattr(fits, "versions", lambda here=here: here)
        assert any(said in note for note in planned("--seq-len 1M")["notes"]) == (here != theirs)


def test_published_models_have_a_trained_length():
    assert {*TRAINED} <= {*PUBLIC}
    assert len(TRAINED) >= 25


def test_terms_can_be_set(planned):
    given, alone = (
        planned(more)["device"]["by_category"]
        for more in ("--context 2GiB --nccl 0 --fragmentation 0.1 --process 0", "--gpus 1")
    )
    terms = {"CUDA context": 2 * GIB, "NCCL": 0, "fragments": pytest.approx(7.91 * GIB, abs=10)}
    assert given | terms == given
    assert alone["NCCL"] == 0


REFUSED = """
--model meta-llama/Llama-3.1-9B -> did you mean 'meta-llama/Llama-3.1-8B'
--set options.tile=true         -> did you mean 'tiles'
--set options.tiles             -> must have the form FIELD=VALUE
--gpu H100,H20                  -> did you mean 'H200'
--gpu H100,H200                 -> name one with --gpu
--gpu-memory '80 gigs'          -> gpu_memory='80 gigs' is not a number with a unit
--gpu-memory 80                 -> is 80 bytes: give a GPU's memory, such as 80GB
--gpu ,                         -> --gpu is empty
--seq-len ''                    -> --seq-len is empty
--seq-len many                  -> seq-len='many' is not a number
--tree 800K,8x200K --seq-len 5  -> leave out --seq-len
--set 'data={seq_len: 5000}'    -> --set data.seq_len has no effect on a plan
--set data.seq_len=5000         -> has no effect on a plan: give --seq-len
--set model.name=Qwen/Qwen3-8B  -> has no effect on a plan: give --model
--seq-len 3                     -> must be at least 8: one token for each rank
--gpus -1                       -> gpus=-1
--gpus 0                        -> the GPUs of this machine, and it has none
--fragmentation 2               -> a share of at least 0 and below 1
--set engine.sp=3               -> sp=3 does not divide 8 GPUs
--set engine.offload_optimizer=nvme -> nvme_path=None must be a folder on a local disk
--set 'model.lora={r: 8, modules_to_save: [lm_head]}' -> model.lora with 'modules_to_save' is not planned
--set 'model.lora={r: 8, target_modules: [q_proj, lm_head]}' -> 'lm_head' is not planned: give r
--set 'model.lora={r: 8, target_modules: 5}' -> target_modules=5 must be names of linear modules
--set 'model.lora={r: 8, target_modules: [[q_proj]]}' -> must be names of linear modules
--set 'model.lora={r: 8, use_dora: true}' -> model.lora with 'use_dora' is not planned
--set 'model.lora={r: 8, bias: lora_only}' -> model.lora with 'bias' is not planned
--set 'model.lora={r: 8, layer_replication: [[0, 16], [8, 32]]}' -> model.lora with 'layer_replication' is not planned
--disk 2TB --disk-rate 0 -> disk-rate=0 must be more than 0
--set engine.offload_params=nvme --set engine.nvme_path=/x --set model.dtype=fp32 -> on nvme needs bf16 or fp16
--preset paper --gpus 24 --set engine.sp=24 -> preset 'paper' cannot share 32/8 heads over sp=24 ranks
"""


@pytest.mark.parametrize("options, says", lines_of(REFUSED))
def test_what_cannot_be_planned_is_refused(options, says, plan, monkeypatch):
    monkeypatch.setattr("alstlib.planner.devices.device_count", lambda: 0)
    assert says in plan(options, 2)


def test_what_is_spare_is_beside_what_the_table_says(plan, planned):
    one = "--gpus 8 --seq-len 500K"
    host = planned(one)["host"]
    assert f"{format_bytes(host['limit'] - host['peak'])} spare on the host" in plan(one)


def test_of_several_settings_that_do_not_fit_the_one_that_lacks_least_is_told(planned):
    model = "--model meta-llama/Llama-3.1-8B --gpus 1"
    alone = planned("--gpu A100-40GB", 1, model)
    several = planned("--gpu A100-40GB,RTX4090", 1, model)["machines"]
    assert several[0]["host"]["by_category"] == alone["host"]["by_category"]


def test_a_model_of_ones_own(tmp_path, plan, planned):
    config, model = PUBLIC["meta-llama/Llama-3.1-8B"], f"--model '{tmp_path}'"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert planned(model)["longest_sequence"] == planned()["longest_sequence"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert "has attention dropout 0.1, which tiles cannot replay" in plan(model, 2)


def test_a_plan_is_quick():
    """The least processor time of three, from the start of Python to its end: others may use the machine too. A
    fast core takes less than one second."""
    line = [sys.executable, "-m", "alstlib.runs.cli", "plan", *EIGHT.split(), "--json"]

    def used():
        so_far = resource.getrusage(resource.RUSAGE_CHILDREN)
        return so_far.ru_utime + so_far.ru_stime

    def once():
        before = used()
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        return used() - before

    assert min(once() for _ in range(3)) <= 2.0


def test_a_measured_hosts_memory_is_free_beside_the_ranks(tmp_path, planned):
    """`alst check` asks for it while its ranks' processes are there; a host that is named has yet to hold them."""
    rates = ["matmul", "attention_forward", "attention_backward", "host", "host_memory"]
    metrics = {
        "rates": {name: [1e12] for name in rates}, "device_name": "some GPU", "gpu_memory": 80 * GIB, "capability": 9,
        "ranks": 8, "ranks_of_node": 8, "host_memory": 800 * GIB, "overheads": {"context": GIB, "nccl": GIB},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps({"metrics": metrics}))
    assert read_machine(tmp_path).overheads.process == 0
    for more, there in (("", 0), ("--host-memory 800GiB", 4 * GIB), ("--process 1GiB", GIB)):
        host = planned(more, of=f"--machine '{tmp_path}' --seq-len 100K")["host"]
        assert (host["by_category"]["process"], host["limit"]) == (there, 100 * GIB)
