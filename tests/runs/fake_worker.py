"""A worker for tests of the launcher, run by torchrun with `-m fake_worker`: imports nothing heavy.

`model_config.fake` says what to do: ok, fail (rank 1 only), oom, hang, hang_then_explain (an error when it is ended),
silent (no result), ok_then_fail, environ, shrink (memory runs out once),
shrink_then_hang (rank 1 at once), stuck (memory runs out at the same length again), killed (rank 1, and rank 0 says
that it lost it), stopped (rank 1).
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from alstlib.config import RunConfig
from alstlib.runs import launch, results
from alstlib.runs.processes import answer_where


def explain(config, out):
    error = {"type": "Explained", "message": "the other rank is gone"}
    results.write_result(out / "result.json", results.new_result(config, "error", error=error))
    sys.exit(1)


def is_alive(started):
    """Whether the rank that wrote its process's number there runs, or is still to begin."""
    try:
        pid = started.read_text()
        return not pid or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not started.exists()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    launch.die_with_parent()
    answer_where()
    config = RunConfig.from_dict(json.loads(args.config.read_text()))
    what, rank = config.model.config["fake"], int(os.environ["RANK"])
    progress = launch.Progress(args.out / "progress.jsonl", rank)
    print(f"rank {rank} says: {what}", file=sys.stderr)
    for step, loss in ((1, float("nan")), (2, 2.5)):
        progress.emit("step", row=config.row, seq_len=config.data.seq_len, step=step, steps=2, loss=loss)
    if what == "killed":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent's comes before rank 0 has written its error
    (args.out / f"started.{rank}").write_text(str(os.getpid()))
    if what == "hang_then_explain":
        signal.signal(signal.SIGTERM, lambda *_: explain(config, args.out))
    if what in ("killed", "stopped"):
        if rank == 1:
            while not (args.out / "started.0").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        while what == "stopped" or is_alive(args.out / "started.1"):
            time.sleep(0.01)
        explain(config, args.out)
    if what.startswith("hang") or (what == "shrink_then_hang" and rank):
        time.sleep(600)
    if what == "fail":
        if rank == 1:
            raise RuntimeError("rank one is broken")
        time.sleep(600)
    if what in ("shrink", "shrink_then_hang", "stuck") and rank == 0:
        lost = [e for e in launch.ProgressReader(progress.path).read() if e["event"] == "tried"]
        progress.emit("tried", seq_len=900, peak=100)
        if what == "stuck" or not lost:
            progress.emit("tried", seq_len=1000, peak=None)
            what = "oom"
        elif what == "shrink_then_hang":
            time.sleep(600)
    if what == "environ":
        tempfile.mkdtemp()
        (args.out / f"environ.{rank}.json").write_text(json.dumps(dict(os.environ)))
    if rank == 0 and what != "silent":
        metrics = {
            "seq_len": config.data.seq_len,
            "tokens_per_step": config.data.seq_len,
            "step_seconds": [3.0, 1.0, 2.0],
            "loss": [float("nan"), 2.5],
            "device_peak_bytes": [100, 300],
            "host_peak_bytes": [10, 20],
            "flos": {"paper": 4e12, "model": 2e12},
        }
        status = "oom" if what == "oom" else "ok"
        error = {"type": "Explained", "message": "too long"} if status == "oom" else None
        results.write_result(args.out / "result.json", results.new_result(config, status, metrics=metrics, error=error))
        if status != "ok":
            sys.exit(1)
    if what == "ok_then_fail" and rank == 1:
        while not (args.out / "result.json").exists():
            time.sleep(0.05)
        sys.exit(1)


if __name__ == "__main__":
    main()
