"""Everything that only a GPU can tell, step by step, and a page of what came out beside what was expected; see gpu.sh.

A step is a row of one of the specs papermill_runs/specs/gpu-*.yaml, or the GPU tests of one kernel or of one file. Each
has processes, a time limit and a log of its own, and the page is written anew after each: a step that fails, hangs or
takes the GPU down with it, or the end of the lease of a machine, costs no other step's answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from alstlib.base.config import RunConfig, flat, merged
from alstlib.base.options import check_names
from alstlib.base.sizing import cores
from alstlib.base.units import format_seconds, parse_quantity
from alstlib.runs.processes import sigterm_interrupts

ROOT = Path(__file__).resolve().parents[1]
SPECS = ROOT / "papermill_runs" / "specs"
FIRST = ("gpu-gradients", "gpu-timeline", "gpu-memory")
"""What most needs to be known, in less than ten minutes: are gradients right, do copies run beside kernels, and does a
step take the memory that the planner says?"""
ORDER = (
    *FIRST, "gpu-kernels", "tests", "gpu-train", "gpu-finetune", "gpu-rank-of-8", "gpu-500k", "gpu-1m", "gpu-offload",
    "gpu-ablation", "gpu-peers",
)  # fmt: skip
"""Specs, and the tests, the most informative first: do kernels run and how fast, are they right, does a step train."""
KERNELS = (
    "cudnn", "flash", "efficient", "blockwise", "flash_attention_2", "flash_attention_3", "flash_attention_4",
)  # fmt: skip
GRACE_SECONDS = 60
TINY = {
    "model.name": "tiny", "model.config": {"num_hidden_layers": 2}, "model.dtype": "fp32", "optim.steps": 1,
    "limits.timeout": 300,
}  # fmt: skip
LESS: dict[str, Any] = {
    "data.seq_len": 512, "options.chunk": 64, "search.granule": 256, "search.max": 768, "model.liger": False,
    "options.attention": "sdpa",
}  # fmt: skip
"""What `--dry-run` puts in the place of what rows set, so that a CPU does it in seconds."""
ANYWHERE = ("gradients.", "predicted.allocated_percent")
"""Beginnings of what is expected of a CPU and a tiny model, too."""


@dataclass(frozen=True, kw_only=True)
class Step:
    name: str
    command: Sequence[str]
    limit: float
    """Seconds."""
    expect: Mapping[str, Any] = field(default_factory=dict)
    """Paths into a result's metrics (`kernels.cudnn.runs`, `loss.-1`), with a value or a range such as 40GiB..47GiB."""
    result: Path | None = None


# What is to be done


def rows_of(name: str, out: Path, dry: bool) -> Iterator[Step]:
    """The rows of a spec, one step each. They run from a copy of the spec, without what only this program reads."""
    spec = yaml.safe_load((SPECS / f"{name}.yaml").read_text())
    spec.pop("report", None)
    base, rows = spec["base"], spec["rows"]
    expected = [row.pop("expect", {}) for row in rows]
    if dry:
        expected = [{n: w for n, w in one.items() if n.startswith(ANYWHERE)} for one in expected]
        base = merged({"limits": {"device_memory": "64MiB"}}, merged(shrink(base), TINY))
        rows = [shrink(row) for row in rows]
    copy = out / "specs" / f"{name}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(yaml.safe_dump({**spec, "base": base, "rows": rows}, sort_keys=False))
    for row, expect in zip(rows, expected):
        run = RunConfig.from_dict(base).replace(**{n: v for n, v in row.items() if n != "name"})
        limit = run.limits.timeout or 3600
        command = [sys.executable, "-m", "alstlib.runs.cli", "run", str(copy), "--rows", row["name"]]
        yield Step(
            name=f"{name}/{row['name']}", command=[*command, "--out", str(out / name)],
            limit=limit + GRACE_SECONDS, expect=expect, result=out / name / row["name"] / "result.json",
        )  # fmt: skip


