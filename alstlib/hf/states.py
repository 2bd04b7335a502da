"""The layers with a state of an attached model: they get the forward of their adapter (`linear.adapters`), and each
part of them what it needs of the call that runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from alstlib.hf.handle import Handle
from alstlib.linear.adapter import Adapter
from alstlib.linear.adapters import adapter_of
from alstlib.linear.by_heads import by_heads
from alstlib.linear.pass_state import pass_state
from alstlib.linear.rule import StateRule
from alstlib.linear.ways import BLOCK, Sent, StateLayer, way_of
from alstlib.ulysses.alltoall import Exchange

log = logging.getLogger(__name__)


def attach_states(handle: Handle) -> None:
    """Give each known mixer of the decoder layers a forward that works over ranks and restarts at documents."""
    for layer in handle.facts.layers:
        for mixer in layer.modules():
            if adapter := adapter_of(mixer):
                _attach(handle, mixer, adapter)


def _attach(handle: Handle, mixer: nn.Module, adapter: type[Adapter]) -> None:
    original = mixer.forward
    over = adapter.forward(mixer, lambda name: _Part(handle, (mixer, name), adapter.family))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (original if handle.plain else over)(*args, **kwargs)

    handle.set_forward(mixer, forward)


@dataclass(frozen=True)
class _Part:
    """One function of one mixer (`linear.adapter.Part`): what it hands on goes from rank to rank, and from chunk to
    chunk."""

    handle: Handle
    key: tuple[nn.Module, str]
    family: str

    @property
    def exchange(self) -> Exchange:
        return self.handle.attention.exchange

    @property
    def hands_on(self) -> bool:
        call = self.handle.call
        return self.exchange.ranks > 1 or (call is not None and (call.piece or call.blocks) is not None)

    def mix(
        self, rule: StateRule, tokens: Sequence[Tensor], weights: Sequence[Tensor], keys: Tensor, values: Tensor,
        block: int = BLOCK,
    ) -> Tensor:  # fmt: skip
        def sent(x: Tensor) -> Sent:
            return Sent(x.shape[2], x.shape[3] if x.ndim == 4 else 1, x.element_size())

        layer = StateLayer(
            keys=keys.shape[3], values=values.shape[3], inputs=[sent(t) for t in tokens], output=sent(values),
            matrix=rule.matrix, block=block,
        )  # fmt: skip
        self.handle.recurrences[layer] = None
        way = by_heads if self._way(layer.heads) == "heads" else pass_state
        return self.run((*tokens, *weights), functools.partial(way, rule, tokens, weights, self.exchange))

    def _way(self, heads: int) -> str:
        """The way over ranks of a layer with so many heads, noted once where the option does not say it."""
        option, ranks, notes = self.handle.options.linear_attention, self.exchange.ranks, self.handle.notes
        way = way_of(option, heads, ranks)
        does = "tokens are exchanged for heads" if way == "heads" else "states are passed"
        note = f"{self.family}: {heads} heads for {ranks} ranks: {does} (linear_attention={option!r})"
        if ranks > 1 and way != option and note not in notes:
            notes.append(note)
            log.log(logging.INFO if option == "auto" else logging.WARNING, note)
        return way

    def run(self, inputs: Sequence[Tensor], over: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        call = self.handle.call
        if call is None:
            raise ValueError(
                "call the model that apply() was given, not a part of it: only the model gets documents and labels"
            )

        left: dict[str, Any] = {} if call.saved is None else call.saved.left_by(self.key)
        known = left.setdefault("known", {})

        def step(start: Tensor | None, first: int, length: int | None) -> tuple[Tensor, Tensor]:
            return over(call.documents, start=start, first=first, length=length, known=known)

        chunks = call.piece or call.blocks
        if chunks is None:
            return step(None, 0, None)[0]
        if "call" not in left:  # a recompute inside a block is that of the first pass
            chunks.calls[self.key] += 1
            left["call"] = chunks.calls[self.key]
        return chunks.carry((*self.key, left["call"]), step, inputs)
