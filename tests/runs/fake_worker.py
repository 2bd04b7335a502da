"""A worker for tests of the launcher, run by torchrun with `-m fake_worker`: imports nothing heavy.

`model_config.fake` says what to do: ok, fail (rank 1 only), oom, hang, hang_then_explain (an error when it is ended),
silent (no result), ok_then_fail, environ, shrink (memory runs out once),
shrink_then_hang (rank 1 at once), stuck (memory runs out at the same length again), killed (rank 1, and rank 0 says
that it lost it), stopped (rank 1).
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from alstlib.base.config import RunConfig
from alstlib.runs import results
from alstlib.runs.processes import answer_where, die_with_parent
from alstlib.runs.progress import Progress, ProgressReader


def is_alive(started):
    """Whether the rank that wrote its process's number there runs, or is still to begin."""
    try:
        pid = started.read_text()
        return not pid or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not started.exists()


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def main():
    given = {name: Path(value) for name, value in zip(sys.argv[1::2], sys.argv[2::2])}
    die_with_parent()
    answer_where()
    out, config = given["--out"], RunConfig.from_dict(json.loads(given["--config"].read_text()))
    what, rank, length = config.model.config["fake"], int(os.environ["RANK"]), config.data.seq_len
    progress = Progress(out / "progress.jsonl", rank)

    def end(status, message, **metrics):
        error = {"type": "Explained", "message": message} if message else None
        results.write_result(out / "result.json", results.new_result(config, status, metrics=metrics, error=error))
        if message:
            sys.exit(1)

    def lost(*_):
        end("error", "the other rank is gone")

    print(f"rank {rank} says: {what}", file=sys.stderr)
    for step, loss in ((1, float("nan")), (2, 2.5)):
        progress.emit("step", row=config.row, seq_len=length, step=step, steps=2, loss=loss)
    if what == "killed":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent's comes before rank 0 has written its error
    (out / f"started.{rank}").write_text(str(os.getpid()))
    if what == "hang_then_explain":
        signal.signal(signal.SIGTERM, lost)
    if what in ("killed", "stopped"):
        if rank == 1:
            wait_for(out / "started.0")
            os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        while what == "stopped" or is_alive(out / "started.1"):
            time.sleep(0.01)
        lost()
    if what.startswith("hang") or (what, rank) in (("fail", 0), ("shrink_then_hang", 1)):
        time.sleep(600)
    if what == "fail":
        wait_for(out / "started.0")  # when rank 0 has said what is looked for
        raise RuntimeError("rank one is broken")
    if what in ("shrink", "shrink_then_hang", "stuck") and rank == 0:
        again = any(e["event"] == "tried" for e in ProgressReader(progress.path).read())
        progress.emit("tried", seq_len=900, peak=100)
        if what == "stuck" or not again:
            progress.emit("tried", seq_len=1000, peak=None)
            what = "oom"
        elif what == "shrink_then_hang":
            time.sleep(600)
    if what == "environ":
        tempfile.mkdtemp()
        (out / f"environ.{rank}.json").write_text(json.dumps(dict(os.environ)))
    if rank == 0 and what != "silent":
        status, message = ("oom", "too long") if what == "oom" else ("ok", "")
        end(status, message, seq_len=length, tokens_per_step=length, step_seconds=[3.0, 1.0, 2.0])
    if what == "ok_then_fail" and rank == 1:
        wait_for(out / "result.json")
        sys.exit(1)


if __name__ == "__main__":
    main()
