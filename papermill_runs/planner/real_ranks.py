"""The planner compared with the committed runs of real ranks on a CPU, whose results say what a step took.

It prints a table of device and host bytes, and simulates what is not in the user's cache: some minutes.
"""

from __future__ import annotations

import json
from pathlib import Path

from alstlib.base.config import RunConfig
from alstlib.base.units import format_bytes
from alstlib.planner.machine import Machine
from alstlib.planner.preflight import foretell

RESULTS = Path("papermill_runs/results")


def main() -> None:
    print(f"{'run':46}{'device':>12}{'planned':>12}{'error':>8}{'host':>12}{'error':>8}")
    for path in sorted(RESULTS.rglob("result.json")):
        found = json.loads(path.read_text())
        metrics = found.get("metrics") or {}
        if found["mode"] != "real" or found["environment"]["device"] != "cpu" or not metrics.get("predicted"):
            continue
        run = RunConfig.from_dict(found["config"])
        world = run.engine.world_size
        machine = Machine(gpus=world, per_node=world, gpu_memory=run.limits.device_memory, device="cpu")
        planned = foretell(run, machine, metrics["seq_len"])[1]
        device, host = max(metrics["device_peak_bytes"]), max(metrics["host_peak_bytes"])
        on_host = f"{planned.host_peak / host - 1:>8.1%}" if host else ""
        print(
            f"{path.parent.relative_to(RESULTS)!s:46}{format_bytes(device):>12}{format_bytes(planned.device_peak):>12}"
            f"{planned.device_peak / device - 1:>8.1%}{format_bytes(host):>12}{on_host}",
            flush=True,
        )


if __name__ == "__main__":
    main()
