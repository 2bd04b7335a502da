"""The worker that shows what a GPU does in one step, and when: `timeline.py --config config.json --out
DIR`.

PyTorch's profiler records a step of one rank (as `emulate` runs it), after two steps that warm up: the first measures
what can be kept on the host, and the second pins memory for it. Perfetto opens trace.json. What share of the time of
copies between device and host lies beside kernels? For how long does no kernel run, while something is copied or
nothing is? On a CPU the operators stand in for kernels, and nothing is copied.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from emulate import Emulation
from torch.profiler import ProfilerActivity, profile

from alstlib.base.units import format_bytes, format_seconds
from alstlib.runs.train.worker import run_worker, wait_for

Spans = list[tuple[float, float]]
"""Beginnings and ends in order, without overlap. Microseconds."""
LANES = {"kernels": "", "out": "DtoH", "back": "HtoD"}
"""What a device does at a time: kernels, copies to the host, and copies from there, with what is in their names."""
LEVELS = " .:-=+*#%@"
"""Shares of a column's time, from none to all."""
COLUMNS = 100
GAPS = 5


def lane_of(event: Mapping[str, Any]) -> str:
    """The lane of an event of a trace; empty for one of the host, or that moves nothing between device and host."""
    kind = event.get("cat", "")
    if kind == "gpu_memcpy":
        return next((lane for lane, name in LANES.items() if name and name in event["name"]), "")
    return "kernels" if kind in ("kernel", "cpu_op") else ""


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    made: Spans = []
    for begin, end in sorted(spans):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made


def within(spans: Spans, others: Spans) -> Spans:
    """The parts of spans that lie in the others."""
    made, i = [], 0
    for begin, end in spans:
        while i < len(others) and others[i][1] <= begin:
            i += 1
        for low, high in others[i:]:
            if low >= end:
                break
            made.append((max(begin, low), min(end, high)))
    return made


def seconds(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans) / 1e6


def between(spans: Spans) -> Spans:
    """What lies between spans."""
    return [(end, begin) for (_, end), (begin, _) in itertools.pairwise(spans)]


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The lanes of a trace's events, what lies beside what, and the longest times without a kernel."""
    lanes: dict[str, list[Mapping[str, Any]]] = {lane: [] for lane in LANES}
    for event in events:
        if event.get("ph") == "X" and (lane := lane_of(event)):
            lanes[lane].append(event)
    spans = {lane: merged((e["ts"], e["ts"] + e["dur"]) for e in of) for lane, of in lanes.items()}
    busy, copying = spans["kernels"], merged([*spans["out"], *spans["back"]])
    if not busy:
        raise RuntimeError("the profiler recorded no kernel")
    gaps, first = between(busy), busy[0][0]
    after = {e["ts"]: e["name"] for e in lanes["kernels"]}
    made: dict[str, Any] = {
        "seconds": (busy[-1][1] - first) / 1e6,
        "kernel_seconds": seconds(busy),
        "waiting_for_copies_seconds": seconds(within(gaps, copying)),
        "gaps": [
            {"at": (a - first) / 1e6, "seconds": (b - a) / 1e6, "copying": seconds(within([(a, b)], copying)),
             "before": after[b]}
            for a, b in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:GAPS]
        ],
        "bars": {lane: bar(of, first, busy[-1][1]) for lane, of in spans.items()},
    }  # fmt: skip
    made["idle_seconds"] = seconds(gaps) - made["waiting_for_copies_seconds"]
    for lane in ("out", "back"):
        made[lane] = {
            "seconds": seconds(spans[lane]), "beside_kernels": seconds(within(spans[lane], busy)),
            "bytes": sum(e.get("args", {}).get("bytes", 0) for e in lanes[lane]), "copies": len(lanes[lane]),
            "streams": len({e.get("tid") for e in lanes[lane]}),
        }  # fmt: skip
    total = sum(made[lane]["seconds"] for lane in ("out", "back"))
    hidden = sum(made[lane]["beside_kernels"] for lane in ("out", "back"))
    made["share_of_copies_beside_kernels"] = hidden / total if total else None
    made["share_waiting_for_copies"] = made["waiting_for_copies_seconds"] / made["seconds"]
    return made


def bar(spans: Spans, first: float, last: float) -> str:
    """One character for each part of the time: how much of it is covered."""
    width, text = (last - first) / COLUMNS, ""
    for i in range(COLUMNS):
        column = [(first + i * width, first + (i + 1) * width)]
        text += LEVELS[min(len(LEVELS) - 1, round(seconds(within(column, spans)) * 1e6 / width * (len(LEVELS) - 1)))]
    return text


def as_page(found: Mapping[str, Any], cuda: bool) -> list[str]:
    """Lines of Markdown: a table, the lanes, and where no kernel ran."""
    whole = found["seconds"]
    kernels, rest = "kernels" if cuda else "operators", ("waiting_for_copies_seconds", "idle_seconds")
    rows = [(f"{kernels} run", found["kernel_seconds"])]
    rows += zip((f"no {kernels[:-1]}, a copy runs", f"no {kernels[:-1]}, no copy"), (found[name] for name in rest))
    lines = ["| of one step | time | share |", "|---|---|---|"]
    lines += [f"| {what} | {format_seconds(s)} | {s / whole:.1%} |" for what, s in rows]
    lines += [f"| all | {format_seconds(whole)} | 100% |", ""]
    if not any(found[lane]["copies"] for lane in ("out", "back")):
        lines += ["There are no copies on a side stream: nothing is copied between a device and the host.", ""]
    else:
        lines += [f"| copies | time | beside {kernels} | bytes | a second | streams |", "|---|---|---|---|---|---|"]
        for lane in ("out", "back"):
            one = found[lane]
            took = max(one["seconds"], 1e-9)
            lines.append(
                f"| {lane} | {format_seconds(one['seconds'])} | {one['beside_kernels'] / took:.1%} | "
                f"{format_bytes(one['bytes'])} | {format_bytes(int(one['bytes'] / took))} | {one['streams']} |"
            )
        lines.append("")
    lines += [f"From the first {kernels[:-1]} to the last; `@`: all of the time, blank: none of it.", "", "```"]
    lines += [f"{lane:8}|{text}|" for lane, text in found["bars"].items()]
    lines += ["```", "", f"| longest times without {kernels} | at | a copy runs for | then |", "|---|---|---|---|"]
    lines += [
        f"| {format_seconds(gap['seconds'])} | {format_seconds(gap['at'])} | {format_seconds(gap['copying'])} | "
        f"`{gap['before'][:60]}` |"
        for gap in found["gaps"]
    ]
    return lines


class Timeline(Emulation):
    def __call__(self) -> dict[str, Any]:
        run, batch = self.run, self.shard()
        self.say(f"{run.data.seq_len:,} tokens: two steps that warm up, and one that is recorded")
        for _ in range(2):
            self.step(batch)
        wait_for(self.device)
        activity = ProfilerActivity.CUDA if self.device.type == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as recorded:
            began = time.perf_counter()
            self.step(batch)
            wait_for(self.device)
            took = time.perf_counter() - began
        trace = self.out / "trace.json"
        recorded.export_chrome_trace(str(trace))
        found = summary(json.loads(trace.read_text())["traceEvents"])
        return {
            "seq_len": run.data.seq_len,
            "tokens_per_step": run.data.seq_len,
            "step_seconds": [took],
            "timeline": found,
            "notes": self.handle.notes,
            "page": as_page(found, self.gpu),
        }


def main() -> None:
    run_worker(__doc__, Timeline)


if __name__ == "__main__":
    main()
