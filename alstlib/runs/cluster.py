"""Runs on several nodes: which nodes there are, as a scheduler or flags say, and a job that runs `alst run` on each.

A launcher is started once on each node. Slurm is tested with two daemons on one machine. SkyPilot is tested by its
variables, with two launchers on one machine. Kubeflow and dstack are unchecked beyond the names of their variables.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alstlib.planner import devices

TEMPLATE = Path(__file__).with_name("alst.sbatch")
AGAIN = 75
"""Exit status of `alst run` after its time was up, with a saved state: the same command continues."""
JOB_END_VARIABLE = "ALST_JOB_END"
"""When the scheduler will end the job, in seconds since the epoch."""
MARGIN_SECONDS = 60.0
"""That a run ends before its job, so that its ranks are gone and its result is written."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes that a command was started on, once on each, as one of them knows them."""

    count: int = 1
    rank: int = 0
    head: str = "127.0.0.1"
    """Name or address of node 0, perhaps with `:port`, on which its launcher listens then."""
    gpus: int | None = None
    """GPUs that each node was given; None where nothing says so."""
    system: str = ""
    """Who said so."""


# What schedulers say


def _slurm(env: Mapping[str, str]) -> Nodes | None:
    if "SLURM_JOB_ID" not in env:
        return None
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    count, tasks = int(env.get("SLURM_STEP_NUM_NODES", "1")), int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_NUM_NODES" not in env and int(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or 1) > 1:
        raise ValueError(
            "this Slurm job has several nodes, but the command was started on only one of them: start it on each node "
            "with srun --ntasks-per-node=1 COMMAND, or use one node with --nodes 1"
        )
    if count > 1 and tasks != count:
        raise ValueError(
            f"Slurm started {tasks} tasks on {count} nodes, but each node needs one: use srun --ntasks-per-node=1"
        )
    head = _slurm_address(first_host(env["SLURM_STEP_NODELIST"])) if count > 1 else "127.0.0.1"
    rank = int(env.get("SLURM_NODEID", "0")) if count > 1 else 0
    return Nodes(count=count, rank=rank, head=head, gpus=int(gpus) if gpus.isdigit() else None, system="Slurm")


def first_host(names: str) -> str:
    """The first of Slurm's list of nodes: `n001` of `n[001-003,007],m5`."""
    first = re.split(r",(?![^\[]*\])", names)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _slurm_address(node: str) -> str:
    """The address by which Slurm itself reaches a node; its name where Slurm does not say."""
    return _ask("scontrol", "show", "node", "--oneliner", node).get("NodeAddr", node)


