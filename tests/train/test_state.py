"""Training states: a run goes on as if it had not stopped, from every ZeRO stage to every other; nothing is lost."""

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from async_files import OPERATOR, FileHandle, async_files
from cases import lines_of, make_model, make_samples, run_with, values_of, whole_state
from operators import error_of
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import alstlib
from alstlib.base.config import FIELDS, RunConfig
from alstlib.data.loader import SPDataLoader
from alstlib.hf.loading import zero_config
from alstlib.hf.saving import full_weights
from alstlib.planner import model_states
from alstlib.planner.model_states import Sizes
from alstlib.runs.train import files
from alstlib.runs.train import state as states
from alstlib.runs.train.engine import initialize
from alstlib.runs.train.pieces import HeldState
from alstlib.runs.train.resume import EQUAL
from alstlib.runs.train.state import RunStates

DEFAULTS = """
model.name: tiny
model.dtype: fp32
engine.sp: 2
optim.learning_rate: 0.01
optim.warmup_steps: 3
optim.weight_decay: 0.1
optim.max_grad_norm: 0.5
optim.accumulation: 2
optim.steps: 9
"""


def run_config(stage, offload=False, **changes):
    return run_with(DEFAULTS, {"zero_stage": stage, "offload_optimizer": offload, **changes})


