"""One pass over a loader that another process can continue: it records the position, PyTorch's random numbers and what
was read.

A loader with a state of its own (`state_dict`, `load_state_dict`) is asked for it. Any other draws its order again from
the random generators that it began with, and is advanced; a checksum of the batches says whether they are the same.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from alstlib.base.options import Json, Record
from alstlib.data.shard import checksum


class Reader:
    """One pass over a loader, from its batch `start` on; remembers where it was before it last read.

    Args:
        resume: `state` of an earlier pass, before batch `start`.
    """

    def __init__(self, loader: Any, resume: Record | None, start: int) -> None:
        self.loader, self.resume, self.start = loader, resume, start
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.iterator: Iterator[Any] | None = None
        self.generators = [] if self.stateful else generators(loader)
        self.random = list(resume["random"]) if resume else [g.get_state().tolist() for g in self.generators]
        self.read_sum = resume["read"] if resume else 0
        self.before: Json = {}
        """The state before the last batches were read."""

    def state(self) -> Json:
        """What continues this pass here: JSON values."""
        own = copy.deepcopy(self.loader.state_dict()) if self.stateful else None
        return {"random": self.random, "read": self.read_sum, "loader": own}

    def read(self, count: int) -> Iterator[Any]:
        """Up to `count` more batches."""
        begins = self.iterator is None and self.resume is not None
        training = torch.get_rng_state()
        try:
            if self.iterator is None:
                self.iterator = self._begin()
            self.before = self.state()
            for batch in itertools.islice(self.iterator, count):
                yield batch
                self._add(batch)
        finally:  # drawing an order again leaves the training's random numbers alone
            if begins:
                torch.set_rng_state(training)

    def _add(self, batch: Any) -> None:
        if not self.stateful:
            self.read_sum = checksum([torch.as_tensor(batch["input_ids"])], self.read_sum + 1)

    def _begin(self) -> Iterator[Any]:
        if self.resume is None:
            return iter(self.loader)
        if self.stateful:
            self.loader.load_state_dict(copy.deepcopy(self.resume["loader"]))
            return iter(self.loader)
        for generator, state in zip(self.generators, self.random):
            generator.set_state(torch.tensor(state, dtype=torch.uint8))
        iterator, self.read_sum = iter(self.loader), 0
        for batch in itertools.islice(iterator, self.start):
            self._add(batch)
        if self.read_sum != self.resume["read"]:
            raise ValueError(
                f"the loader's first {self.start} batches are not those that were read before the state was saved: "
                "the data changed, or their order comes from other random numbers than PyTorch's. Give the sampler a "
                "torch.Generator, use DistributedSampler, or a loader with state_dict and load_state_dict"
            )
        return iterator


def generators(loader: Any) -> list[torch.Generator]:
    """PyTorch's random generators from which a loader's order may come, each once, in the same order in every process:
    the process's own, and those that the loader, its samplers and its dataset have as attributes."""
    found = [torch.default_generator]
    seen = set(map(id, found))

    def visit(owner: Any) -> None:
        for value in getattr(owner, "__dict__", {}).values():
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Generator):
                found.append(value)
            elif hasattr(value, "__iter__") or hasattr(value, "__getitem__"):
                visit(value)

    visit(loader)
    return found