def _ask(*command: str) -> dict[str, str]:
    """The fields that scontrol prints; none where it cannot be asked."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return dict(re.findall(r"(\w+)=(\S+)", said))
    return {}


def _named(system: str, count: str, rank: str, head: str, gpus: str = "") -> Callable[..., Nodes | None]:
    """A reader of a scheduler that has a variable for each of these."""

    def read(env: Mapping[str, str]) -> Nodes | None:
        if not env.get(count) or not env.get(head) or rank not in env:
            return None
        if not env[count].isdigit():
            raise ValueError(f"{count}={env[count]!r} is not a number, but a run needs a fixed number of nodes")
        given = env.get(gpus, "")
        first = env[head].split()[0]  # SkyPilot lists all of them
        on_node = int(given) if given.isdigit() else None
        return Nodes(count=int(env[count]), rank=int(env[rank]), head=first, gpus=on_node, system=system)

    return read


SYSTEMS: dict[str, Callable[..., Nodes | None]] = {
    "Slurm": _slurm,
    "SkyPilot": _named(
        "SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"
    ),
    "Kubeflow": _named("Kubeflow", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
    "dstack": _named("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE"),
}


def here(
    count: int | None = None, rank: int | None = None, head: str | None = None, env: Mapping[str, str] = os.environ
) -> Nodes:
    """The nodes that this command was started on: as given, or as the scheduler's variables say; else one.

    Raises:
        ValueError: what is given contradicts itself or the scheduler, or this node has other GPUs than it was given.
    """
    if rank is not None or (head is not None and "SLURM_JOB_ID" not in env):
        if count is None or rank is None or head is None:
            raise ValueError(
                "--nodes, --node-rank and --head go together: give the number of nodes, the rank of this node, and the "
                "name of node 0"
            )
        if not 0 <= rank < count:
            raise ValueError(f"--node-rank {rank} must be from 0 to {count - 1}, because --nodes is {count}")
        return Nodes(count=count, rank=rank, head=head, system="the flags")
    if count == 1:
        return Nodes()
    found = next((nodes for read in SYSTEMS.values() if (nodes := read(env)) is not None), Nodes())
    if found.count > 1 and count not in (None, found.count):
        raise ValueError(
            f"--nodes {count} does not match the {found.count} nodes that the variables of {found.system} name: leave "
            "--nodes out"
        )
    if found.gpus is not None and env.get("CUDA_VISIBLE_DEVICES") != "" and found.gpus != devices.device_count():
        raise ValueError(
            f"{found.system} gave this node {found.gpus} GPUs, but PyTorch can use {devices.device_count()}: check the "
            "driver, the CUDA version of PyTorch, and CUDA_VISIBLE_DEVICES (set it to '' for ranks on the CPU)"
        )
    return replace(found, head=head or found.head)


def job_end(env: Mapping[str, str] = os.environ) -> float | None:
    """When the scheduler will end this job, in seconds since the epoch; None where nothing says so."""
    for name in (JOB_END_VARIABLE, "SLURM_JOB_END_TIME"):
        with contextlib.suppress(KeyError, ValueError):
            return float(env[name])
    if job := env.get("SLURM_JOB_ID"):
        with contextlib.suppress(KeyError, ValueError):
            ends = _ask("scontrol", "show", "job", "--oneliner", job)["EndTime"]
            return datetime.datetime.fromisoformat(ends).timestamp()
    return None


def job_seconds(now: float | None = None) -> float | None:
    """Seconds that a run may take so that it ends well before its job; None where there is no job with an end."""
    if (end := job_end()) is None:
        return None
    left = end - (time.time() if now is None else now)
    return max(left / 2, left - MARGIN_SECONDS)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `alst run` for several nodes."""
    group = parser.add_argument_group("several nodes (env/README.md explains them)")
    env = os.environ
    group.add_argument(
        "--nodes", type=int, default=env.get("ALST_NODES"), help="the number of nodes; with Slurm, submit a job on them"
    )
    group.add_argument(
        "--node-rank", type=int, default=env.get("ALST_NODE_RANK"), metavar="RANK",
        help="the rank of this node, from 0; node 0, the head, runs the sweep",
    )  # fmt: skip
    group.add_argument(
        "--head", default=env.get("ALST_HEAD"), metavar="HOST[:PORT]",
        help="the name or address of node 0, as the other nodes reach it",
    )  # fmt: skip
    group.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS",
        help="how long the nodes wait for each other (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--grace", type=float, default=env.get("ALST_GRACE", "0"), metavar="SECONDS",
        help="the time from SIGTERM to the end of the job, in which a run with checkpoint_every saves its state; with "
        "0, SIGTERM ends the run at once (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--sbatch", default="", metavar="OPTIONS",
        help='options of the submitted job, such as --sbatch="--partition=gpu --time=4:00:00"',
    )  # fmt: skip


def submit(command: Sequence[str], out: Path, count: int, options: str = "") -> str:
    """Submit a job that runs `alst run ...`, as `command` has it, on so many nodes; its number. Its log is
    `slurm-NUMBER.log` in the folder `out`.

    Raises:
        ValueError: there is no Slurm here, or this is in a job already, or sbatch refuses.
    """
    typed = shlex.join(command)
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            "this command is in a Slurm job already, and cannot submit another: start it on each node with "
            f"srun --nodes={count} --ntasks-per-node=1 {typed}"
        )
    if not shutil.which("sbatch"):
        raise ValueError(
            f"--nodes {count} found neither Slurm (there is no sbatch) nor the variables of another scheduler: start "
            f"this command on each node, with the node's rank R from 0: {typed} --nodes {count} --node-rank R --head "
            "HOST, where HOST is the name or address of node 0, as the other nodes reach it"
        )
    out.mkdir(parents=True, exist_ok=True)
    argv = ["sbatch", "--parsable", f"--nodes={count}", f"--job-name=alst-{out.name}"]
    argv += [f"--output={out / 'slurm-%j.log'}", *shlex.split(options), str(TEMPLATE), *command[2:]]
    env = {**os.environ, "ALST_PYTHON": sys.executable}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sbatch refused the job: {done.stderr.strip()}; the command was: {shlex.join(argv)}")
    return done.stdout.strip().partition(";")[0]