class Training:
    """A small model under DeepSpeed and its loader: five optimizer steps of shuffled samples."""

    def __init__(self, run, seed=0, frozen="", **overrides):
        self.run, self.ctx = run, alstlib.SPContext.create(run.engine.sp)
        bf16 = run.model.dtype == "bf16"
        model = make_model(seed=seed, dtype=torch.bfloat16 if bf16 else torch.float32, **overrides)
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or frozen not in name)
        self.handle = alstlib.apply(model, self.ctx, alstlib.Options())
        self.engine = initialize(run, model, bf16)
        each = 5 * run.optim.accumulation // self.ctx.sp
        samples = make_samples(each * self.ctx.world_size, seed=5)[self.ctx.rank * each :][:each]
        order = torch.Generator().manual_seed(seed)  # another one in the engine that loads
        data = torch.utils.data.DataLoader(samples, batch_size=None, shuffle=True, generator=order)
        self.loader = SPDataLoader(data, self.ctx, run.optim.accumulation)
        self.batches = iter(self.loader)
        self.states = RunStates(self.engine, run, run.data.seq_len, Path(), lambda message: None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.destroy()

    def train(self, steps):
        losses = []
        for _ in range(steps):
            loss = 0.0
            for _ in range(self.run.optim.accumulation):
                batch = next(self.batches)
                out = alstlib.causal_lm_loss(self.engine, batch)
                self.engine.backward(out.loss)
                self.engine.step()
                loss += float(out.mean) * int(out.tokens) / int(batch["step_tokens"])
            losses.append(loss)
        return losses

    def start(self, folder, step=2, history=None):
        self.states.folder = folder
        self.states.save(step, self.loader.state_dict(), history)

    def save(self, folder, step=2):
        self.start(folder, step)
        self.states.wait()

    def load(self, folder):
        return self.states.load(folder)

    def everything(self):
        """Optimizer's weights and moments, the weights that the forward reads, counts of steps, learning rates."""
        held = HeldState(self.engine)
        values = whole_state(self.engine)
        values |= {f"model.{name}": p.float().clone() for name, p in full_weights(self.handle.model)}
        rates = [group["lr"] for group in self.engine.optimizer.param_groups]
        steps = max(int(state["step"]) for state in held.adam.state.values())
        return values | {"steps": torch.tensor(steps), "lr": torch.tensor(rates, dtype=torch.float64)}


def steps_in(folder):
    """The steps of the states in a folder, from the newest on."""
    return [json.loads((place / files.STATE).read_text())["step"] for place in files.states_in(folder)]


def differing(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def write(rank, world, folder, run, other):
    """Two steps, a state, and three more steps: what is saved, and the losses that follow."""
    with Training(run, **other) as trained:
        trained.train(2)
        trained.save(folder)
        return trained.everything(), trained.train(3)


def read(rank, world, folder, run, other):
    """What an engine that began with other weights reads, the notes and, on as many ranks, the losses that follow."""
    with Training(run, seed=1, **other) as fresh:
        before, found = fresh.everything(), fresh.load(folder)
        values, losses = fresh.everything(), []
        assert differing(before, values)
        if len(found["by_rank"]) == world:
            fresh.loader.load_state_dict(found["loader"])
            losses = fresh.train(3)
        return values, fresh.states.notes, losses


def check_continued(pool, folder, source, target, **other):
    """A run is in the state that was saved, and goes on as the one that saved it."""
    want, losses = pool(write, folder, source, other)[0]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)  # it trains
    for values, notes, got in pool(read, folder, target, other):
        assert differing(want, values) == []
        assert notes == [f"continued after step 2 from {folder / 'step-00000002'}"]
        assert got == pytest.approx(losses, rel=1e-6)


STAGES = """
[3, false] -> [0, false] -> fp32
[0, false] -> [2, true]  -> fp32
[1, true]  -> [3, true]  -> fp32
[2, true]  -> [2, true]  -> bf16
[0, false] -> [0, false] -> bf16
"""
"""Stages, and whether the optimizer is on the host."""


@pytest.mark.parametrize("source, target, dtype", values_of(STAGES))
def test_any_stage_goes_on_from_any_other(ranks2, tmp_path, source, target, dtype):
    """In bf16 too, which keeps fp32 weights."""
    check_continued(ranks2, tmp_path, run_config(*source, dtype=dtype), run_config(*target, dtype=dtype))


GROUP = 600_000
"""Elements of a group of states in files: a model here has two."""


def in_files(rank, world, task, compiled, *args):
    """A task of a rank whose optimizer may have its states in files, several groups of them."""
    with async_files(compiled), mock.patch.object(zero_config, "ON_DISK", GROUP):
        return task(rank, world, *args)


LARGE = {"vocab_size": 18400, "hidden_size": 64, "intermediate_size": 128}
"""Half of it is more than 1 MiB in bf16: DeepSpeed keeps less in memory."""


def checked(rank, world, task, folder, *args):
    """A task, the numbers of files of each kind that it left of this rank, their bytes, and those that DeepSpeed pinned
    to write and read them."""
    pinned, pin = [], FileHandle.new_cpu_locked_tensor

    def counted(self, numel, like):
        pinned.append(numel * like.element_size())
        return pin(self, numel, like)

    with mock.patch.object(FileHandle, "new_cpu_locked_tensor", counted):
        made = task(rank, world, *args)
    files = [*folder.rglob(f"rank{rank}/*.swp")]
    names = (path.name.partition(".")[0].strip("0123456789_") for path in files if "gradient" not in path.name)
    return made, Counter(names), sum(path.stat().st_size for path in files), sum(pinned)


@pytest.mark.parametrize("compiled, weights", [
    (False, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_states_and_weights_in_files(ranks2, tmp_path, compiled, weights):
    """They train as on the host, but that a norm is summed by groups, and a run goes on from there to a host and from a
    host to there. DeepSpeed's own operator has both to do at once."""
    if compiled and not OPERATOR().is_compatible():
        pytest.skip("DeepSpeed's async_io cannot be compiled: libaio's headers are not installed")
    if compiled:
        OPERATOR().load()  # the first time it is compiled, in minutes: ranks wait for no rank so long
    pool, swap = functools.partial(ranks2, in_files), tmp_path / "swap"
    host = run_config(3, True, dtype="bf16" if weights else "fp32")
    swap.mkdir()
    away = host.replace(engine={"offload_optimizer": "nvme", "nvme_path": str(swap)})
    if weights:
        away = away.replace(engine={"offload_params": "nvme"})
    saved = {"host": pool(write, compiled, tmp_path / "host", host, LARGE)[0]}
    want, losses = saved["host"]
    sizes = [p.numel() for p in make_model(**LARGE).parameters()]
    of = Sizes(parameters=sum(sizes), layer=0, embedding=max(sizes), largest=max(sizes))
    with mock.patch.object(model_states, "ON_DISK", GROUP):
        plan = model_states.model_states(away, of, 2, 2 if weights else 4)
    for made, counts, written, pinned in pool(checked, compiled, write, swap, tmp_path / "away", away, LARGE):
        assert sum(plan.disk.values()) == pytest.approx(written, rel=0.05)
        assert compiled or plan.host[model_states.FILES] == pytest.approx(pinned, rel=0.05)
        saved["away"] = made
        for name, value in made[0].items():
            torch.testing.assert_close(value, want[name])
        assert made[1] == pytest.approx(losses, rel=1e-6)
        assert counts[""] == counts["exp_avg-"] == counts["exp_avg_sq-"] > 1
        assert counts["param"] == (2 if weights else 0)
    for folder, target in (("away", host), ("host", away), ("away", away)):
        for values, _, got in pool(read, compiled, tmp_path / folder, target, LARGE):
            assert differing(saved[folder][0], values) == []
            assert got == pytest.approx(saved[folder][1], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_and_tied_weights(ranks2, tmp_path, stage):
    run = run_config(stage)
    check_continued(ranks2, tmp_path, run, run, frozen="k_proj", tie_word_embeddings=True)
    state = (tmp_path / "step-00000002" / "state.json").read_text()
    layer = "model.layers.0.self_attn.k_proj.weight"
    names = ("weight.model.embed_tokens.weight", f"weight.{layer}", "weight.lm_head.weight", f"exp_avg.{layer}")
    assert [f'"{name}' in state for name in names] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_other_numbers_of_ranks(ranks2, ranks4, tmp_path, stage):
    """From two ranks with sp=2 to four without SP, where norms of 30 elements have padded shards; and back."""
    odd = {"kind": "qwen3", "hidden_size": 30}
    two, four = (ranks2, run_config(stage, world_size=2)), (ranks4, run_config(stage, sp=1, world_size=4))
    for (pool, run), (other, there) in ((two, four), (four, two)):
        want = pool(write, tmp_path, run, odd)[0][0]
        for values, _, _ in other(read, tmp_path, there, odd):
            assert differing(want, values) == []


def test_each_rank_writes_its_part_and_the_rest_is_strict_json(ranks2, tmp_path):
    run, folder = run_config(3), tmp_path / "step-00000002"
    ranks2(write, tmp_path, run, {})
    sizes = {f.name: f.stat().st_size for f in folder.iterdir()}
    assert sizes.keys() == {"__0_0.distcp", "__1_0.distcp", "state.checksum", "state.json"}
    assert abs(sizes["__0_0.distcp"] / sizes["__1_0.distcp"] - 1) < 0.2
    state = json.loads((folder / "state.json").read_text(), parse_constant=pytest.fail)
    assert state["config"].pop("schema_version") == files.SCHEMA_VERSION
    assert [state[name] for name in ("step", "adam_steps", "scheduler_step")] == [2] * 3
    assert len(state["by_rank"]) == 2
    assert RunConfig.from_dict(state["config"]) == run


@contextlib.contextmanager
def full_disk():
    """Each file of a state ends with "No space left on device"."""
    original = FileSystem.create_stream

    @contextlib.contextmanager
    def stream(*args):
        with original(*args) as file:
            yield file
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(FileSystem, "create_stream", stream):
        yield


@contextlib.contextmanager
def slow_disk():
    """Nothing is written before the event."""
    event, original = threading.Event(), files.Writer.write_data

    def later(*args):
        assert event.wait(60)
        return original(*args)

    with mock.patch.object(files.Writer, "write_data", later):
        try:
            yield event
        finally:  # a rank that fails lets its writer end
            event.set()


def while_training(rank, world, folder, stage, fails):
    """A state that is written, or cannot be, while two steps are made; and what is loaded afterwards."""
    said, history = "", [1.0]
    with Training(run_config(stage)) as trained:
        trained.save(folder, step=1)
        trained.train(1)
        saved = trained.everything()
        with full_disk() if fails and rank else contextlib.nullcontext(), slow_disk() as goes_on:
            trained.start(folder, 2, history)
            history.append(2.0)
            trained.train(2)
            before = steps_in(folder)[0]
            torch.distributed.barrier()
            goes_on.set()
            try:
                trained.states.wait()
            except OSError as e:
                said = str(e)
        found = trained.load(folder)
        apart = differing(saved, trained.everything())
    return {"before": before, "said": said, "step": found["step"], "history": found["history"], "apart": apart}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_is_written_while_the_training_goes_on(ranks2, tmp_path, stage):
    for result in ranks2(while_training, tmp_path / "state", stage, False):
        assert result == {"before": 1, "said": "", "step": 2, "history": [1.0], "apart": []}


def test_what_goes_wrong_meanwhile_is_raised_on_all_ranks(ranks2, tmp_path):
    for result in ranks2(while_training, tmp_path / "state", 2, True):
        assert result["said"].endswith("(one saved before is intact): [Errno 28] No space left on device")
        assert (result["before"], result["step"]) == (1, 1)
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


def test_a_folder_that_the_nodes_do_not_share_holds_no_state(tmp_path):
    writer = files.Writer(tmp_path / "state", {"step": 1}, {})
    with pytest.raises(OSError, match="do all nodes share this folder"):
        writer.finish(
            Metadata({}), [[WriteResult(MetadataIndex(""), 0, {"file": "__1_0.distcp"})]]
        )  # of a rank elsewhere
    assert files.states_in(tmp_path) == []


def without_room(rank, world, folder):
    """Whether a rank that has no host memory for a copy waits."""
    with Training(run_config(2)) as trained:
        with mock.patch.object(states, "host_available", return_value=0 if rank else 2**40):
            trained.start(folder, step=1)
        waited, want = not rank or trained.states.pending.done(), trained.everything()
        trained.train(1)
        trained.load(folder)
        return waited and not differing(want, trained.everything())


def test_the_ranks_wait_where_the_host_has_no_room_for_a_copy(ranks2, tmp_path):
    assert ranks2(without_room, tmp_path / "state") == [True, True]


def after_crashes(rank, world, folder):
    """The steps found after a process died while it wrote, after a state could not get its place, and after another;
    then a state that does not follow them."""
    with Training(run_config(1)) as trained:
        trained.save(folder, step=1)

        def step_found():
            torch.distributed.barrier()
            return trained.load(folder)["step"]

        torch.distributed.barrier()
        if rank == 0:
            shutil.copytree(files.states_in(folder)[0], f"{folder}.tmp")
        seen = [step_found()]
        with mock.patch.object(files, "write_json", side_effect=OSError(errno.EIO, "bad disk")):
            with pytest.raises(OSError, match="bad disk"):
                trained.save(folder, step=2)
            seen.append(step_found())
        for step in (3, 4):
            trained.save(folder, step=step)
        seen.append(step_found())
        if rank == 0:
            assert files.move_aside(folder) == folder.with_name("state.kept1")
        trained.save(folder, step=5)
        return seen


def test_a_crash_leaves_a_state_and_the_last_two_are_kept(ranks2, tmp_path):
    assert ranks2(after_crashes, tmp_path / "state") == [[1, 1, 4]] * 2
    assert sorted(f.name for f in tmp_path.iterdir()) == ["state", "state.kept1"]
    assert (steps_in(tmp_path), steps_in(tmp_path / "state.kept1")) == ([5], [4, 3])


UNUSABLE = """
nowhere -> there is no training state
empty   -> A checkpoint of DeepSpeed's is not read
flipped -> __1_0.distcp is damaged, its checksum
cut     -> __1_0.distcp is damaged
half    -> state.json is damaged
gone    -> __1_0.distcp is damaged
bare    -> there is no training state
earlier -> schema_version=4 (here 5)
wider   -> it is of another model, or others are frozen: 18 tensors differ
"""


def refusals(rank, world, folders):
    with Training(run_config(3)) as fresh:
        before = fresh.everything()
        said = [error_of(fresh.load, folder) for folder in folders]
        return [*said, ",".join(differing(before, fresh.everything()))]


def test_what_cannot_be_loaded_is_refused_and_nothing_is_touched(ranks2, tmp_path):
    ranks2(write, tmp_path / "good", run_config(3), {})
    ranks2(write, tmp_path / "wider", run_config(3), {"intermediate_size": 64})
    (tmp_path / "empty").mkdir()
    flipped, cut, half, earlier, gone, bare = (
        shutil.copytree(tmp_path / "good" / "step-00000002", tmp_path / name)
        for name in ("flipped", "cut", "half", "earlier", "gone", "bare")
    )
    shard, state = "__1_0.distcp", earlier / "state.json"
    content = bytearray((flipped / shard).read_bytes())
    content[-5] ^= 1
    (flipped / shard).write_bytes(content)
    for file in (cut / shard, half / "state.json"):
        os.truncate(file, 1000)
    state.write_text(state.read_text().replace('"schema_version": 5', '"schema_version": 4'))
    (earlier / files.CHECKSUM).write_text(files._checksum(state))
    for file in (gone / shard, bare / files.CHECKSUM):
        file.unlink()
    names, parts = zip(*lines_of(UNUSABLE))
    for said in ranks2(refusals, [tmp_path / name for name in names]):
        assert said.pop() == ""
        assert all(part in message for part, message in zip(parts, said, strict=True)), said


OTHER = yaml.safe_load("""
optim.learning_rate: 0.02
optim.warmup_steps: 4
optim.weight_decay: 0.2
optim.max_grad_norm: 0.0
optim.accumulation: 4
optim.seed: 1
data.batch_size: 2
data.seq_len: 99
data.packed: true
data.name: other.jsonl
data.tokenizer: other
model.name: small
model.config: {rope_theta: 5.0}
model.random_weights: false
model.dtype: bf16
contrib.sparse: {top: 16}
model.lora: {r: 4}
data.eval: 0.1
optim.trainer: {optim: sgd}
""")
"""Another value of every field that a state belongs to."""
FREE = yaml.safe_load("""
engine.zero_stage: 3
optim.steps: 20
engine.sp: 1
limits.timeout: 5
row: alst
options.tiles.loss: true
options.chunk: 64
output.checkpoint_every: 1
output.save_to: there
output.resume_from: here
options.attention: eager
model.dtype: auto
""")


def configurations(rank, world, folder, changes):
    """How each of these changed runs is refused."""
    said = []
    with Training(run_config(2)) as fresh:
        for change in changes:
            dtype = change.get("model.dtype")
            run = fresh.run if len(change) == 1 and dtype else fresh.run.replace(**{"options.chunk": 64, **change})
            fresh.engine.bfloat16_enabled = lambda dtype=dtype: dtype == "bf16"
            here = RunStates(fresh.engine, run, run.data.seq_len, Path(), lambda message: None)
            said.append(error_of(here.load, folder))
    return said


def test_a_state_belongs_to_its_configuration(ranks2, tmp_path):
    assert set(FIELDS) >= set(EQUAL) == OTHER.keys()
    ranks2(write, tmp_path, run_config(2), {})
    differs = [{k: v} for k, v in OTHER.items()]
    for said in ranks2(configurations, tmp_path, [*differs, {"optim.steps": 1}, FREE]):
        assert said.pop() == "accepted"
        assert "steps=1 counts all steps, and it has done 2 already" in said.pop()
        for name, message in zip(OTHER, said):
            assert "step 2 belongs to another configuration" in message
            assert re.search(rf"\b{name}=.*\(here ", message), message
            assert message.count("(here") == 1, message


def not_finite(rank, world, folder, key):
    with Training(run_config(2)) as trained:
        trained.save(folder, step=1)
        saved = trained.everything()
        pieces = HeldState(trained.engine).pieces
        held = next(piece.held for name, piece in pieces.items() if name.startswith(key) and len(piece.held))
        held.fill_(float("nan"))
        with pytest.raises(FloatingPointError) as said:
            trained.save(folder)
        found = trained.load(folder)
        return str(said.value), found["step"], differing(saved, trained.everything())


@pytest.mark.parametrize("key", ["weight.", "exp_avg_sq."])
def test_a_state_that_is_not_finite_is_not_saved(ranks2, tmp_path, key):
    for said, step, apart in ranks2(not_finite, tmp_path / "state", key):
        assert re.search(rf"\(one saved before is intact\): {key}.* is not finite", said), said
        assert (step, apart) == (1, [])
    assert [f.name for f in tmp_path.iterdir()] == ["state"]
