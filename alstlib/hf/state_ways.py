"""Which way the layers with a state of an attached model take over ranks (`Options.states`), and what is said of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from alstlib.hf.handle import Handle
from alstlib.linear.by_heads import by_heads
from alstlib.linear.pass_state import GatedDeltaRule, Recurrence, over_ranks
from alstlib.planner.gpus import Rates, rates_named, rates_of
from alstlib.planner.state_ways import PER_NODE, Cost, Sent, StateLayer, cheapest, passes_of, state_costs
from alstlib.ulysses.alltoall import emulated

log = logging.getLogger(__name__)


class StateWays:
    """Chooses, from shapes alone, so that all ranks, chunks and passes of a call choose alike.

    Collective where `auto` has something to choose.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.option, self.ranks = handle.options.linear_attention, handle.ctx.sp
        self.rates, self.nodes = rates_of("H100"), False
        if self.option == "auto" and self.ranks > 1:
            self.rates, self.nodes = _slowest(handle)

    def of(
        self, family: str, rule: Recurrence, tokens: Sequence[Tensor], keys: Tensor, values: Tensor, block: int
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """`over_ranks` or `by_heads`, for a mixer of this family.

        Args:
            tokens: inputs of its recurrence, [B, L, heads or groups, ..].
            keys, values: those of them whose widths the state has, and whose heads the layer has.
            block: tokens that its kernel works on at a time.
        """
        if self.ranks == 1 or self.option == "pass":
            return over_ranks
        heads = values.shape[2]
        if self.ranks > heads:
            if self.option == "heads":
                self._say(
                    f"{family}: linear_attention='heads' needs a head for each of {self.ranks} ranks, and it has "
                    f"{heads}: states are passed", logging.WARNING,
                )  # fmt: skip
            return over_ranks
        if self.option == "heads":
            return by_heads
        costs = self._costs(rule, tokens, keys, values, block)
        way = cheapest(costs)
        other = "pass" if way == "heads" else "heads"
        took, instead = (1e3 * costs[name].seconds for name in (way, other))
        self._say(
            f"{family}: linear_attention='{way}' takes {took:.3g} ms of a layer and step, by the planner's rates; "
            f"'{other}' takes {instead:.3g} ms", logging.INFO,
        )  # fmt: skip
        return by_heads if way == "heads" else over_ranks

    def _costs(
        self, rule: Recurrence, tokens: Sequence[Tensor], keys: Tensor, values: Tensor, block: int
    ) -> dict[str, Cost]:
        def sent(x: Tensor) -> Sent:
            return Sent(x.shape[2], x.shape[3] if x.ndim == 4 else 1, x.element_size())

        layer = StateLayer(
            keys=keys.shape[3], values=values.shape[3], inputs=tuple(sent(t) for t in tokens), output=sent(values),
            matrix=isinstance(rule, GatedDeltaRule), block=block,
        )  # fmt: skip
        self.handle.recurrences[layer] = None
        options, call, rows = self.handle.options, self.handle.call, tokens[0].shape[1]
        chunks, blocks = (call.piece, call.blocks) if call is not None else (None, None)
        if chunks is not None:  # the rows of a whole chunk: the last one chooses alike
            rows = min(self.handle.chunk or rows, chunks.pages.length // self.ranks)
        elif blocks is not None:
            rows = min(blocks.block, blocks.length)
        forwards, pairs = passes_of(options.checkpoint, chunks=chunks is not None, blocks=blocks is not None)
        return state_costs(
            layer, rows, self.ranks, batch=tokens[0].shape[0], forwards=forwards, pairs=pairs, rates=self.rates,
            nodes=self.nodes,
        )  # fmt: skip

    def _say(self, note: str, level: int) -> None:
        """Note it, once for each family and way."""
        if note.partition(" takes ")[0] not in {known.partition(" takes ")[0] for known in self.handle.notes}:
            self.handle.notes.append(note)
            log.log(level, note)


def _slowest(handle: Handle) -> tuple[Rates, bool]:
    """Rates of the slowest rank's GPU, those of an H100 where none is known, and whether a group spans nodes."""
    # the table of rates knows NVIDIA's GPUs by their names
    known = rates_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    rates, ctx = known or rates_of("H100"), handle.ctx
    local = 0 if emulated(ctx.sp_group) else int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    mine = [ctx.sp > (local or PER_NODE), -int(rates.link), -int(rates.network), -int(rates.matmul)]
    with unset_fake_temporarily():
        nodes, link, network, matmul = ctx.largest(mine)
    return replace(rates, link=-link, network=-network, matmul=-matmul), bool(nodes)
