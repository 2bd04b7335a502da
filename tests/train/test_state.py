"""Training states: a run goes on as if it had not stopped, from every ZeRO stage to every other; nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import by_own_names, make_model, make_samples, whole_state
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

ZERO = [(0, False), (1, True), (2, False), (3, False), (3, True)]


def run_config(stage: int, offload: bool = False, **changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {
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

    def __init__(self, run: RunConfig, seed: int = 0, frozen: str = "", **overrides: Any) -> None:
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

    def train(self, steps: int) -> list[float]:
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

    def start(self, folder: str, step: int = 2, history: Any = None) -> None:
        self.states.folder = Path(folder)
        self.states.save(step, self.loader.state_dict(), history)

    def save(self, folder: str, step: int = 2) -> None:
        self.start(folder, step)
        self.states.wait()

    def load(self, folder: str) -> dict[str, Any]:
        return self.states.load(Path(folder))

    def everything(self) -> dict[str, Any]:
        """Optimizer's weights and moments, the weights that the forward reads, counts of steps, learning rates."""
        held = HeldState(self.engine)
        values: dict[str, Any] = whole_state(self.engine)
        values |= {f"model.{name}": p.float().clone() for name, p in full_weights(self.handle.model)}
        values["steps"] = max(int(state["step"]) for state in held.adam.state.values())
        return values | {"lr": [group["lr"] for group in self.engine.optimizer.param_groups]}


def steps_in(folder: Path) -> list[int]:
    """The steps of the states in a folder, from the newest on."""
    return [json.loads((place / files.STATE).read_text())["step"] for place in files.states_in(folder)]


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [n for n in a if not (torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n])]


