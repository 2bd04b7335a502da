"""One pass over a loader that another process can continue: it records the position, the random generators and what was
read.

A loader with a state of its own (`state_dict`, `load_state_dict`) is asked for it. Any other draws its order again from
the random generators that it began with, and is advanced; a checksum of the batches says whether they are the same.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from alstlib.data.shard import Batch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MANY = 64  # elements of a list of samplers that are looked at


class Reader:
    """One pass over the inner loader, from round `start` on; remembers where each round began, for resuming.

    Args:
        resume: `state` of an earlier pass, at round `start`.
    """

    def __init__(
        self, loader: Any, prepare: Callable[[Any], Batch], resume: Mapping[str, Any] | None, start: int
    ) -> None:
        self.loader, self.prepare, self.resume, self.rounds = loader, prepare, resume, start
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.begun: dict[int, dict[str, Any]] = {}
        self.iterator: Iterator[Any] | None = None
        self.generators = [] if self.stateful else generators(loader)
        self.random = list(resume["random"]) if resume else [frozen(g) for g in self.generators]
        self.read_sum = resume["read"] if resume else 0

    def state(self, round_: int) -> dict[str, Any]:
        """What continues this pass at the start of a round that is not older than the present step: JSON values."""
        return {"random": self.random, **self.begun.get(round_, self._now())}

    def _now(self) -> dict[str, Any]:
        own = copy.deepcopy(self.loader.state_dict()) if self.stateful else None
        return {"read": self.read_sum, "loader": own}

    def read(self, count: int) -> tuple[list[Batch], Exception | None]:
        """Up to `count` more batches; fewer at the end of the data or before an error, which is returned."""
        got: list[Batch] = []
        trainers: list[Any] = []
        try:
            if self.iterator is None:
                if self.resume:  # drawing an order again leaves the training's random numbers alone
                    trainers = [frozen(g) for g in process_wide()]
                self.iterator = self._begin()
            while len(got) < count:
                self.begun[self.rounds] = self._now()
                try:
                    batch = next(self.iterator)
                except StopIteration:
                    break
                got.append(self.prepare(batch))
                self.rounds += 1
                if not self.stateful:
                    self.read_sum = checksum(batch, self.read_sum)
        except Exception as error:  # whatever a dataset raises has to reach the other ranks, or they hang
            return got, error
        finally:
            for generator, state in zip(process_wide(), trainers):
                thaw(generator, state)
        return got, None

    def _begin(self) -> Iterator[Any]:
        if self.resume is None:
            return iter(self.loader)
        if self.stateful:
            self.loader.load_state_dict(copy.deepcopy(self.resume["loader"]))
            return iter(self.loader)
        if len(self.random) != len(self.generators):
            raise ValueError(
                f"the loader holds {len(self.generators)} random generators, the one that was saved held "
                f"{len(self.random)}: make it as it was made then"
            )
        for generator, state in zip(self.generators, self.random):
            thaw(generator, state)
        iterator, seen = iter(self.loader), 0
        for _ in range(self.rounds):
            seen = checksum(next(iterator, None), seen)
        if seen != self.read_sum:
            raise ValueError(
                f"the loader's first {self.rounds} batches are not those that were read before the state was saved: "
                "the data changed, or their order comes from random numbers that neither the loader nor a sampler of "
                "it holds. Give the sampler a generator (torch's, numpy's or random.Random), use DistributedSampler, "
                "or a loader with state_dict and load_state_dict"
            )
        return iterator

    def left(self) -> int:
        """Batches not read yet; -1 when the loader does not know its length."""
        try:
            return max(len(self.loader) - self.rounds, 0)
        except (TypeError, NotImplementedError):
            return -1


def checksum(batch: Any, before: int) -> int:
    """A checksum of a batch's tokens and of `before`; a pass that has ended gives None."""
    ids = torch.as_tensor([] if batch is None else batch["input_ids"])
    return zlib.crc32(ids.cpu().numpy().tobytes(), before + 1)


def process_wide() -> list[Any]:
    """The random generators of this process, from which a sampler without one of its own draws."""
    return [torch.default_generator, np.random, random]


def generators(loader: Any) -> list[Any]:
    """The random generators from which a loader's order may come, each once, in the same order in every process: those
    of the process, and those that the loader, its samplers and what these hold have as attributes."""
    found = process_wide()
    seen = {id(loader), *map(id, found)}
    dataset = getattr(loader, "dataset", None)

    def visit(owner: Any, deeper: bool = True) -> None:
        for value in _held_by(owner):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                found.append(value)
            elif deeper and value is not dataset and hasattr(value, "__iter__"):
                visit(value)

    visit(loader)
    visit(dataset, deeper=False)
    return found


def _held_by(owner: Any) -> list[Any]:
    if type(owner) in (list, tuple, dict):
        return list(owner.values() if isinstance(owner, dict) else owner) if len(owner) <= _MANY else []
    return list(getattr(owner, "__dict__", {}).values())


def frozen(generator: Any) -> Any:
    """A random generator's state as JSON values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.getstate())


def thaw(generator: Any, state: Any) -> None:
    """Set a random generator to a state that `frozen` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
