"""Runs of the worker on ranks that the tests have already, where the start of its processes is not what is tested."""

import contextlib
import os
import time
from unittest import mock

import torch

from alstlib.runs import results
from alstlib.runs.processes import DEADLINE_VARIABLE
from alstlib.runs.train.ablation import AblationRun
from alstlib.runs.train.state import RunStates
from alstlib.runs.train.worker import work


def trained(rank, world, out, run, dies_after=0, seconds=0, kind=AblationRun):
    """A run, ended after some step without a result, or with so many seconds left after its first; what it left."""
    original = RunStates.after_step

    def after_step(self, loader, step, took, history):
        if seconds:
            os.environ[DEADLINE_VARIABLE] = str(time.time() + seconds)
        original(self, loader, step, took, history)
        if step == dies_after:
            self.wait()  # as the interpreter does at its end
            raise KeyboardInterrupt

    out.mkdir(exist_ok=True)
    with (
        mock.patch.object(RunStates, "after_step", after_step), mock.patch.dict(os.environ),
        contextlib.suppress(BaseException),
    ):  # fmt: skip
        os.environ["TORCHELASTIC_RUN_ID"] = f"{out.name}-{time.monotonic()}"
        work(run, out, kind)
    torch.distributed.barrier()
    result = results.read_result(out / "result.json")
    torch.distributed.barrier()
    return result
