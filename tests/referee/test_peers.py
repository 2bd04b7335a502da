"""The comparison with other stacks: every stack trains, is counted by the same rules, and takes the same turn."""

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import peers
import pytest
import torch
import torch.distributed as dist
import yaml
from cases import values_of
from operators import error_of
from peers import Counts, floor_step, peak_over_start

from alstlib.base.config import RunConfig
from alstlib.planner.measure.ledger import storage_bytes
from alstlib.runs import results
from alstlib.runs.launch import launch
from alstlib.ulysses.alltoall import Exchange

REFERENCE = ("deepspeed", "deepspeed, loss tiles")
RUN = yaml.safe_load("""
model.name: tiny
model.config: {num_hidden_layers: 2, vocab_size: 256}
model.dtype: fp32
engine.world_size: 2
engine.sp: 2
engine.offload_optimizer: false
optim.learning_rate: 0.0
optim.steps: 2
options.chunk: 64
data.seq_len: 320
""")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    names = ("ours", "readme", *REFERENCE, "transformers", "ours+chunk+offload")
    run = RunConfig.from_dict({**RUN, "optim.steps": 1, "peers": names})
    made = launch(run, tmp_path_factory.mktemp("peers"), worker=peers.__file__)["metrics"]["peers"]
    assert tuple(made) == names
    return made


def test_stacks_side_by_side(compared):
    """All see the same sample (and so the same loss); ours is exact; work is counted as it was done."""
    ours = compared["ours"]
    assert all(one["loss"] == pytest.approx(ours["loss"], rel=1e-3) for one in compared.values())
    assert all(len(one["step_seconds"]) == 1 and max(one["device_peak_bytes"]) > 0 for one in compared.values())
    assert all(compared[n]["gradient_error"] < 1e-5 for n in compared if n not in REFERENCE)
    forwards = {n: (one["attention_forwards"], one["mlp_forwards"]) for n, one in compared.items()}
    others = {**dict.fromkeys(REFERENCE, (2, 3)), "transformers": (2, 2)}
    assert forwards == {**dict.fromkeys(compared, (1, 2)), **others}
    assert [compared[n]["sequences"] for n in ("ours", "transformers")] == [1, 2]
    assert compared["ours+chunk+offload"]["host_peak_bytes"][0] > 0 == ours["host_peak_bytes"][0]


def test_every_stack_has_processes_of_its_own(compared):
    """One for each rank: stacks that share a process slow each other down."""
    processes = [pid for one in compared.values() for pids in one["processes"] for pid in pids]
    assert len({*processes}) == len(processes) == 2 * 6


def _in_turn(rank, world, run, out):
    """The launches of a comparison whose stacks are not built, and what came of them."""
    launches = []

    class Unbuilt(peers.Comparison):
        @contextmanager
        def alone(self, name):
            def time(method, steps, look):
                launches.append((name, steps, look))
                looked = {"sequences": 1, "device_peak_bytes": 0, "host_peak_bytes": 0, "wire_bytes": 0} if look else {}
                turn = float(len(launches))
                return {"loss": turn, **looked}, [turn] * steps, [turn]

            yield time

    return launches, Unbuilt(RunConfig.from_dict(run), Path(out)).compare()["peers"]


def test_stacks_take_turns_in_two_rounds(ranks2, tmp_path):
    for launches, made in ranks2(_in_turn, {**RUN, "optim.steps": 3, "peers": ["ours", "deepspeed"]}, str(tmp_path)):
        assert launches == [("ours", 1, True), ("deepspeed", 1, True), ("ours", 2, False), ("deepspeed", 2, False)]
        ours, theirs = made["ours"], made["deepspeed"]
        assert (ours["step_seconds"], ours["loss"], ours["tokens_per_second"]) == ([1, 3, 3], 1, 320 / 3)
        assert (theirs["step_seconds"], theirs["processes"]) == ([2, 4, 4], [[2], [4]])


def test_wire_bytes_are_the_formulas(compared):
    """In units of a head's rows of one rank: 4 query and 2 key/value heads on 2 ranks."""
    layers, rows, width = 2, 160, 16
    head = rows * width * 4 // 2
    q, k = 4, 2
    forward = (q + 2 * k) + q
    ours = forward + (q + 2 * k) + forward + q / width  # once forward, and backward with logsumexps
    positions = 2 * 8 * rows * layers  # gathered in each forward
    stripes = 3 * 8 * rows // 2  # tokens, positions and labels of `chunk`
    sent = {n: one["wire_bytes"] for n, one in compared.items()}
    assert sent["ours"] == ours * head * layers
    assert abs(sent["ours+chunk+offload"] - sent["ours"] - stripes) <= 3 * 8 * 64
    for name in REFERENCE:  # twice forward, once backward
        assert sent[name] == 3 * forward * head * layers + positions
    assert sent["transformers"] == 0


