"""What `env/gpu.sh` does on a machine with a GPU, on one without: every step is valid, and none can end the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_repository import program

from alstlib.base.config import RunConfig
from alstlib.planner import devices
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import predict
from alstlib.runs.sweeps import load_spec

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "papermill_runs" / "specs").glob("gpu-*.yaml"))
sys.path.insert(0, str(ROOT / "env"))
import gpu  # noqa: E402

ROWS = [
    pytest.param(path.stem, spec, row, id=f"{path.stem}/{row['name']}")
    for path in SPECS for spec in [yaml.safe_load(path.read_text())] for row in spec["rows"]
]  # fmt: skip


def test_every_spec_is_a_step_and_runs_on_one_gpu(tmp_path, monkeypatch):
    assert {p.stem for p in SPECS} | {"tests"} == set(gpu.ORDER)
    for path in SPECS:
        for dry, gpus in ((False, 1), (True, 0)):
            monkeypatch.setattr(devices, "device_count", lambda gpus=gpus: gpus)
            steps = list(gpu.rows_of(path.stem, tmp_path, dry))
            spec = load_spec(tmp_path / "specs" / path.name)
            assert [s.name.partition("/")[2] for s in steps] == list(spec.rows)
            for step, run in zip(steps, spec.rows.values()):
                assert run.engine.world_size == 1
                assert step.limit > (run.limits.timeout or 0) > 0
                assert run.model.name == ("tiny" if dry else "llama-3.1-8b")
                assert not dry or run.data.seq_len <= 512
        assert list(load_spec(path).rows) == list(spec.rows)  # `alst run` reads it as it is


def test_the_first_steps_take_less_than_ten_minutes(tmp_path):
    assert gpu.ORDER[: len(gpu.FIRST)] == gpu.FIRST
    assert sum(step.limit for step in gpu.steps_of(gpu.FIRST, tmp_path)) <= 600


def test_every_kernel_and_every_gpu_test_has_a_process_of_its_own():
    commands = {s.name: " ".join(s.command) for s in gpu.tests()}
    assert {f"tests/{kernel}" for kernel in gpu.KERNELS} <= set(commands)
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = "\n@pytest.mark.gpu" in path.read_text()  # a file that only speaks of it would run no test
        assert any(str(path) in command for command in commands.values()) == marked, path


@pytest.mark.parametrize("name, spec, row", ROWS)
def test_what_is_expected_is_what_the_planner_says(name, spec, row):
    """Of kernels: what was published. An emulated rank has whole layers on the device where ZeRO-3 gathers them."""
    expect = row.get("expect", {})
    ranges = [gpu.bounds(wanted) for wanted in expect.values() if ".." in str(wanted)]
    assert all(low < high and (low > 0 or name in gpu.FIRST) for low, high in ranges)  # those have errors and percents
    if "device_peak_bytes.0" not in expect:
        worker = Path(spec.get("parameters", {}).get("worker", "")).stem
        assert worker in ("time_kernels", "peers", "same_gradients", "timeline") or "seq_len" in expect
        return
    run = RunConfig.from_dict(spec["base"]).replace(**{n: v for n, v in row.items() if n not in ("name", "expect")})
    gpus, built, emulated = run.emulate or 1, run.model.config, run.emulate > 0
    if emulated:
        run = run.replace(**{"emulate": 0, "model.config": {}})
    whole = read_shape(run.model.name, run.model.config)
    run = run.replace(engine={"world_size": gpus, "sp": gpus})
    found = predict(whole, run, Machine(gpus=gpus), run.data.seq_len)
    device = sum(n for kind, n in found.device.items() if kind not in ("CUDA context", "NCCL", "fragments"))
    if emulated:
        layers = built["num_hidden_layers"]
        device += 2 * (layers * whole.layer_parameters + 2 * whole.embedding) - found.device["gathered weights"]
        device -= found.device.get("checkpoints", 0) * (whole.layers - layers) // whole.layers
        low, high = gpu.bounds(expect.get("emulated.projected.step_seconds", "0..1e9"))
        assert low < found.seconds["step"] < high
        if high < 1e9:  # a time is judged: the first step pins the host's memory, unless there is no time for two
            assert run.optim.steps >= 2 or 2 * high * layers / whole.layers > (run.limits.timeout or 0)
    low, high = gpu.bounds(expect["device_peak_bytes.0"])
    assert low < device < high < 1.6 * low


WRITES = """import os, sys
os.makedirs(os.path.dirname(sys.argv[1]))
metrics = {"kernels": {"flash": {"runs": True}}, "device_peak_bytes": [int(sys.argv[2])]}
open(sys.argv[1], "w").write(__import__("json").dumps({"status": "ok", "metrics": metrics}))"""
STEPS = {
    "exits": ("import sys; print('cannot'); sys.exit(3)", 0, "FAILED: exit 3"),
    "dies": ("import os; os.abort()", 0, "FAILED: exit -6"),
    "hangs": ("import time; time.sleep(60)", 0, "FAILED: no end in 3.0 s"),
    "refuses": (WRITES.replace('"ok"', '"error", "error": {"type": "E", "message": "no"}'), 0, "FAILED: E: no"),
    "other": (WRITES, 2**32, "OTHER: device_peak_bytes.0"),
    "good": (WRITES, 5 * 2**29, "as expected"),
}
"""What a step runs, the peak that it measures, and the verdict."""


def test_no_step_can_end_the_others(tmp_path, monkeypatch):
    """A step that fails, crashes, hangs or cannot be started is one line of the page, and all others are run."""
    expect = {"kernels.flash.runs": True, "device_peak_bytes.0": "2GiB..3GiB"}

    def steps_of(names, out, dry):
        steps = [gpu.Step(name="nowhere", command=[str(tmp_path / "nowhere")], limit=5)]
        for name, (code, peak, _) in STEPS.items():
            command = [sys.executable, "-c", code, str(result := tmp_path / name / "result.json"), str(peak)]
            steps.append(gpu.Step(name=name, command=command, limit=3, expect=expect, result=result))
        return [*steps, gpu.Step(name="tests/x", command=[sys.executable, "-c", "print('3 passed')"], limit=5)]

    monkeypatch.setattr(gpu, "steps_of", steps_of)
    assert gpu.main([str(tmp_path)]) == 1
    page = (tmp_path / "page.md").read_text()
    verdicts = {name: verdict for name, (*_, verdict) in STEPS.items()}
    for name, verdict in {"nowhere": "FAILED: FileNotFoundError", "tests/x": "as expected", **verdicts}.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert line.split("|")[4].strip().startswith(verdict)
    assert "kernels.flash.runs True; device_peak_bytes.0 2.50GiB" in page
    assert "2 of 8 steps as expected, 0 not run." in page


@pytest.mark.slow
def test_the_first_steps_answer_on_a_cpu_too(tmp_path):
    """As a user starts them, with a driver that lists a GPU, which a dry run leaves alone. Gradients and the planner's
    bytes are judged there as well, and the timeline is shown."""
    program(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 80GB HBM3, 81559 MiB, 570.00'")
    env = {**os.environ, "PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    command = [str(ROOT / "env" / "gpu.sh"), str(out), "--dry-run", *gpu.FIRST]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    page = (out / "page.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 steps as expected, 0 not run." in page
    found = {path.parent.name: json.loads(path.read_text())["metrics"] for path in out.rglob("result.json")}
    gradients = found["4K"]["gradients"]
    assert {one["result"] for one in gradients.values()} == {"exact"}
    assert gradients["float32"]["gradient"] < 1e-5
    assert f"gradients.bfloat16.times_plain {gpu.shown(gradients['bfloat16']['times_plain'])}" in page
    for row in ("device", "host"):
        assert abs(found[row]["predicted"]["allocated_percent"]) < 10
    assert "There are no copies on a side stream" in page.partition("## gpu-timeline/64K")[2]
    assert all(line in done.stdout for line in found["64K"]["page"])
