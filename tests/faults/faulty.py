"""The ablation's worker with a fault, run by torchrun with `-m faulty`: `FAULT` says which, after the step `AT`."""

import os
import signal
from concurrent import futures

import torch

from alstlib.runs.train import ablation
from alstlib.runs.train.worker import run_worker

AT, RANK = 2, 1


def struck(fault, loss):
    """The loss of which gradients are taken then."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "oom":
        torch.empty(2**60, dtype=torch.uint8)
    return loss * float("nan") if fault == "nan" else loss


class Faulty(ablation.AblationRun):
    """Its rank `RANK` is struck when step `AT + 1` begins and the training state of step `AT` is on disk."""

    def __init__(self, *args):
        super().__init__(*args)
        backward, done = self.engine.backward, 0

        def faulty(loss):
            nonlocal done
            done += 1
            if done == AT + 1 and self.rank == RANK:
                futures.wait([self.states.pending])
                loss = struck(os.environ["FAULT"], loss)
            return backward(loss)

        self.engine.backward = faulty


if __name__ == "__main__":
    run_worker(__doc__, Faulty)
