"""Training states: a run goes on as if it had not stopped, from every ZeRO stage to every other; nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import by_own_names, make_model, make_samples, whole_state
from operators import error_of
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import alstlib
from alstlib.config import EQUAL, FIELDS, RunConfig
from alstlib.data.loader import SPDataLoader
from alstlib.hf.saving import full_weights
from alstlib.train import files
from alstlib.train import state as states
from alstlib.train.engine import initialize
from alstlib.train.pieces import HeldState
from alstlib.train.state import RunStates


def run_config(stage, offload=False, **changes):
    defaults = {
        "model.name": "tiny",
        "engine.zero_stage": stage,
        "engine.offload_optimizer": offload,
        "engine.sp": 2,
        "optim.learning_rate": 1e-2,
        "optim.warmup_steps": 3,
        "optim.weight_decay": 0.1,
        "optim.max_grad_norm": 0.5,
        "optim.accumulation": 2,
        "model.dtype": "fp32",
        "optim.steps": 9,
    }
    return RunConfig.from_dict(by_own_names({**defaults, **changes}))


class Training:
    """A small model under DeepSpeed and its loader: four optimizer steps of shuffled samples."""

    def __init__(self, run, seed=0, frozen="", **overrides):
        self.run, self.ctx = run, alstlib.SPContext.create(run.engine.sp)
        bf16 = run.model.dtype == "bf16"
        model = make_model(seed=seed, dtype=torch.bfloat16 if bf16 else torch.float32, **overrides)
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or frozen not in name)
        self.handle = alstlib.apply(model, self.ctx, alstlib.Options())
        self.engine = initialize(run, model, bf16)
        each = 4 * run.optim.accumulation // self.ctx.sp
        samples = make_samples(each * self.ctx.world_size, seed=5)[self.ctx.rank * each :][:each]
        order = torch.Generator().manual_seed(seed)  # another one in the engine that loads
        data = torch.utils.data.DataLoader(samples, batch_size=None, shuffle=True, generator=order)
        self.loader = SPDataLoader(data, self.ctx, run.optim.accumulation)
        self.batches: Any = None
        self.states = RunStates(self.engine, run, run.data.seq_len, Path(), lambda message: None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.destroy()

    def train(self, steps):
        self.batches = self.batches or iter(self.loader)
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
        self.states.folder = Path(folder)
        self.states.save(step, self.loader.state_dict(), history)

    def save(self, folder, step=2):
        self.start(folder, step)
        self.states.wait()

    def load(self, folder):
        return self.states.load(Path(folder))

    def everything(self):
        """Optimizer's weights and moments, the weights that the forward reads, counts of steps, learning rates."""
        held = HeldState(self.engine)
        values = whole_state(self.engine)
        values |= {f"model.{name}": p.float().clone() for name, p in full_weights(self.handle.model)}
        values["steps"] = max(int(state["step"]) for state in held.adam.state.values())
        return values | {"lr": [group["lr"] for group in self.engine.optimizer.param_groups]}


def steps_in(folder):
    """The steps of the states in a folder, from the newest on."""
    return [json.loads((place / files.STATE).read_text())["step"] for place in files.states_in(folder)]


def differing(a, b):
    assert a.keys() == b.keys()
    return [n for n in a if not (torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n])]


def resume(rank, world, folder, run, other):
    """Two steps, a state, two more steps; and two from the state, in an engine that began with other weights."""
    with Training(run, **other) as whole:
        whole.train(2)
        whole.save(folder)
        saved, want, end = whole.everything(), whole.train(2), whole.everything()
    with Training(run, seed=1, **other) as again:
        apart = differing(saved, again.everything())
        found = again.load(folder)
        again.loader.load_state_dict(found["loader"])
        loaded, got = differing(saved, again.everything()), again.train(2)
        worst = max(float((end[n] - v).norm() / end[n].norm()) for n, v in again.everything().items() if "weight." in n)
    return {"want": want, "got": got, "loaded": loaded, "apart": len(apart), "step": found["step"], "worst": worst}


