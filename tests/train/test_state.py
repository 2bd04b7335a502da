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
from alstlib.train.state import Saver, load_state

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
        self.saver = Saver(self.engine, run)

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

    def save(self, folder: str, step: int = 2, **more: Any) -> None:
        self.saver.start(folder, step=step, loader_state=self.loader.state_dict(), **more)
        self.saver.wait()

    def everything(self) -> dict[str, Any]:
        """Optimizer's weights and moments, the weights that the forward reads, counts of steps, learning rates."""
        held = HeldState(self.engine)
        values: dict[str, Any] = whole_state(self.engine)
        values |= {f"model.{name}": p.float().clone() for name, p in full_weights(self.handle.model)}
        values["steps"] = max(int(state["step"]) for state in held.adam.state.values())
        return values | {"lr": [group["lr"] for group in self.engine.optimizer.param_groups]}


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
    found = load_state(again.engine, run, folder)
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
    names = {name for name, *_ in json.loads((tmp_path / "state" / "state.json").read_text())["pieces"]}
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
    found = load_state(fresh.engine, run, folder)
    values = fresh.everything()
    loss = fresh.train(1)
    fresh.engine.destroy()
    return {"found": found, "values": values, "loss": loss}


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
        assert result["found"]["note"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_other_numbers_of_ranks(ranks2: Any, ranks4: Any, tmp_path: Path, stage: int) -> None:
    """From two ranks with sp=2 to four without SP, where norms of 30 elements have padded shards; and back."""
    two, four, odd = run_config(stage), run_config(stage, sp=1), {"kind": "qwen3", "hidden_size": 30}
    want = ranks2(write, str(tmp_path), two, odd)[0]
    for result in ranks4(read, str(tmp_path), four, odd):
        assert differing(want, result["values"]) == []
        assert "saved under ranks=2 (here 4), engine.sp=2 (here 1)" in result["found"]["note"]
    want = ranks4(write, str(tmp_path), four, odd)[0]
    assert all(differing(want, result["values"]) == [] for result in ranks2(read, str(tmp_path), two, odd))


@pytest.mark.parametrize("local", [False, True])
def test_each_rank_writes_its_part_and_the_rest_is_strict_json(ranks2: Any, tmp_path: Path, local: bool) -> None:
    run = run_config(3, checkpoint_local=str(tmp_path / "disk") if local else None)
    ranks2(write, str(tmp_path / "run" / "state"), run, {})
    folder = tmp_path / "run" / "state"
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["state"]
    assert not [f for f in tmp_path.glob("disk/**/*") if f.is_file()]
    assert (tmp_path / "disk").is_dir() == local
    assert sorted(f.name for f in folder.iterdir()) == ["__0_0.distcp", "__1_0.distcp", "checksums.json", "state.json"]
    sizes = [f.stat().st_size for f in sorted(folder.glob("*.distcp"))]
    assert max(sizes) < 1.2 * min(sizes)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    state = json.loads((folder / "state.json").read_text(), parse_constant=refuse)
    assert state["schema_version"] == 4
    assert state["step"] == 2
    assert state["scheduler_step"] == 2
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
    found = load_state(trained.engine, trained.run, folder)
    apart = differing(saved, trained.everything())
    trained.save(folder, step=3)
    last = load_state(trained.engine, trained.run, folder)["step"]
    trained.engine.destroy()
    return [said, str(found["step"]), ",".join(apart), str(last)]


@pytest.mark.parametrize("writes", [0, 7, 10**6])
def test_a_full_disk_leaves_the_state_before(ranks2: Any, tmp_path: Path, writes: int) -> None:
    for said, step, apart, last in ranks2(full_disk, str(tmp_path / "state"), writes):
        if writes == 10**6:
            assert said == "nothing"
            assert step == "2"
        else:
            assert said.endswith("space left on device; the state saved before is intact")
            assert (step, apart) == ("1", "")
        assert last == "3"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["state", "state.old"]


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
        trained.saver.start(folder, step=2, loader_state=trained.loader.state_dict(), history=history)
        history.append(2.0)
        trained.train(2)
        before = json.loads((Path(folder) / "state.json").read_text())["step"]
        torch.distributed.barrier()
        goes_on.set()
        try:
            trained.saver.wait()
        except OSError as e:
            said = str(e)
    found = load_state(trained.engine, trained.run, folder)
    apart = differing(saved, trained.everything())
    trained.engine.destroy()
    return {"before": before, "said": said, "step": found["step"], "history": found["history"], "apart": apart}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_state_is_written_while_the_training_goes_on(ranks2: Any, tmp_path: Path, stage: int) -> None:
    for result in ranks2(while_training, str(tmp_path / "state"), stage, False):
        assert result == {"before": 1, "said": "", "step": 2, "history": [1.0], "apart": []}


def test_what_goes_wrong_meanwhile_is_raised_on_all_ranks(ranks2: Any, tmp_path: Path) -> None:
    for result in ranks2(while_training, str(tmp_path / "state"), 2, True):
        assert result["said"].endswith("space left on device; the state saved before is intact")
        assert (result["before"], result["step"]) == (1, 1)
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


def test_a_folder_that_the_nodes_do_not_share_holds_no_state(tmp_path: Path) -> None:
    writer = files.Writer(tmp_path / "state", None, {})
    writer.prepare_global_plan([])
    with pytest.raises(OSError, match="do all nodes share this folder"):
        writer.finish(Metadata({}), [[WriteResult(MetadataIndex("__1_0.distcp"), 8, "0")]])  # of a rank elsewhere
    assert files.find_state(tmp_path) is None


def without_room(rank: int, world: int, folder: str) -> bool:
    """Whether the ranks wait where one of them has no host memory for a copy."""
    original, states.host_available = states.host_available, lambda: 0 if rank else 2**40
    trained = Training(run_config(2))
    try:
        trained.saver.start(folder, step=1, loader_state=None)
    finally:
        states.host_available = original
    waited, want = trained.saver.pending is None, trained.everything()
    trained.train(1)
    load_state(trained.engine, trained.run, folder)
    waited = waited and not differing(want, trained.everything())
    trained.engine.destroy()
    return waited


def test_the_ranks_wait_where_the_host_has_no_room_for_a_copy(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2(without_room, str(tmp_path / "state")) == [True, True]


def after_crashes(rank: int, world: int, folder: str) -> list[int]:
    """A process that died while writing, and one that died between the two renamings."""
    trained, place, seen = Training(run_config(1)), Path(folder), []
    trained.save(folder, step=1)

    def step_found() -> int:
        torch.distributed.barrier()
        return load_state(trained.engine, trained.run, folder)["step"]

    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(place, f"{folder}.tmp")
        (Path(f"{folder}.tmp") / "state.json").unlink()
    seen.append(step_found())
    torch.distributed.barrier()
    if rank == 0:
        place.rename(f"{folder}.old")
    seen.append(step_found())
    original = files._sync
    files._sync = lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "bad disk"))
    try:
        trained.save(folder, step=2)
    except OSError:
        seen += [step_found(), int(place.exists())]  # back at its place before anything is replaced
    finally:
        files._sync = original
    trained.save(folder, step=3)
    seen.append(step_found())
    trained.engine.destroy()
    return seen