def resume(rank: int, world: int, folder: str, run: RunConfig, other: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a state, two more steps; and two from the state, in an engine that began with other weights."""
    whole = Training(run, **other)
    whole.train(2)
    whole.save(folder)
    saved, want, end = whole.everything(), whole.train(2), whole.everything()
    whole.engine.destroy()
    again = Training(run, seed=1, **other)
    apart = differing(saved, again.everything())
    found = again.load(folder)
    again.loader.load_state_dict(found["loader"])
    loaded, got = differing(saved, again.everything()), again.train(2)
    worst = max(float((end[n] - v).norm() / end[n].norm()) for n, v in again.everything().items() if "weight." in n)
    again.engine.destroy()
    return {"want": want, "got": got, "loaded": loaded, "apart": len(apart), "step": found["step"], "worst": worst}


def check_resumed(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["step"] == 2
        assert r["apart"] > 0
        assert r["loaded"] == []
        assert r["got"] == pytest.approx(r["want"], rel=1e-6)
        assert r["want"][0] != pytest.approx(r["want"][1], rel=1e-3)  # it trains
        assert r["worst"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage, offload", ZERO)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(ranks2: Any, tmp_path: Path, stage: int, offload: bool) -> None:
    check_resumed(ranks2(resume, str(tmp_path / "state"), run_config(stage, offload), {}))


@pytest.mark.parametrize("stage, offload", [(0, False), (2, True)])
def test_bf16_keeps_its_fp32_weights(ranks2: Any, tmp_path: Path, stage: int, offload: bool) -> None:
    check_resumed(ranks2(resume, str(tmp_path / "state"), run_config(stage, offload, dtype="bf16"), {}))


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_and_tied_weights(ranks2: Any, tmp_path: Path, stage: int) -> None:
    other = {"frozen": "k_proj", "tie_word_embeddings": True}
    check_resumed(ranks2(resume, str(tmp_path / "state"), run_config(stage), other))
    state = json.loads((tmp_path / "state" / "step-00000002" / "state.json").read_text())
    names = {key.partition("@")[0] for rank in state["by_rank"] for key, *_ in rank["pieces"]}
    assert "weight.model.embed_tokens.weight" in names
    assert "weight.lm_head.weight" not in names
    assert "weight.model.layers.0.self_attn.k_proj.weight" in names
    assert "exp_avg.model.layers.0.self_attn.k_proj.weight" not in names


def write(rank: int, world: int, folder: str, run: RunConfig, other: dict[str, Any]) -> dict[str, Any]:
    trained = Training(run, **other)
    trained.train(2)
    trained.save(folder)
    values = trained.everything()
    trained.engine.destroy()
    return values


def read(rank: int, world: int, folder: str, run: RunConfig, other: dict[str, Any]) -> dict[str, Any]:
    fresh = Training(run, seed=1, **other)
    found = fresh.load(folder)
    values = fresh.everything()
    loss = fresh.train(1)
    fresh.engine.destroy()
    return {"found": found, "values": values, "loss": loss, "notes": fresh.states.notes}


@pytest.mark.parametrize("source, target", [((3, False), (0, False)), ((0, False), (2, True)), ((1, True), (3, True))])
def test_any_stage_to_any_other(
    ranks2: Any, tmp_path: Path, source: tuple[int, bool], target: tuple[int, bool]
) -> None:
    want = ranks2(write, str(tmp_path), run_config(*source), {})[0]
    weights = [name for name in want if name.startswith("weight.")]
    assert all(torch.equal(want[n], want[n.replace("weight.", "model.", 1)].flatten()) for n in weights)
    for result in ranks2(read, str(tmp_path), run_config(*target), {}):
        assert differing(want, result["values"]) == []
        assert result["found"]["step"] == 2
        assert result["found"]["loader"]["micro_batches"] == 4
        assert result["notes"] == [f"continued after step 2 from {tmp_path / 'step-00000002'}"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_other_numbers_of_ranks(ranks2: Any, ranks4: Any, tmp_path: Path, stage: int) -> None:
    """From two ranks with sp=2 to four without SP, where norms of 30 elements have padded shards; and back."""
    two, four, odd = (
        run_config(stage, world_size=2),
        run_config(stage, sp=1, world_size=4),
        {"kind": "qwen3", "hidden_size": 30},
    )
    want = ranks2(write, str(tmp_path), two, odd)[0]
    for result in ranks4(read, str(tmp_path), four, odd):
        assert differing(want, result["values"]) == []
        assert "saved under engine.world_size=2 (here 4), engine.sp=2 (here 1)" in result["notes"][1]
    want = ranks4(write, str(tmp_path), four, odd)[0]
    assert all(differing(want, result["values"]) == [] for result in ranks2(read, str(tmp_path), two, odd))


def test_each_rank_writes_its_part_and_the_rest_is_strict_json(ranks2: Any, tmp_path: Path) -> None:
    run = run_config(3)
    ranks2(write, str(tmp_path / "run" / "state"), run, {})
    folder = tmp_path / "run" / "state"
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["state"]
    folder = folder / "step-00000002"
    assert sorted(f.name for f in folder.iterdir()) == ["__0_0.distcp", "__1_0.distcp", "state.checksum", "state.json"]
    sizes = [f.stat().st_size for f in sorted(folder.glob("*.distcp"))]
    assert max(sizes) < 1.2 * min(sizes)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    state = json.loads((folder / "state.json").read_text(), parse_constant=refuse)
    assert state["config"].pop("schema_version") == files.SCHEMA_VERSION
    assert state["step"] == 2
    assert state["adam_steps"] == state["scheduler_step"] == 2
    assert len(state["by_rank"]) == 2
    assert RunConfig.from_dict(state["config"]) == run


@contextlib.contextmanager
def disk_with_room_for(writes: int) -> Iterator[None]:
    """The disk is full after so many writes of this process."""

    class Full(io.BufferedWriter):
        def write(self, content: Any) -> int:
            nonlocal writes
            writes -= 1
            if writes < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    @contextlib.contextmanager
    def stream(self: Any, path: Path, mode: str) -> Iterator[io.IOBase]:
        with Full(io.FileIO(path, "w")) as file:
            yield file

    original, FileSystem.create_stream = FileSystem.create_stream, stream  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FileSystem.create_stream = original  # type: ignore[method-assign]


def full_disk(rank: int, world: int, folder: str, writes: int) -> list[str]:
    """A state, then one that fails at the last rank's n-th write: what was said, and what is loaded afterwards."""
    trained = Training(run_config(2))
    trained.save(folder, step=1)
    saved = trained.everything()
    trained.train(1)
    said = "nothing"
    with disk_with_room_for(10**6 if rank == 0 else writes):
        try:
            trained.save(folder, step=2)
        except OSError as e:
            said = str(e)
    found = trained.load(folder)
    apart = differing(saved, trained.everything())
    trained.save(folder, step=3)
    last = trained.load(folder)["step"]
    trained.engine.destroy()
    return [said, str(found["step"]), ",".join(apart), str(last)]


@pytest.mark.parametrize("writes", [0, 7, 10**6])
def test_a_full_disk_leaves_the_state_before(ranks2: Any, tmp_path: Path, writes: int) -> None:
    for said, step, apart, last in ranks2(full_disk, str(tmp_path / "state"), writes):
        if writes == 10**6:
            assert said == "nothing"
            assert step == "2"
        else:
            assert said.endswith("(one saved before is intact): [Errno 28] No space left on device")
            assert (step, apart) == ("1", "")
        assert last == "3"
    assert steps_in(tmp_path) == [3, 2 if writes == 10**6 else 1]
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


@contextlib.contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Nothing is written before the event."""
    event, original = threading.Event(), files.Writer.write_data

    def later(*args: Any) -> Any:
        assert event.wait(60)
        return original(*args)

    files.Writer.write_data = later  # type: ignore[method-assign]
    try:
        yield event
    finally:
        event.set()
        files.Writer.write_data = original  # type: ignore[method-assign]


def while_training(rank: int, world: int, folder: str, stage: int, fails: bool) -> dict[str, Any]:
    """A state that is written, or cannot be, while two steps are made; and what is loaded afterwards."""
    trained, said = Training(run_config(stage)), ""
    trained.save(folder, step=1)
    trained.train(1)
    saved = trained.everything()
    with disk_with_room_for(3 if fails and rank else 10**6), slow_disk() as goes_on:
        history = [1.0]
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
    trained.engine.destroy()
    return {"before": before, "said": said, "step": found["step"], "history": found["history"], "apart": apart}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_state_is_written_while_the_training_goes_on(ranks2: Any, tmp_path: Path, stage: int) -> None:
    for result in ranks2(while_training, str(tmp_path / "state"), stage, False):
        assert result == {"before": 1, "said": "", "step": 2, "history": [1.0], "apart": []}


def test_what_goes_wrong_meanwhile_is_raised_on_all_ranks(ranks2: Any, tmp_path: Path) -> None:
    for result in ranks2(while_training, str(tmp_path / "state"), 2, True):
        assert result["said"].endswith("(one saved before is intact): [Errno 28] No space left on device")
        assert (result["before"], result["step"]) == (1, 1)
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


def test_a_folder_that_the_nodes_do_not_share_holds_no_state(tmp_path: Path) -> None:
    writer = files.Writer(tmp_path / "state", {"step": 1}, {})
    with pytest.raises(OSError, match="do all nodes share this folder"):
        writer.finish(
            Metadata({}), [[WriteResult(MetadataIndex(""), 0, {"file": "__1_0.distcp"})]]
        )  # of a rank elsewhere
    assert files.states_in(tmp_path) == []


def without_room(rank: int, world: int, folder: str) -> bool:
    """Whether a rank that has no host memory for a copy waits."""
    original, states.host_available = states.host_available, lambda: 0 if rank else 2**40
    trained = Training(run_config(2))
    try:
        trained.start(folder, step=1)
    finally:
        states.host_available = original
    waited, want = not rank or trained.states.pending.done(), trained.everything()
    trained.train(1)
    trained.load(folder)
    waited = waited and not differing(want, trained.everything())
    trained.engine.destroy()
    return waited


def test_the_ranks_wait_where_the_host_has_no_room_for_a_copy(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2(without_room, str(tmp_path / "state")) == [True, True]


def after_crashes(rank: int, world: int, folder: str) -> list[int]:
    """A process that died while it wrote, and a state that could not get its place."""
    trained, seen = Training(run_config(1)), []
    trained.save(folder, step=1)

    def step_found() -> int:
        torch.distributed.barrier()
        return trained.load(folder)["step"]

    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(files.states_in(Path(folder))[0], f"{folder}.tmp")
    seen.append(step_found())
    with mock.patch.object(files, "write_json", side_effect=OSError(errno.EIO, "bad disk")):
        try:
            trained.save(folder, step=2)
        except OSError:
            seen.append(step_found())
    trained.save(folder, step=3)
    seen.append(step_found())
    trained.engine.destroy()
    return seen


def test_a_crash_leaves_a_state(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2(after_crashes, str(tmp_path / "state")) == [[1, 1, 3]] * 2
    assert [f.name for f in tmp_path.iterdir()] == ["state"]
    assert steps_in(tmp_path) == [3, 1]


def refusals(rank: int, world: int, folders: list[str]) -> list[str]:
    fresh = Training(run_config(3))
    before, said = fresh.everything(), []
    for folder in folders:
        try:
            fresh.load(folder)
            said.append("nothing")
        except ValueError as e:
            said.append(str(e))
    said.append(",".join(differing(before, fresh.everything())))
    fresh.engine.destroy()
    return said


def wider(rank: int, world: int, folder: str) -> None:
    trained = Training(run_config(3), intermediate_size=64)
    trained.save(folder)
    trained.engine.destroy()


def test_what_cannot_be_loaded_is_refused_and_nothing_is_touched(ranks2: Any, tmp_path: Path) -> None:
    ranks2(write, str(tmp_path / "good"), run_config(3), {})
    ranks2(wider, str(tmp_path / "wider"))
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


def damages(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """A byte changed, a piece cut out, zeroed or doubled, the end cut off; at random places."""
    for _ in range(12):
        at, size = draw.randrange(len(content)), draw.choice([1, 8, 300])
        one = bytes([content[at] ^ (1 << draw.randrange(8))])
        yield content[:at] + one + content[at + 1 :]
        yield content[:at] + content[at + size :]
        yield content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]
        yield content[:at] + content[at : at + size] + content[at:]
        yield content[:at]


def meaning(content: bytes) -> Any:
    """What a file says: white space between JSON's parts says nothing."""
    try:
        return json.loads(content)
    except ValueError:
        return content


def each_damage(rank: int, world: int, folder: str) -> list[str]:
    """Every damage to each file of a state, tried once: those that were loaded, or of which the error says nothing."""
    fresh = Training(run_config(2))
    before, missed = fresh.everything(), []
    digit = {"adam_steps": b": 2", "scheduler_step": b": 2", "step": b": 2", "micro_batches": b": 4"}
    for path in sorted(files.states_in(Path(folder))[0].iterdir()):
        content = path.read_bytes()
        tried = list(damages(content, random.Random(0)))
        if path.suffix == ".json":  # what stays JSON, and would be a plausible state
            tried += [content.replace(f'"{k}"'.encode() + v, f'"{k}"'.encode() + b": 7") for k, v in digit.items()]
            tried += [content.replace(b'"exp_avg_sq.', b'"exp_avg_sq .', 1), content.replace(b"0.5", b"0.25")]
        for i, damaged in enumerate(d for d in tried if meaning(d) != meaning(content)):
            torch.distributed.barrier()
            if rank == 0:
                path.write_bytes(damaged)
            torch.distributed.barrier()
            try:
                fresh.load(folder)
                missed.append(f"{path.name} {i}: loaded")
            except ValueError as e:
                if path.name.replace(files.CHECKSUM, files.STATE) not in str(e):
                    missed.append(f"{path.name} {i}: {e}")
        torch.distributed.barrier()
        if rank == 0:
            path.write_bytes(content)
    missed += differing(before, fresh.everything())
    torch.distributed.barrier()
    fresh.load(folder)  # the state as it was
    fresh.engine.destroy()
    return missed


def test_every_damage_is_found_before_anything_is_loaded(ranks2: Any, tmp_path: Path) -> None:
    ranks2(write, str(tmp_path), run_config(2), {})
    assert ranks2(each_damage, str(tmp_path)) == [[], []]


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


def configurations(rank: int, world: int, folder: str, changes: list[dict[str, Any]]) -> list[str]:
    fresh = Training(run_config(2))
    said = []
    for change in changes:
        run = fresh.run if change.keys() == {"model.dtype"} else fresh.run.replace(**{"options.chunk": 64, **change})
        fresh.engine.bfloat16_enabled = lambda change=change: change.get("model.dtype") == "bf16"
        try:
            here = RunStates(fresh.engine, run, run.data.seq_len, Path(), lambda message: None)
            said.append(str(here.load(Path(folder))["step"]))
        except states.OtherState as e:
            said.append(str(e))
    fresh.engine.destroy()
    return said


def test_a_state_belongs_to_its_configuration(ranks2: Any, tmp_path: Path) -> None:
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


def not_finite(rank: int, world: int, folder: str, key: str) -> list[str]:
    trained = Training(run_config(2))
    trained.save(folder, step=1)
    saved = trained.everything()
    pieces = HeldState(trained.engine).pieces
    held = next(piece.held for name, piece in pieces.items() if name.startswith(key) and len(piece.held))
    held.fill_(float("nan"))
    try:
        trained.save(folder, step=2)
        said = "nothing"
    except FloatingPointError as e:
        said = str(e)
    found = trained.load(folder)
    apart = differing(saved, trained.everything())
    trained.engine.destroy()
    return [said, str(found["step"]), ",".join(apart)]


@pytest.mark.parametrize("key", ["weight.", "exp_avg_sq."])
def test_a_state_that_is_not_finite_is_not_saved(ranks2: Any, tmp_path: Path, key: str) -> None:
    for said, step, apart in ranks2(not_finite, str(tmp_path / "state"), key):
        assert re.search(rf"\(one saved before is intact\): {key}.* is not finite", said), said
        assert (step, apart) == ("1", "")
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


def three(rank: int, world: int, folder: str) -> None:
    """Three states one after another, and one that does not follow them."""
    trained, place = Training(run_config(2)), Path(folder)
    for step in (1, 2, 3):
        trained.save(folder, step=step)
    if rank == 0:
        assert files.move_aside(place) == place.with_name("state.kept1")
    trained.save(folder, step=4)
    trained.engine.destroy()


def test_the_last_two_states_are_kept_and_those_of_others_too(ranks2: Any, tmp_path: Path) -> None:
    ranks2(three, str(tmp_path / "state"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state.kept1"]
    assert (steps_in(tmp_path), steps_in(tmp_path / "state.kept1")) == ([4], [3, 2])
