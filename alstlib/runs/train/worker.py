"""What every worker does under torchrun: choose its device, join the ranks, and write one result.json."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from alstlib.base.config import RunConfig
from alstlib.base.mesh import SPContext, accelerator, from_all, join_fake, own_device, take_device
from alstlib.hf.loading.models import model_config
from alstlib.hf.loading.public_models import SHAPES
from alstlib.offload.disk_store import DiskStore
from alstlib.planner import devices
from alstlib.planner.fits import known_only
from alstlib.planner.machine import machine_of
from alstlib.planner.measure.ledger import ran_out
from alstlib.planner.preflight import as_metrics, foretell, step_limit
from alstlib.runs import results, workers
from alstlib.runs.corpus.formats import only_tokens
from alstlib.runs.corpus.reading import get_tokenizer, has_tokenizer, load_corpus
from alstlib.runs.processes import answer_where, die_with_parent
from alstlib.runs.progress import Progress
from alstlib.runs.results import Json
from alstlib.runs.train.resume import Timeout, Warned, of_first

LONGEST_SECONDS = 30 * 86400.0
"""That a rank waits for others where no limit is set: a time that the backends can count."""


def this_device() -> tuple[torch.device, bool]:
    """This rank's device, and whether it is a GPU (or another accelerator).

    Raises:
        ValueError: the driver has GPUs that PyTorch cannot use: the run would train on the CPU instead.
    """
    device = own_device()
    if device.type == "cpu" and torch.version.cuda and (listed := devices.device_count()):  # by the driver alone
        try:
            why: Any = torch.cuda.init()
        except (RuntimeError, AssertionError) as e:
            why = e
        raise ValueError(
            f"the driver lists {listed} GPUs, but PyTorch {torch.__version__} can use none ({why}): update the driver, "
            "or install PyTorch for a CUDA that it knows (env/README.md). CUDA_VISIBLE_DEVICES='' trains on the CPU"
        )
    return device, device.type != "cpu"


def join(device: torch.device, seconds: float, group: str = "") -> None:
    """Join the ranks that torchrun started, or those processes of theirs that name the same `group`. In a collective of
    any group a rank waits this long for the others.

    NCCL counts them from when the collective is enqueued, which may be a step before it runs, and then ends the
    process. Groups that are made later, DeepSpeed's too, take PyTorch's defaults: 10 minutes with NCCL.
    """
    defaults, wait = dist.distributed_c10d, timedelta(seconds=seconds)
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = wait
    plain = accelerator(device) is None or int(os.environ["WORLD_SIZE"]) == 1
    bound = None if plain else device  # groups of one rank are not split from a bound one
    own: dict[str, Any] = {}
    if group:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=wait)
        rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        own = {"store": dist.PrefixStore(group, store), "rank": rank, "world_size": ranks}
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=wait, device_id=bound, **own)


def node_count(ranks: int) -> int:
    """Number of nodes on which torchrun started `ranks` ranks."""
    return max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def files_of(run: RunConfig, out: Path, rank: int) -> Path | None:
    """The folder below `engine.nvme_path` in which a rank has DeepSpeed's files; None where nothing is there. No two
    runs write to one `out` at a time, so that none shares it."""
    if run.engine.nvme_path is None:
        return None
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
    return Path(run.engine.nvme_path) / f"alst-{name}" / f"rank{rank}"


def remove_files(folder: Path) -> None:
    """Remove a rank's files, and the run's folder with the last rank's."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a step on a device, from all ranks' start to all ranks' end."""
    dist.barrier()
    began = time.perf_counter()
    step()
    wait_for(device)
    dist.barrier()
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if (here := accelerator(device)) is not None:
        here.synchronize(device)


class Job:
    """One rank of what a worker does: its device and precision, and its line of progress."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        self.run, self.out = run, out
        self.rank = dist.get_rank() if dist.is_initialized() and not run.emulate else 0
        self.device, self.gpu = this_device()
        self.bf16 = run.bf16(self.gpu)
        self.dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.progress = Progress(out / "progress.jsonl", self.rank)
        self.notes: list[str] = []

    def with_files(self) -> RunConfig:
        """The run with a new folder of this rank in place of `engine.nvme_path`. What an attempt that was killed left
        there is gone."""
        if (folder := files_of(self.run, self.out, self.rank)) is None:
            return self.run
        if not Path(str(self.run.engine.nvme_path)).is_dir():
            raise ValueError(f"engine.nvme_path={self.run.engine.nvme_path!r} is no folder on this node")
        shutil.rmtree(folder, ignore_errors=True)  # not the run's folder: another rank may be making its own in it
        folder.mkdir(parents=True, exist_ok=True)
        return self.run.replace(engine={"nvme_path": str(folder)})

    def say(self, message: str, **fields: Any) -> None:
        self.progress.emit("load", row=self.run.row, message=message, **fields)

    def measured(self, ledger: Any, handle: Any) -> Json:
        """What every worker's result has: peaks of each rank, the attention kernel and notes."""
        devices, hosts = zip(*from_all([ledger.device_peak, ledger.host_peak]))
        disk: Json = {}
        if isinstance(handle.store, DiskStore):
            disk = {"disk_peak_bytes": from_all(handle.store.file.peak)}
        return {
            "device_peak_bytes": list(devices),
            "host_peak_bytes": list(hosts),
            **disk,
            "backend": handle.attention.backend_name,
            "notes": [*self.notes, *handle.notes],
        }

    def predicted(self, worker: str, ctx: SPContext, seq_len: int) -> Json:
        """What the planner says of this run, for comparison with the measurement."""
        gpus = ctx.world_size if self.gpu else 0
        if why := workers.unpredicted(self.run, worker, gpus):
            return {"unknown": why}
        try:
            machine = machine_of(self.run, node_count(ctx.world_size), gpus)
            with known_only():  # the launcher had it simulated
                return as_metrics(foretell(self.run, machine, seq_len)[1], machine)
        except (ValueError, KeyError) as e:
            return {"unknown": str(e)}