def test_a_crash_leaves_a_state(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2(after_crashes, str(tmp_path / "state")) == [[1, 1, 1, 1, 3]] * 2
    assert sorted(f.name for f in tmp_path.iterdir()) == ["state", "state.old"]


def refusals(rank: int, world: int, folders: list[str]) -> list[str]:
    fresh = Training(run_config(3))
    before, said = fresh.everything(), []
    for folder in folders:
        try:
            load_state(fresh.engine, fresh.run, folder)
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
    for file in ("deepspeed/global_step2/mp_rank_00_model_states.pt", "universal/latest_universal"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    for name in ("flipped", "cut", "half", "earlier", "gone"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    shard = "__1_0.distcp"
    content = bytearray((tmp_path / "good" / shard).read_bytes())
    (tmp_path / "cut" / shard).write_bytes(content[: len(content) // 2])
    content[-5] ^= 1
    (tmp_path / "flipped" / shard).write_bytes(content)
    text = (tmp_path / "good" / "state.json").read_text()
    (tmp_path / "half" / "state.json").write_text(text[: len(text) // 2])
    earlier = tmp_path / "earlier" / "state.json"
    earlier.write_text(text.replace('"schema_version": 4', '"schema_version": 3'))
    checksums = json.loads((earlier.parent / files.CHECKSUMS).read_text())
    (earlier.parent / files.CHECKSUMS).write_text(json.dumps({**checksums, "state.json": files._checksum(earlier)}))
    (tmp_path / "gone" / shard).unlink()
    want = {
        "nowhere": "there is no such folder", "empty": "it has no training state",
        "deepspeed": "it is a checkpoint of DeepSpeed's. To read it is to unpickle it",
        "universal": "gives the settings of one group of parameters to all of them. To train on from the weights",
        "flipped": f"{shard} or checksums.json next to it is damaged: ValueError: its checksum",
        "cut": f"{shard} or checksums.json",
        "half": "state.json or checksums.json",
        "gone": f"{shard} or checksums.json next to it is damaged: FileNotFound",
        "earlier": "schema_version=3; this alstlib reads 4",
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
    digit = {"scheduler_step": b": 2", "step": b": 2", "micro_batches": b": 4"}
    for path in sorted(Path(folder).iterdir()):
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
                load_state(fresh.engine, fresh.run, folder)
                missed.append(f"{path.name} {i}: loaded")
            except ValueError as e:
                if path.name not in str(e):
                    missed.append(f"{path.name} {i}: {e}")
        torch.distributed.barrier()
        if rank == 0:
            path.write_bytes(content)
    missed += differing(before, fresh.everything())
    torch.distributed.barrier()
    load_state(fresh.engine, fresh.run, folder)  # the state as it was
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
            said.append(str(load_state(fresh.engine, run, folder)["step"]))
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
    for said in ranks2(configurations, str(tmp_path), [*differs, {"optim.steps": 2}, free]):
        assert said.pop() == "2"
        assert "steps=2 counts all steps, and it has done 2 already; use at least 3" in said.pop()
        for name, message in zip(OTHER, said):
            assert "its state of step 2 belongs to another configuration" in message
            assert re.search(rf"\b{name}=.*\(here ", message), message
            assert message.count("(here") == 1, message


def not_finite(rank: int, world: int, folder: str, key: str) -> list[str]:
    trained = Training(run_config(2))
    trained.save(folder, step=1)
    saved = trained.everything()
    pieces = HeldState(trained.engine).pieces
    next(piece for name, piece in pieces.items() if name.startswith(key) and len(piece)).fill_(float("nan"))
    try:
        trained.save(folder, step=2)
        said = "nothing"
    except FloatingPointError as e:
        said = str(e)
    found = load_state(trained.engine, trained.run, folder)
    apart = differing(saved, trained.everything())
    trained.engine.destroy()
    return [said, str(found["step"]), ",".join(apart)]


@pytest.mark.parametrize("key", ["weight.", "exp_avg_sq."])
def test_a_state_that_is_not_finite_is_not_saved(ranks2: Any, tmp_path: Path, key: str) -> None:
    for said, step, apart in ranks2(not_finite, str(tmp_path / "state"), key):
        assert re.search(rf"state: {key}.* is not finite; the state saved before is intact", said), said
        assert (step, apart) == ("1", "")
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


def three(rank: int, world: int, folder: str) -> list[int]:
    """Three states one after another, and one that does not follow them."""
    trained, place = Training(run_config(2)), Path(folder)
    for step in (1, 2, 3):
        trained.save(folder, step=step)
    aside = place.with_name("state.kept1")
    if rank == 0:
        assert files.move_aside(place) == aside
    trained.save(folder, step=4)
    trained.engine.destroy()
    torch.distributed.barrier()
    places = [place, aside, files.before(aside)]
    return [json.loads((p / "state.json").read_text())["step"] for p in places]


def test_the_last_two_states_are_kept_and_those_of_others_too(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2(three, str(tmp_path / "state")) == [[4, 3, 2]] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state.kept1", "state.kept1.old"]


def test_a_damaged_state_names_the_one_before_it(ranks2: Any, tmp_path: Path) -> None:
    ranks2(three, str(tmp_path / "state"))
    kept = tmp_path / "state.kept1"
    (kept / "state.json").write_text("{")
    (said, *_) = ranks2(refusals, [str(kept)])[0]
    assert f"{kept}/state.json or checksums.json next to it is damaged" in said
    assert f"the state saved before it is in {kept}.old" in said
