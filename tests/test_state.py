"""Training states: a run goes on as if it had not stopped, from every ZeRO stage to every other; nothing is lost."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_model, make_samples
from safetensors.torch import load_file

import alstlib
from alstlib import state as states
from alstlib.config import RunConfig
from alstlib.data import SPDataLoader
from alstlib.engine import WholeState, full_weights, initialize
from alstlib.state import load_state, save_state

ZERO = [(0, False), (1, True), (2, False), (3, False), (3, True)]


def run_config(stage: int, offload: bool = False, **changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "model": "tiny", "zero_stage": stage, "offload_optimizer": offload, "sp": 2, "learning_rate": 1e-2,
        "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5, "accumulation": 2, "dtype": "fp32",
    }  # fmt: skip
    return RunConfig(**{**defaults, **changes})


class Training:
    """A small model under DeepSpeed and its loader: four optimizer steps of shuffled samples."""

    def __init__(self, run: RunConfig, seed: int = 0, frozen: str = "", **overrides: Any) -> None:
        self.run, self.ctx = run, alstlib.SPContext.create(run.sp)
        bf16 = run.dtype == "bf16"
        model = make_model(seed=seed, dtype=torch.bfloat16 if bf16 else torch.float32, **overrides)
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or frozen not in name)
        self.handle = alstlib.apply(model, self.ctx, alstlib.Options())
        self.engine = initialize(run, model, bf16)
        each = 4 * run.accumulation // self.ctx.sp
        samples = make_samples(each * self.ctx.world_size, seed=5)[self.ctx.rank * each :][:each]
        order = torch.Generator().manual_seed(seed)  # another one in the engine that loads
        data = torch.utils.data.DataLoader(samples, batch_size=None, shuffle=True, generator=order)
        self.loader = SPDataLoader(data, self.ctx, run.accumulation)
        self.batches: Any = None

    def train(self, steps: int) -> list[float]:
        self.batches = self.batches or iter(self.loader)
        losses = []
        for _ in range(steps):
            loss = 0.0
            for _ in range(self.run.accumulation):
                batch = next(self.batches)
                out = alstlib.causal_lm_loss(self.engine, batch, self.ctx, engine_divides_by=self.run.accumulation)
                self.engine.backward(out.loss)
                self.engine.step()
                loss += float(out.mean) * int(out.tokens) / int(batch["step_tokens"])
            losses.append(loss)
        return losses

    def save(self, folder: str, step: int = 2) -> None:
        save_state(self.engine, self.run, folder, step=step, loader_state=self.loader.state_dict())

    def everything(self) -> dict[str, Any]:
        """Optimizer's weights and moments, the weights that the forward reads, counts of steps, learning rates."""
        whole = WholeState(self.engine)
        values: dict[str, Any] = {name: whole.read(name).clone() for name in whole.names()}
        values |= {f"model.{name}": p.float().clone() for name, p in full_weights(self.handle.model)}
        values |= {f"step.{name}": whole.step(name) for name in whole.shapes}
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
    names = load_file(tmp_path / "state" / "state-00001-of-00001.safetensors").keys()
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
    for result in ranks2(read, str(tmp_path), run_config(*target), {}):
        assert differing(want, result["values"]) == []
        assert result["found"]["step"] == 2
        assert result["found"]["loader"]["micro_batches"] == 4
        assert result["found"]["note"] == ""


@pytest.mark.parametrize("stage", [1, 3])
def test_other_numbers_of_ranks(ranks2: Any, ranks4: Any, tmp_path: Path, stage: int) -> None:
    """From two ranks with sp=2 to four without SP, where norms of 30 elements have padded shards; and back."""
    two, four, odd = run_config(stage), run_config(stage, sp=1), {"kind": "qwen3", "hidden_size": 30}
    want = ranks2(write, str(tmp_path), two, odd)[0]
    for result in ranks4(read, str(tmp_path), four, odd):
        assert differing(want, result["values"]) == []
        assert result["found"]["loader"] is None
        assert "ranks=2 (now 4), sp=2 (now 1)" in result["found"]["note"]
    want = ranks4(write, str(tmp_path), four, odd)[0]
    assert all(differing(want, result["values"]) == [] for result in ranks2(read, str(tmp_path), two, odd))


def sharded(rank: int, world: int, folder: str) -> dict[str, Any]:
    before, states.SHARD_BYTES = states.SHARD_BYTES, 20_000
    try:
        return write(rank, world, folder, run_config(3), {})
    finally:
        states.SHARD_BYTES = before


