"""A worker without a model: every rank counts seconds as steps, and continues from the count in the folder `state`."""

import os
import sys
import time
from pathlib import Path

from alstlib.base.config import RunConfig
from alstlib.runs import locks, results
from alstlib.runs.processes import die_with_parent, seconds_left
from alstlib.runs.progress import Progress


def main():
    die_with_parent()
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    run, out = RunConfig.from_dict(locks.read_object(Path(given["--config"])) or {}), Path(given["--out"])
    first, state = os.environ["RANK"] == "0", out / "state" / "count.json"
    begun = (locks.read_object(state) or {"step": 0})["step"]
    progress = Progress(out / "progress.jsonl")
    for step in range(begun + 1, run.optim.steps + 1):
        time.sleep(1)
        if first:
            progress.emit("step", row=run.row, step=step, steps=run.optim.steps)
        if step < run.optim.steps and seconds_left() < 4:
            if first:
                state.parent.mkdir(exist_ok=True)
                results.write_json(state, {"step": step})
                error = {"type": "Timeout", "message": f"no time for a step after step {step} of {run.optim.steps}"}
                results.write_result(out / "result.json", results.new_result(run, "timeout", error=error))
            return 1
    if first:
        results.write_result(out / "result.json", results.new_result(run, "ok", metrics={"begun": begun}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