def shrink(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row, or of a base, as a CPU can do them."""
    return merged({}, {name: LESS.get(name, value) for name, value in flat(fields).items() if name not in TINY})


def tests() -> Iterator[Step]:
    """The tests of each kernel, and then those of each other file."""
    marked = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu" in p.read_text())
    of_kernels = [p for p in marked if p.name in ("test_kernels.py", "test_variants.py")]
    run = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider"]
    for kernel in KERNELS:
        only = "flash and not flash_attention" if kernel == "flash" else kernel
        yield Step(name=f"tests/{kernel}", command=[*run, *map(str, of_kernels), "-k", only], limit=300)
    for path in marked:
        if path not in of_kernels:
            many = ["-n", str(max(1, cores() // 3))] if path.stem == "test_gpu_matrix" else []
            yield Step(name=f"tests/{path.stem}", command=[*run, *many, str(path)], limit=600 if many else 300)


def steps_of(names: Sequence[str], out: Path, dry: bool = False) -> list[Step]:
    """The steps of specs, of the `tests`, or single ones by their names, in this order."""
    found: list[Step] = []
    for name in names:
        group, _, one = name.partition("/")
        check_names({group: None}, ORDER, "step")
        steps = list(tests() if group == "tests" else rows_of(group, out, dry))
        if one:
            check_names({name: None}, [s.name for s in steps], "step")
        found += [s for s in steps if not one or s.name == name]
    return found


# What comes out


def run(step: Step, out: Path) -> dict[str, Any]:
    """Run a step to its end, however that is, and say what came out."""
    log = out / "logs" / f"{step.name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    before = step.result.stat().st_mtime_ns if step.result and step.result.exists() else None
    began, ended = time.monotonic(), ""
    try:
        with open(log, "wb") as file:
            process = subprocess.Popen(
                step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = process.wait(step.limit)
                ended = f"exit {code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"no end in {format_seconds(step.limit)}"
            finally:
                end(process)
    except Exception as e:
        ended = f"{type(e).__name__}: {e}"
    made: dict[str, Any] = {"step": step.name, "seconds": time.monotonic() - began, "log": str(log.relative_to(out))}
    with contextlib.suppress(Exception):
        made["said"] = last_line(log)
    result: dict[str, Any] = {}
    if step.result is not None:
        with contextlib.suppress(OSError, ValueError):
            if step.result.stat().st_mtime_ns != before or not ended:
                result = json.loads(step.result.read_text())
        made |= judge(step, result, ended)
    else:
        made |= {"found": made.get("said", ""), "verdict": f"FAILED: {ended}" if ended else "as expected"}
    return made


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def judge(step: Step, result: Mapping[str, Any], ended: str) -> dict[str, Any]:
    """What a row's result says about what was expected of it, and what it has for the page."""
    if not result:
        return {"found": "", "verdict": f"FAILED: {ended or 'no result'}"}
    error = result.get("error") or {}
    if result["status"] != step.expect.get("status", "ok"):
        return {"found": result["status"], "verdict": f"FAILED: {error.get('type')}: {error.get('message')}"[:300]}
    found, others = [], []
    for path, wanted in step.expect.items():
        value = result["status"] if path == "status" else look_up(result.get("metrics") or {}, path)
        found.append(f"{path} {shown(value)}")
        if not agrees(value, wanted):
            others.append(path)
    verdict = f"OTHER: {', '.join(others)}" if others else "as expected"
    return {"found": "; ".join(found), "verdict": verdict, "page": (result.get("metrics") or {}).get("page", [])}


def look_up(metrics: Any, path: str) -> Any:
    """`kernels.cudnn.runs`, `loss.-1`; None where there is nothing."""
    for part in path.split("."):
        try:
            metrics = metrics[int(part)] if isinstance(metrics, list) else metrics[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return metrics


def bounds(wanted: str) -> tuple[float, float]:
    """`40GiB..47GiB`, `300..700`."""
    low, _, high = wanted.partition("..")
    return number(low), number(high)


def number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9.e+-]+", text) else float(parse_quantity(text))


def agrees(value: Any, wanted: Any) -> bool:
    if not (isinstance(wanted, str) and ".." in wanted):
        return value == wanted
    low, high = bounds(wanted)
    return isinstance(value, int | float) and low <= value <= high


def shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value / 2**30:.2f}GiB" if abs(value) >= 2**27 else f"{value:.4g}"


def page(steps: Sequence[Step], done: Mapping[str, Mapping[str, Any]], about: str) -> str:
    """The table of all steps, and what single steps have to show, as Markdown."""
    lines = ["# What the GPU says", "", about, ""]
    lines += ["| step | expected | found | verdict | time | log |", "|---|---|---|---|---|---|"]
    for step in steps:
        one = done.get(step.name)
        expected = "; ".join(f"{n} {w}" for n, w in step.expect.items()) or "passes"
        cells = [step.name, expected, "", "not run", "", ""]
        if one is not None:
            log = f"[log]({one['log']})" if one.get("log") else ""
            cells[2:] = [str(one["found"]), str(one["verdict"]), format_seconds(one["seconds"]), log]
        lines.append("| " + " | ".join(" ".join(c.replace("|", "/").split()) for c in cells) + " |")
    good = sum(one["verdict"] == "as expected" for one in done.values())
    lines += ["", f"{good} of {len(steps)} steps as expected, {len(steps) - len(done)} not run.", ""]
    for name, one in done.items():
        if one.get("page"):
            lines += [f"## {name}", "", *one["page"], ""]
    return "\n".join(lines)


def machine() -> str:
    """The GPU, as its driver says."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as e:
        said = f"no nvidia-smi ({type(e).__name__})"
    return f"{said or 'no GPU'}; {time.strftime('%Y-%m-%d %H:%M')}; Python {sys.version.split()[0]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when every step gave what was expected, 1 when not, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="env/gpu.sh", description="Everything that only a GPU can tell.")
    parser.add_argument("out", type=Path, help="folder of the results, the logs and the page")
    parser.add_argument("steps", nargs="*", default=list(ORDER), help=f"{', '.join(ORDER)}, or one step of them: a/b")
    parser.add_argument("--dry-run", action="store_true", help="every step on a CPU, with a tiny model")
    parser.add_argument("--list", action="store_true", help="say what would be done")
    args = parser.parse_intermixed_args(argv)
    out = args.out.resolve()
    steps = steps_of(args.steps or ORDER, out, args.dry_run)
    if args.list:
        print("\n".join(f"{s.name}: {' '.join(s.command)}" for s in steps))
        return 0
    about, done = machine(), {}
    if args.dry_run:
        about += "; a dry run on a CPU with a tiny model"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with sigterm_interrupts():
            for i, step in enumerate(steps):
                print(f"[{i + 1} of {len(steps)}] {step.name}", flush=True)
                done[step.name] = one = run(step, out)
                print(f"    {one['verdict']} ({format_seconds(one['seconds'])})", flush=True)
                print(*(f"    {line}" for line in [*one["found"].split("; "), *one.get("page", [])] if line), sep="\n")
                (out / "page.md").write_text(page(steps, done, about))
    except KeyboardInterrupt:
        return 130
    print(out / "page.md")
    return 0 if all(one["verdict"] == "as expected" for one in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
