"""The nodes of a run, the command that starts something on each of them, and the Slurm job around it.

`alst run` is started once, on the node that is called the head. It starts the ranks of each row on all nodes by one
command, the launcher: `srun` in a Slurm job, and elsewhere what `--launcher` names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from alstlib.planner import devices

AGAIN = 75
"""Exit status of `alst run` after its time was up, with a saved state: the same command continues."""
NODES_VARIABLE, LAUNCHER_VARIABLE, HEAD_VARIABLE = "ALST_NODES", "ALST_LAUNCHER", "ALST_HEAD"
"""Say the same as the options `--nodes`, `--launcher` and `--head`."""
JOB_END_VARIABLE = "ALST_JOB_END"
"""When the scheduler will end the job, in seconds since the epoch."""
MARGIN_SECONDS = 60.0
"""Seconds from a run's end to its job's end, so that its ranks are gone and its result is written."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run."""

    count: int = 1
    launcher: tuple[str, ...] = ()
    """The command that starts another command once on each node; empty where there is one node."""
    head: str = "127.0.0.1"
    """Name or address of this node as the other nodes reach it."""

    def variables(self) -> dict[str, str]:
        """Variables by which `told` finds the same nodes in another process, such as a notebook's kernel."""
        return {
            NODES_VARIABLE: str(self.count), LAUNCHER_VARIABLE: shlex.join(self.launcher), HEAD_VARIABLE: self.head
        }  # fmt: skip


def told(env: Mapping[str, str] = os.environ) -> Nodes:
    """The nodes on which this process starts ranks: those that `alst run` or variables name with a launcher, else one.

    A notebook that somebody opens in a job on several nodes uses one of them.
    """
    if launcher := tuple(shlex.split(env.get(LAUNCHER_VARIABLE, ""))):
        head = env.get(HEAD_VARIABLE) or socket.gethostname()
        return Nodes(count=int(env.get(NODES_VARIABLE, 1)), launcher=launcher, head=head)
    return Nodes()


def here(count: int | None = None, launcher: str = "", head: str = "", env: Mapping[str, str] = os.environ) -> Nodes:
    """The nodes that `alst run` takes: as given, or all nodes of this Slurm job; else one.

    Raises:
        ValueError: there is no launcher, it cannot be found, or what is given contradicts the Slurm job.
    """
    in_job = "SLURM_JOB_ID" in env
    count = count or (int(env.get("SLURM_JOB_NUM_NODES", 1)) if in_job else 1)
    if in_job:
        _check_job(env)
    if count == 1:
        return Nodes()
    if not launcher and not in_job:
        raise ValueError(
            f"--nodes {count} needs --launcher CMD outside of a Slurm job: a command that starts another one once on "
            'each node, such as --launcher "mpirun --map-by ppr:1:node"; for Slurm submit env/cluster/alst.sbatch'
        )
    words = tuple(shlex.split(launcher)) or _srun(count, env)
    if shutil.which(words[0]) is None:
        raise ValueError(f"--launcher {shlex.join(words)}: there is no command {words[0]!r}")
    return Nodes(count=count, launcher=words, head=head or (_slurm_address(env) if in_job else socket.gethostname()))


def _check_job(env: Mapping[str, str]) -> None:
    if (tasks := int(env.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        raise ValueError(
            f"srun started this command {tasks} times, but it must be started once: it starts ranks on all nodes "
            "by itself. Start it in the batch script without srun, or with srun --ntasks=1"
        )
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdigit() and env.get("CUDA_VISIBLE_DEVICES") != "" and int(gpus) != devices.device_count():
        raise ValueError(
            f"Slurm gave this node {gpus} GPUs, but PyTorch can use {devices.device_count()}: check the driver, the "
            "CUDA version of PyTorch, and CUDA_VISIBLE_DEVICES (set it to '' for ranks on the CPU)"
        )


def _srun(count: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """srun, beside the step in which this command runs. A step gets all cores and the GPUs of an exclusive job only
    when it asks for them. When one node fails, the others get a minute to say how they ended."""
    words = f"srun --overlap --nodes={count} --ntasks={count} --ntasks-per-node=1 --cpu-bind=none".split()
    words += ["--kill-on-bad-exit=0", "--wait=60"]
    if cores := env.get("SLURM_CPUS_ON_NODE"):
        words.append(f"--cpus-per-task={cores}")
    if gpus := env.get("SLURM_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE"):
        words.append(f"--gpus-per-node={gpus}")
    return tuple(words)


def _slurm_address(env: Mapping[str, str]) -> str:
    """The address by which Slurm itself reaches this node; its name where Slurm does not say."""
    name = env.get("SLURMD_NODENAME") or socket.gethostname()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "node", "--oneliner", name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        if address := re.search(r"NodeAddr=(\S+)", said):
            return address[1]
    return name


def job_end() -> float:
    """When the scheduler will end this job, in seconds since the epoch; infinite where nothing says so."""
    return float(os.environ.get(JOB_END_VARIABLE) or os.environ.get("SLURM_JOB_END_TIME") or "inf")


def job_seconds() -> float:
    """Seconds that a run may take so that it ends well before its job; infinite where there is no job with an end."""
    left = job_end() - time.time()
    return max(left / 2, left - MARGIN_SECONDS)
