"""`alst check` measures in about two minutes, with real ranks, what this machine reaches, and says what looks wrong.

The ranks work (`train.machine_rates`); `alst plan --machine FOLDER` plans with their result. Without torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator

from alstlib.base.config import Engine, Model, RunConfig
from alstlib.base.options import Options
from alstlib.base.units import GIB, format_bytes
from alstlib.planner.gpus import rates_named
from alstlib.planner.tables import console, listed
from alstlib.runs import launch
from alstlib.runs.results import Json

HELP = "measure this machine's rates and memory and say what looks wrong; `alst plan --machine` uses the result"
EXIT = (
    "Exit status: 0 when nothing looks wrong; 1 when something looks wrong or a measurement failed; 2 when the command "
    "was refused."
)
WORKER = "alstlib.runs.train.machine_rates"

SHOWN = {
    "matmul": ("matrix products", 1e12, "TFLOPS"), "attention_forward": ("attention, forward", 1e12, "TFLOPS"),
    "attention_backward": ("attention, backward", 1e12, "TFLOPS"), "to_host": ("device to host", 1e9, "GB/s"),
    "from_host": ("host to device", 1e9, "GB/s"), "host_memory": ("AdamW on the host", 1e9, "GB/s"),
    "link": ("all-to-all in a node", 1e9, "GB/s"), "network": ("all-to-all over nodes", 1e9, "GB/s"),
    "all_reduce": ("all-reduce", 1e9, "GB/s"), "disk_write": ("host to disk", 1e9, "GB/s"),
    "disk_read": ("disk to host", 1e9, "GB/s"),
}  # fmt: skip
"""Rates: their name, unit, and the unit's name."""
UNEVEN, LOW, SLOW_LINK = 0.8, 0.6, 0.5
"""Shares below which something looks wrong: of the ranks' median, of the table's rate, of the links' median."""
CROWDED = 4 * GIB
"""A CUDA context and NCCL take less than this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `alst check`."""
    parser.add_argument(
        "--ranks", type=int, default=0, help="the number of ranks (default: one for each GPU; without GPUs, 2)"
    )
    parser.add_argument(
        "--model", default="llama-3.1-8b", help="the model whose shapes are measured (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="alst_machine", metavar="FOLDER", help="the folder of the result (default: %(default)s)"
    )
    parser.add_argument(
        "--disk", metavar="FOLDER", help="the folder whose disk is measured (default: that of the result)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def check(args: argparse.Namespace) -> int:
    """The command; its exit status is EXIT's."""
    options = Options(offload=True, disk=args.disk) if args.disk else Options()
    engine = Engine(world_size=args.ranks, sp=0)
    run = launch.resolve(RunConfig(row="check", model=Model(name=args.model), engine=engine, options=options))
    show = None if args.json else launch.progress_printer()
    try:
        result = launch.launch(run, args.out, worker=WORKER, on_progress=show, force=True)
    except launch.RunFailed as e:
        raise OSError(str(e)) from None
    if result["status"] != "ok":
        why = result["error"].get("message") or result["status"]
        raise OSError(f"the measurement failed: {why}. Look for other processes on the GPU")
    metrics = result["metrics"]
    wrong = list(findings(metrics))
    if args.json:
        print(json.dumps({**metrics, "findings": wrong}, indent=2))
    else:
        tell(metrics, wrong)
        print(f"\nplan with this result: alst plan --machine {args.out} --model {args.model}")
    return 1 if wrong else 0


def findings(metrics: Json) -> Iterator[str]:
    """What looks wrong, each in a sentence that says what to look at."""
    places, known, links = metrics["places"], rates_named(metrics["device_name"]), metrics["links"]
    nodes, measured = [place.split()[0] for place in places], metrics["rates"]
    for name, (what, _, _) in SHOWN.items():
        if not (by_rank := measured.get(name)):
            continue
        slow, middle = min(by_rank), statistics.median(by_rank)
        if slow < UNEVEN * middle:
            rank = by_rank.index(slow)
            yield (
                f"{what}: rank {rank} on {nodes[rank]} reaches {slow / middle:.0%} of the ranks' median; "
                "every step waits for it. Look for other processes, clocks and temperature there"
            )
        table = getattr(known, "host" if name in ("to_host", "from_host") else name, 0)
        if middle < LOW * table:
            yield (
                f"{what}: {_rate(name, middle)} is {middle / table:.0%} of the {_rate(name, table)} that the planner's "
                f"table has for {metrics['device_name']}"
            )
    for rank, rate in enumerate(links):
        if rate < SLOW_LINK * statistics.median(links):
            to = (rank + 1) % len(links)
            yield (
                f"link: rank {rank} on {nodes[rank]} sends to rank {to} on {nodes[to]} at {_rate('link', rate)}, less "
                "than half of the links' median. Look at cables, NCCL_SOCKET_IFNAME and whether both GPUs have NVLink"
            )
    pinned, paged = measured.get("from_host"), measured.get("from_host_not_pinned")
    if pinned and paged and min(pinned) < 1.2 * min(paged):
        yield (
            "pinned memory is no faster than other memory: offload cannot overlap. Look at `ulimit -l` and "
            "the container's limits"
        )
    for rank, place in enumerate(places):
        gpu, _, cores = place.split()[-1].partition("/")
        if gpu.isdigit() and cores != "-" and gpu not in cores.split(","):
            yield (
                f"NUMA: rank {rank}'s GPU is at node {gpu} and its cores are at node {cores}: copies to the host cross "
                "sockets. Bind ranks to the node of their GPU"
            )
    if (gone := sum(metrics["overheads"].values())) > CROWDED:
        yield (
            f"device memory: {format_bytes(gone)} are in use before any tensor is allocated. Look for other processes "
            "on the GPU (nvidia-smi)"
        )


def tell(metrics: Json, wrong: list[str]) -> None:
    """Print what was measured, and what looks wrong."""
    about = ("device_name", "ranks", "nodes", "dtype", "torch", "cuda", "driver", "cores")
    print(f"measured in {metrics['seconds']:.0f} s:", ", ".join(f"{name} {metrics[name]}" for name in about), "\n")
    rates = [
        [what, _rate(name, min(by_rank)), _rate(name, statistics.median(by_rank))]
        for name, (what, _, _) in SHOWN.items() if (by_rank := metrics["rates"].get(name))
    ]  # fmt: skip
    memory = {"each GPU": metrics["gpu_memory"], "host, for the ranks of a node": metrics["host_memory"]}
    memory |= {f"in use before any tensor: {name}": nbytes for name, nbytes in metrics["overheads"].items()}
    sizes = [[name, format_bytes(nbytes)] for name, nbytes in memory.items() if nbytes]
    rows = listed(["all ranks at the same time", "slowest rank", "median"], rates)
    console().print(rows, "", listed(["memory", ""], sizes), "")
    print("\n".join(f"! {text}." for text in wrong) or "nothing looks wrong")


def _rate(name: str, value: float) -> str:
    _, unit, text = SHOWN[name]
    return f"{value / unit:.3g} {text}"