def check_resumed(results):
    for r in results:
        assert (r["step"], r["loaded"]) == (2, [])
        assert r["apart"] > 0
        assert r["got"] == pytest.approx(r["want"], rel=1e-6)
        assert r["want"][0] != pytest.approx(r["want"][1], rel=1e-3)  # it trains
        assert r["worst"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, offload, dtype",
    [(0, False, "bf16"), (2, True, "bf16"), (1, True, "fp32"), (3, True, "fp32"), (2, False, "fp32")],
)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(ranks2, tmp_path, stage, offload, dtype):
    """In bf16 too, which keeps fp32 weights."""
    check_resumed(ranks2(resume, str(tmp_path / "state"), run_config(stage, offload, dtype=dtype), {}))


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_and_tied_weights(ranks2, tmp_path, stage):
    other = {"frozen": "k_proj", "tie_word_embeddings": True}
    check_resumed(ranks2(resume, str(tmp_path / "state"), run_config(stage), other))
    state = (tmp_path / "state" / "step-00000002" / "state.json").read_text()
    for name, is_there in (
        ("weight.model.embed_tokens.weight", True), ("weight.lm_head.weight", False),
        ("weight.model.layers.0.self_attn.k_proj.weight", True),
        ("exp_avg.model.layers.0.self_attn.k_proj.weight", False),
    ):  # fmt: skip
        assert (f'"{name}' in state) == is_there, name


def write(rank, world, folder, run, other):
    with Training(run, **other) as trained:
        trained.train(2)
        trained.save(folder)
        return trained.everything()


def read(rank, world, folder, run, other):
    with Training(run, seed=1, **other) as fresh:
        found = fresh.load(folder)
        return {"found": found, "values": fresh.everything(), "loss": fresh.train(1), "notes": fresh.states.notes}