def test_files_are_safetensors_of_limited_size_and_strict_json(ranks2: Any, tmp_path: Path) -> None:
    want = ranks2(sharded, str(tmp_path / "state"))[0]
    files = sorted((tmp_path / "state").iterdir())
    assert {f.suffix for f in files} == {".safetensors", ".json"}
    assert [f.name for f in tmp_path.iterdir()] == ["state"]
    shards = [f for f in files if f.suffix == ".safetensors"]
    assert len(shards) > 3
    stored: dict[str, torch.Tensor] = {}
    for i, file in enumerate(shards):
        assert file.name == f"state-{i + 1:05}-of-{len(shards):05}.safetensors"
        part = load_file(file)
        assert sum(t.nbytes for t in part.values()) <= 20_000
        stored |= part
    assert stored.keys() == {n for n in want if n.startswith(("weight.", "exp_avg.", "exp_avg_sq."))}
    assert all(torch.equal(stored[n], want[n]) for n in stored)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    state = json.loads((tmp_path / "state" / "state.json").read_text(), parse_constant=refuse)
    assert state["schema_version"] == 1
    assert state["step"] == 2
    assert state["scheduler_step"] == 2
    assert len(state["ranks"]) == 2
    assert RunConfig.from_dict(state["config"]) == run_config(3)
    back = ranks2(read, str(tmp_path / "state"), run_config(3), {})
    assert all(differing(want, result["values"]) == [] for result in back)


def full_disk(rank: int, world: int, folder: str, writes: int) -> list[str]:
    """A state, then one that fails at its n-th write: what was said, and what is loaded afterwards."""
    trained = Training(run_config(2))
    trained.save(folder, step=1)
    saved = trained.everything()
    trained.train(1)
    original, left = states._Writer._append, writes

    def limited(self: Any, file: str, content: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, file, content)

    states._Writer._append = limited  # type: ignore[method-assign]
    try:
        trained.save(folder, step=2)
        said = "nothing"
    except OSError as e:
        said = str(e)
    finally:
        states._Writer._append = original  # type: ignore[method-assign]
    found = load_state(trained.engine, trained.run, folder)
    apart = differing(saved, trained.everything())
    trained.save(folder, step=3)
    last = load_state(trained.engine, trained.run, folder)["step"]
    trained.engine.destroy()
    return [said, str(found["step"]), ",".join(apart), str(last)]


@pytest.mark.parametrize("writes", [0, 7, 10_000])
def test_a_full_disk_leaves_the_state_before(ranks2: Any, tmp_path: Path, writes: int) -> None:
    for said, step, apart, last in ranks2(full_disk, str(tmp_path / "state"), writes):
        if writes == 10_000:
            assert said == "nothing"
            assert step == "2"
        else:
            assert "the disk is full; the state saved before is intact" in said
            assert (step, apart) == ("1", "")
        assert last == "3"
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


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
    original = states._Writer._append
    states._Writer._append = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad disk"))  # type: ignore
    try:
        trained.save(folder, step=2)
    except OSError:
        seen += [step_found(), int(place.exists())]  # back at its place before anything is replaced
    finally:
        states._Writer._append = original  # type: ignore[method-assign]
    trained.save(folder, step=3)
    seen.append(step_found())
    trained.engine.destroy()
    return seen


def test_a_crash_leaves_a_state(ranks2: Any, tmp_path: Path) -> None:
    assert ranks2(after_crashes, str(tmp_path / "state")) == [[1, 1, 1, 1, 3]] * 2
    assert [f.name for f in tmp_path.iterdir()] == ["state"]


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
    for name in ("flipped", "cut", "half", "future", "gone"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    shard = "state-00001-of-00001.safetensors"
    content = bytearray((tmp_path / "good" / shard).read_bytes())
    (tmp_path / "cut" / shard).write_bytes(content[: len(content) // 2])
    content[-5] ^= 1
    (tmp_path / "flipped" / shard).write_bytes(content)
    text = (tmp_path / "good" / "state.json").read_text()
    (tmp_path / "half" / "state.json").write_text(text[: len(text) // 2])
    (tmp_path / "future" / "state.json").write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    (tmp_path / "gone" / shard).unlink()
    want = {
        "nowhere": "there is no such folder", "empty": "it has no training state", "flipped": "is damaged",
        "cut": "is damaged", "half": "is damaged", "future": "schema_version=2; this alstlib reads 1",
        "gone": "is damaged", "wider": "it is of another model: 6 parameters differ",
    }  # fmt: skip
    for said in ranks2(refusals, [str(tmp_path / name) for name in want]):
        assert said.pop() == ""
        for name, message in zip(want, said):
            assert message.startswith(f"resume_from='{tmp_path / name}': "), message
        assert [part in message for part, message in zip(want.values(), said)] == [True] * len(want), said