class Training(Job):
    """One rank of a run that trains: its data and tokenizer."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        self.check_writable()
        self.say(f"reading data '{run.data.name}' and the tokenizer")
        self.corpus = self.read_corpus()
        config = model_config(run.model.name, run.model.config, run.model.trust_remote_code)
        self.vocabulary = config.get_text_config().vocab_size
        self.tokenizer = self._tokenizer()

    def read_corpus(self) -> Any:
        """The documents to train on, as `load_corpus` returns them: a worker may make its own."""
        return load_corpus(self.run.data.name)

    def check_writable(self) -> None:
        """Raise OSError on every rank if rank 0 cannot write to `save_to`: told before the steps, not after. A folder
        that is not there is not made yet: a run that fails leaves none."""
        folder = Path(self.run.output.save_to or self.out).absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not of_first(there.is_dir() and os.access(there, os.W_OK)):
            raise OSError(f"save_to='{self.run.output.save_to}' cannot be written to")

    def _tokenizer(self) -> Any:
        """The run's tokenizer; None where the data are tokens already."""
        run, auto = self.run, self.run.data.tokenizer == "auto"
        own = auto and run.model.name not in SHAPES  # the model's
        if auto and only_tokens(self.corpus) and not (own and has_tokenizer(run.model.name)):
            return None
        name = run.model.name if own else run.data.tokenizer
        corpus, size = None if run.data.name == "stdlib" else self.corpus, min(self.vocabulary, 8192)
        return get_tokenizer(name, corpus=corpus, vocab_size=size, trust=run.model.trust_remote_code)

    def check_tokens(self, largest: int) -> None:
        if largest >= self.vocabulary:
            raise ValueError(
                f"data='{self.run.data.name}' has token {largest}, but the model's vocab_size is {self.vocabulary}: "
                "take the model's own tokenizer, or model.config={'vocab_size': ...} with random weights"
            )


def begin() -> torch.device:
    """What each process of a rank does first. Returns its device."""
    die_with_parent()
    answer_where()
    if (device := take_device()).type == "cpu":
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS") or 1)))
    return device


@record
def run_worker(doc: str | None, job: Callable[[RunConfig, Path], Any]) -> None:
    """What every worker does: read the configuration, join the ranks, `work`."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--config", type=Path, required=True, help="config.json of a RunConfig")
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json and progress.jsonl")
    args = parser.parse_args()
    device = begin()
    run = RunConfig.from_dict(json.loads(args.config.read_text()))
    if run.emulate:  # ranks that are not there: nothing is sent
        join_fake(run.emulate)
    else:
        world = int(os.environ["WORLD_SIZE"])
        with known_only():
            patience = step_limit(run, node_count(world), 0 if device.type == "cpu" else world)[0]
        join(device, min(patience, LONGEST_SECONDS) + 60)  # the launcher ends the run before, and says why
    work(run, args.out, job)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written; seen once: threads of the libraries abort while the interpreter is taken down


def work(run: RunConfig, out: Path, job: Callable[[RunConfig, Path], Any]) -> None:
    """One rank of the run: `job(run, out)()` gives the metrics, and with `save_to` its `finish` saves the model.

    Writes result.json, and raises what went wrong after that.
    """
    here, ranks = accelerator(own_device()), 1 if run.emulate else dist.get_world_size()
    metrics: Json = {}

    def write(status: str, **error: Any) -> None:
        result = results.new_result(
            run, status, mode="emulated" if run.emulate else "real", metrics=metrics, error=error,
            device="cpu" if here is None else here.get_device_name(), device_count=ranks,
        )  # fmt: skip
        results.write_result(out / "result.json", result)

    try:
        working = job(run, out)
        metrics = working()
        if run.output.save_to and hasattr(working, "finish"):
            working.finish()
    except BaseException as e:
        kinds: dict[type, str] = {Timeout: "timeout", Warned: "cancelled"}
        if claim(out):
            shared = isinstance(e, ValueError | OSError)  # of settings, data and files: every rank raises it
            whose = {} if ranks == 1 or shared else {"rank": dist.get_rank()}
            status = "oom" if ran_out(e) else kinds.get(type(e), "error")
            write(status, type=type(e).__name__, message=str(e), **whose)
        raise
    finally:
        if (folder := files_of(run, out, 0 if run.emulate else dist.get_rank())) is not None:
            remove_files(folder)
    if run.emulate or dist.get_rank() == 0:
        write("ok")


def claim(out: Path) -> bool:
    """True for the first rank that fails: the others fail because of it, and their errors say less."""
    try:
        (out / f"failed.{os.environ['TORCHELASTIC_RUN_ID']}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