def test_longest_in_an_equal_budget(tmp_path):
    run = {
        **RUN, "search": True, "data.seq_len": 128, "search.granule": 128, "search.max": 512, "engine.prefetch": False,
        "limits.device_memory": "1MiB", "peers": ["deepspeed", "ours+chunk+offload"],
    }  # fmt: skip
    for one in launch(RunConfig.from_dict(run), tmp_path, worker=peers.__file__)["metrics"]["peers"].values():
        tried = {t["seq_len"]: t["device_peak_bytes"] for t in one["tried"]}
        assert tried[one["seq_len"]] <= 2**20
        assert one["seq_len"] == 512 or tried[one["seq_len"] + 128] > 2**20
    found = results.read_result(tmp_path / "result.json")
    assert found["status"] == "ok"
    assert results.table([found])[0]["seq_len"]


BAD = """
{peers: []}                               -> peers names no stack
{peers: [our]}                            -> unknown stack in peers 'our'; did you mean 'ours'
{peers: [ours+chunk], options.chunk: null} -> set chunk, the tokens of a chunk
{peers: [ours], search: true}             -> search=True needs device_memory
"""


def _refused(rank, world, run, out):
    return error_of(peers.Comparison, RunConfig.from_dict(run), Path(out))


@pytest.mark.parametrize("changes, message", values_of(BAD))
def test_bad_input(ranks2, tmp_path, changes, message):
    for found in ranks2(_refused, {**RUN, **changes}, str(tmp_path)):
        assert message in found


def _held(rank, world, run, name):
    """Bytes of weights that a rank holds when the engine of a stack begins: of its own, in parts, and whole."""
    import deepspeed
    from baselines import Stack

    held, begin = [], deepspeed.initialize

    def initialize(*args, model, **kwargs):
        weights = [*model.parameters()]
        held.extend(storage_bytes(ps) for ps in (weights, [getattr(p, "ds_tensor", p) for p in weights]))
        held.append(4 * sum(getattr(p, "ds_numel", p.numel()) for p in weights))
        return begin(*args, model=model, **kwargs)

    with mock.patch.object(deepspeed, "initialize", initialize):
        Stack(name, run, torch.device("cpu"), False)
    return held


@pytest.mark.parametrize("name", ["ours", "readme", "transformers"])
def test_no_rank_but_the_first_holds_a_stacks_model_whole(ranks2, name):
    """Nor that one, once its weights are in parts."""
    for left, parts, whole in ranks2(_held, RunConfig.from_dict({**RUN, "peers": [name]}), name):
        assert left < whole / 100
        assert whole / 2 <= parts < whole / 2 + 10_000


def _counted(rank, world):
    exchange, x, tokens = Exchange(dist.group.WORLD), torch.ones(4), torch.ones(5, dtype=torch.int64)
    with Counts() as counts:
        exchange.to_heads(torch.ones(1, 4, 3, 2))
        exchange.to_heads(torch.ones(1, 1, 3, 2))
        for one in (tokens, x):  # and as ZeRO gathers weights
            dist.all_gather([torch.empty_like(one) for _ in range(world)], one)
        dist.all_gather_into_tensor(torch.empty(4 * world), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.all_reduce(x)
        dist.barrier()
    return dict(counts.sent), dict(counts.calls), exchange.bytes_sent


def test_what_is_sent_is_counted(ranks2):
    for sent, calls, exchanged in ranks2(_counted):
        assert (sent, calls["exchange"]) == ({"exchange": exchanged + 40, "other": 16 + 16 + 8 + 16}, 3)


def test_zeros_traffic_is_told_apart(compared):
    """The reference gathers a layer's weights again for each tile; ours once forward and once backward."""
    tiles, plain, ours = (compared[n]["other_wire_bytes"] for n in ("deepspeed, loss tiles", "deepspeed", "ours"))
    assert tiles > plain > ours > 0


def test_the_peak_over_what_is_there():
    cpu = torch.device("cpu")
    assert peak_over_start(lambda: torch.zeros(1000).add(1), cpu) == pytest.approx(8000, rel=0.05)
    assert peak_over_start(lambda: torch.ops.aten.add(torch.zeros(1000), 1), cpu) == 8000


def test_floor_runs():
    from transformers import LlamaConfig

    config = LlamaConfig(
        **{**RUN["model.config"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    )
    floor_step(config, 64, 2, torch.device("cpu"), bf16=False)()