@pytest.mark.parametrize("source, target", [((3, False), (0, False)), ((0, False), (2, True)), ((1, True), (3, True))])
def test_any_stage_to_any_other(ranks2, tmp_path, source, target):
    want = ranks2(write, str(tmp_path), run_config(*source), {})[0]
    assert all(torch.equal(t, want[f"model.{n[7:]}"].flatten()) for n, t in want.items() if n.startswith("weight."))
    for result in ranks2(read, str(tmp_path), run_config(*target), {}):
        assert differing(want, result["values"]) == []
        assert (result["found"]["step"], result["found"]["loader"]["micro_batches"]) == (2, 4)
        assert result["notes"] == [f"continued after step 2 from {tmp_path / 'step-00000002'}"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_other_numbers_of_ranks(ranks2, ranks4, tmp_path, stage):
    """From two ranks with sp=2 to four without SP, where norms of 30 elements have padded shards; and back."""
    odd = {"kind": "qwen3", "hidden_size": 30}
    two, four = (ranks2, run_config(stage, world_size=2)), (ranks4, run_config(stage, sp=1, world_size=4))
    for (pool, run), (other, there) in ((two, four), (four, two)):
        want = pool(write, str(tmp_path), run, odd)[0]
        for result in other(read, str(tmp_path), there, odd):
            assert differing(want, result["values"]) == []
            if pool is ranks2:
                assert "saved under engine.world_size=2 (here 4), engine.sp=2 (here 1)" in result["notes"][1]


def test_each_rank_writes_its_part_and_the_rest_is_strict_json(ranks2, tmp_path):
    run, folder = run_config(3), tmp_path / "run" / "state"
    ranks2(write, str(folder), run, {})
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["state"]
    sizes = {f.name: f.stat().st_size for f in (folder / "step-00000002").iterdir()}
    assert sizes.keys() == {"__0_0.distcp", "__1_0.distcp", "state.checksum", "state.json"}
    assert abs(sizes["__0_0.distcp"] / sizes["__1_0.distcp"] - 1) < 0.2

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    state = json.loads((folder / "step-00000002" / "state.json").read_text(), parse_constant=refuse)
    assert state["config"].pop("schema_version") == files.SCHEMA_VERSION
    assert [state[name] for name in ("step", "adam_steps", "scheduler_step")] == [2] * 3
    assert len(state["by_rank"]) == 2
    assert RunConfig.from_dict(state["config"]) == run


@contextlib.contextmanager
def disk_with_room_for(writes):
    """The disk is full after so many writes of this process."""

    class Full(io.BufferedWriter):
        def write(self, content):
            nonlocal writes
            writes -= 1
            if writes < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    @contextlib.contextmanager
    def stream(self, path, mode):
        with Full(io.FileIO(path, "w")) as file:
            yield file

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
        finally:
            event.set()


def while_training(rank, world, folder, stage, fails):
    """A state that is written, or cannot be, while two steps are made; and what is loaded afterwards."""
    said, history = "", [1.0]
    with Training(run_config(stage)) as trained:
        trained.save(folder, step=1)
        trained.train(1)
        saved = trained.everything()
        with disk_with_room_for(3 if fails and rank else 10**6), slow_disk() as goes_on:
            trained.start(folder, 2, history)
            history.append(2.0)
            trained.train(2)
            before = steps_in(Path(folder))[0]
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
    for result in ranks2(while_training, str(tmp_path / "state"), stage, False):
        assert result == {"before": 1, "said": "", "step": 2, "history": [1.0], "apart": []}


def test_what_goes_wrong_meanwhile_is_raised_on_all_ranks(ranks2, tmp_path):
    for result in ranks2(while_training, str(tmp_path / "state"), 2, True):
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
    assert ranks2(without_room, str(tmp_path / "state")) == [True, True]


def after_crashes(rank, world, folder):
    """A process that died while it wrote, and a state that could not get its place."""
    with Training(run_config(1)) as trained:
        trained.save(folder, step=1)

        def step_found():
            torch.distributed.barrier()
            return trained.load(folder)["step"]

        torch.distributed.barrier()
        if rank == 0:
            shutil.copytree(files.states_in(Path(folder))[0], f"{folder}.tmp")
        seen = [step_found()]
        with mock.patch.object(files, "write_json", side_effect=OSError(errno.EIO, "bad disk")):
            try:
                trained.save(folder, step=2)
            except OSError:
                seen.append(step_found())
        trained.save(folder, step=3)
        return [*seen, step_found()]


def test_a_crash_leaves_a_state(ranks2, tmp_path):
    assert ranks2(after_crashes, str(tmp_path / "state")) == [[1, 1, 3]] * 2
    assert [f.name for f in tmp_path.iterdir()] == ["state"]
    assert steps_in(tmp_path) == [3, 1]


def refusals(rank, world, folders):
    with Training(run_config(3)) as fresh:
        before = fresh.everything()
        said = [error_of(fresh.load, folder) for folder in folders]
        return [*said, ",".join(differing(before, fresh.everything()))]


def test_what_cannot_be_loaded_is_refused_and_nothing_is_touched(ranks2, tmp_path):
    ranks2(write, str(tmp_path / "good"), run_config(3), {})
    ranks2(write, str(tmp_path / "wider"), run_config(3), {"intermediate_size": 64})
    (tmp_path / "empty").mkdir()
    for name in ("flipped", "cut", "half", "earlier", "gone", "bare"):
        shutil.copytree(tmp_path / "good" / "step-00000002", tmp_path / name)
    shard = "__1_0.distcp"
    content = bytearray((tmp_path / "flipped" / shard).read_bytes())
    (tmp_path / "cut" / shard).write_bytes(content[: len(content) // 2])
    content[-5] ^= 1
    (tmp_path / "flipped" / shard).write_bytes(content)
    text = (tmp_path / "half" / "state.json").read_text()
    (tmp_path / "half" / "state.json").write_text(text[: len(text) // 2])
    earlier = tmp_path / "earlier" / "state.json"
    earlier.write_text(text.replace('"schema_version": 5', '"schema_version": 4'))
    (earlier.parent / files.CHECKSUM).write_text(files._checksum(earlier))
    (tmp_path / "gone" / shard).unlink()
    (tmp_path / "bare" / files.CHECKSUM).unlink()
    want = {
        "nowhere": "there is no training state", "empty": "A checkpoint of DeepSpeed's is not read",
        "flipped": f"{shard} is damaged, its checksum", "cut": f"{shard} is damaged", "half": "state.json is damaged",
        "gone": f"{shard} is damaged", "bare": "there is no training state", "earlier": "schema_version=4 (here 5)",
        "wider": "it is of another model, or others are frozen: 18 tensors differ",
    }  # fmt: skip
    for said in ranks2(refusals, [str(tmp_path / name) for name in want]):
        assert said.pop() == ""
        assert [part in message for part, message in zip(want.values(), said)] == [True] * len(want), said


OTHER = {
    "optim.learning_rate": 0.02,
    "optim.warmup_steps": 4,
    "optim.weight_decay": 0.2,
    "optim.max_grad_norm": 0.0,
    "optim.accumulation": 4,
    "optim.seed": 1,
    "data.batch_size": 2,
    "data.seq_len": 99,
    "data.packed": True,
    "data.name": "other.jsonl",
    "data.tokenizer": "other",
    "model.name": "small",
    "model.config": {"rope_theta": 5.0},
    "model.random_weights": False,
    "model.dtype": "bf16",
    "contrib.sparse": {"top": 16},
    "model.lora": {"r": 4},
    "data.eval": 0.1,
    "optim.trainer": {"optim": "sgd"},
}
"""Another value of every field that a state belongs to."""


def configurations(rank, world, folder, changes):
    said = []
    with Training(run_config(2)) as fresh:
        for change in changes:
            dtype = change.get("model.dtype")
            run = fresh.run if len(change) == 1 and dtype else fresh.run.replace(**{"options.chunk": 64, **change})
            fresh.engine.bfloat16_enabled = lambda dtype=dtype: dtype == "bf16"
            try:
                here = RunStates(fresh.engine, run, run.data.seq_len, Path(), lambda message: None)
                said.append(str(here.load(Path(folder))["step"]))
            except states.OtherState as e:
                said.append(str(e))
    return said


def test_a_state_belongs_to_its_configuration(ranks2, tmp_path):
    assert set(FIELDS) >= set(EQUAL) == OTHER.keys()
    ranks2(write, str(tmp_path), run_config(2), {})
    free = {
        "engine.zero_stage": 3,
        "optim.steps": 20,
        "engine.sp": 1,
        "limits.timeout": 5,
        "row": "alst",
        "options.tiles.loss": True,
        "options.chunk": 64,
        "output.checkpoint_every": 1,
        "output.save_to": "there",
        "output.resume_from": "here",
        "options.attention": "eager",
        "model.dtype": "auto",
    }
    differs = [{k: v} for k, v in OTHER.items()]
    for said in ranks2(configurations, str(tmp_path), [*differs, {"optim.steps": 1}, free]):
        assert said.pop() == "2"
        assert "steps=1 counts all steps, and it has done 2 already" in said.pop()
        for name, message in zip(OTHER, said):
            assert "step 2 belongs to another configuration" in message
            assert re.search(rf"\b{name}=.*\(here ", message), message
            assert message.count("(here") == 1, message


def not_finite(rank, world, folder, key):
    said = "nothing"
    with Training(run_config(2)) as trained:
        trained.save(folder, step=1)
        saved = trained.everything()
        pieces = HeldState(trained.engine).pieces
        held = next(piece.held for name, piece in pieces.items() if name.startswith(key) and len(piece.held))
        held.fill_(float("nan"))
        try:
            trained.save(folder, step=2)
        except FloatingPointError as e:
            said = str(e)
        found = trained.load(folder)
        return [said, str(found["step"]), ",".join(differing(saved, trained.everything()))]


@pytest.mark.parametrize("key", ["weight.", "exp_avg_sq."])
def test_a_state_that_is_not_finite_is_not_saved(ranks2, tmp_path, key):
    for said, step, apart in ranks2(not_finite, str(tmp_path / "state"), key):
        assert re.search(rf"\(one saved before is intact\): {key}.* is not finite", said), said
        assert (step, apart) == ("1", "")
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


def three(rank, world, folder):
    """Three states one after another, and one that does not follow them."""
    place = Path(folder)
    with Training(run_config(2)) as trained:
        for step in (1, 2, 3):
            trained.save(folder, step=step)
        if rank == 0:
            assert files.move_aside(place) == place.with_name("state.kept1")
        trained.save(folder, step=4)


def test_the_last_two_states_are_kept_and_those_of_others_too(ranks2, tmp_path):
    ranks2(three, str(tmp_path / "state"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state.kept1"]
    assert (steps_in(tmp_path), steps_in(tmp_path / "state.kept1")) == ([4], [3, 2])
