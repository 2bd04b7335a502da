"""What an adapter is: it knows the modules of one kind of layer with a state (mixers), and runs them over ranks.

A mixer's own forward runs, with other functions in the place of those by which it mixes tokens: a copy of the function
whose globals differ in these names, which are the same in all of transformers' hybrids. So projections, gates and norms
are transformers' own, in every version, and so is each kernel on one device: `causal-conv1d`, `flash-linear-attention`
or PyTorch, as transformers chooses. Kernels that keep packed documents apart (they name `cu_seqlens` or `seq_idx`) get
them in one call. A mixer is known where each function of its own file that its forward calls is; any other is refused
by its name (`hf.support`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from alstlib.kernels.int32 import below_int32
from alstlib.linear.by_heads import by_heads
from alstlib.linear.convolution import causal_convolution
from alstlib.linear.pass_state import pass_state
from alstlib.linear.rule import StateRule
from alstlib.linear.ways import CHUNK_SIZE, Sent, StateLayer

log = logging.getLogger(__name__)

CONVOLUTION = "causal_conv1d_fn"
"""The function of the short convolution before a recurrence."""
FUSED = {"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"}
"""Convolution, scan, norm and projection in one kernel: it takes no state, and transformers goes on without it."""
HARMLESS = FUSED | {
    "apply_mask_to_padding_states", "causal_conv1d_update", "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention", "mamba_selective_state_update", "mamba2_selective_state_update",
}  # fmt: skip
"""Functions that work on each token by itself, or only where a cache is given."""


@dataclass(frozen=True)
class LayerPart:
    """The convolution or the recurrence of one mixer: what it hands on goes from rank to rank, and from chunk to
    chunk."""

    handle: Any
    """The handle of the attached model (`hf.handle.Handle`)."""
    key: tuple[nn.Module, str]
    family: str

    @property
    def hands_on(self) -> bool:
        """Whether the state goes to another rank or chunk."""
        return self.handle.attention.exchange.ranks > 1 or self.handle.running.part is not None

    def mix(
        self, rule: StateRule, tokens: Sequence[Tensor], weights: Sequence[Tensor], keys: Tensor, values: Tensor,
        chunk_size: int = CHUNK_SIZE,
    ) -> Tensor:  # fmt: skip
        """The output of a recurrence with heads, by one of the `ways`. Its kernel works on `chunk_size` tokens at once.

        Args:
            tokens: its inputs, [B, L, heads or groups, ..].
            keys, values: those of them whose widths the state has, and whose heads the layer has.
        """
        *inputs, output = (Sent(t.shape[2], t.shape[3:].numel(), t.element_size()) for t in (*tokens, values))
        layer = StateLayer(
            keys=keys.shape[3], values=values.shape[3], inputs=tuple(inputs), output=output, matrix=rule.matrix,
            chunk_size=chunk_size,
        )  # fmt: skip
        handle, ranks = self.handle, self.handle.attention.exchange.ranks
        handle.recurrences[layer] = None
        option = handle.options.linear_attention
        way = layer.way(option, ranks)
        does = "tokens are exchanged for heads" if way == "heads" else "states are passed"
        note = f"{self.family}: {layer.heads} heads for {ranks} ranks: {does} (linear_attention={option!r})"
        if ranks > 1 and way != option and note not in handle.notes:
            handle.notes.append(note)
            log.log(logging.INFO if option == "auto" else logging.WARNING, note)
        over = by_heads if way == "heads" else pass_state
        return self.run((*tokens, *weights), functools.partial(over, rule, tokens, weights))

    def run(self, inputs: Sequence[Tensor], over: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """The output of `over` (exchange, documents, start=, first=, length=, known=) for the tokens that run now."""
        running = self.handle.running
        left: dict[str, Any] = {} if running.saved is None else running.saved.left_by(self.key)
        known = left.setdefault("known", {})
        step = functools.partial(over, self.handle.attention.exchange, running.inputs.documents, known=known)
        if running.part is None:
            return step()[0]
        if "call" not in left:  # a recompute inside a block is that of the first pass
            running.part.calls[self.key] += 1
            left["call"] = running.part.calls[self.key]
        return running.part.carry((*self.key, left["call"]), step, inputs)


class Adapter:
    """The mixers of one family whose forward calls these functions of transformers."""

    family = ""
    """What notes call it."""
    recurrence = ""
    """Its recurrence; none for a convolution alone."""
    heads = True
    """Whether its recurrence has heads, which are noted in `Handle.recurrences`."""

    @classmethod
    def knows(cls, mixer: nn.Module, calls: set[str]) -> bool:
        """Whether it is a mixer of this family, by the functions that its forward calls (`HARMLESS` left out)."""
        return calls == {CONVOLUTION, cls.recurrence} - {""}

    @classmethod
    def forward(cls, mixer: nn.Module, part: Callable[[str], LayerPart]) -> Callable[..., Any]:
        """The mixer's forward over ranks; `part` gives its part by the name of a function."""
        own = plain_forward(mixer)
        ours: dict[str, Any] = {CONVOLUTION: _convolution, cls.recurrence: cls.mix, **dict.fromkeys(FUSED, _none)}
        names = {
            name: functools.partial(function, part(name), below_int32(own.__globals__[name]))
            for name, function in ours.items()
            if name in own.__globals__
        }
        over = types.FunctionType(
            own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
        )
        over.__kwdefaults__ = own.__kwdefaults__
        return functools.partial(over, mixer)

    @staticmethod
    def mix(part: LayerPart, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `theirs`, the function named `recurrence`, gives for these arguments, over ranks."""
        raise NotImplementedError


def _none(*_: Any, **__: Any) -> None:
    """In the place of the functions in `FUSED`."""


def _convolution(
    part: LayerPart, theirs: Callable[..., Tensor], hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    weights = in_order([t for t in (weight, bias) if t is not None])

    def convolve(x: Tensor) -> Tensor:
        return theirs(x, *weights, activation=activation)

    over = functools.partial(causal_convolution, convolve, hidden_states, weight.shape[-1])
    return part.run((hidden_states, *weights), over)


def in_order(weights: Sequence[Tensor]) -> list[Tensor]:
    """Views of weights, from which gradients reach the weights in one order, by whichever way the layer runs.

    Replicas may take different ways: one with a single block hands no state on. ZeRO-2 puts gradients into its buckets
    as they arrive and reduces what lies at the same place on all ranks: where two orders differ, it would add up
    gradients of different weights. Autograd runs the views' nodes, made here one after the other, in that order.
    """
    return [w.view_as(w) for w in weights]


def plain_forward(module: nn.Module) -> Any:
    """The function that the module's class computes with, without what wraps it."""
    return inspect.unwrap(type(module).forward)


def called_by(forward: Any) -> set[str]:
    """Names of the functions of its own file that a function calls."""
    known = getattr(forward, "__globals__", {})
    names = {n for code in _codes(getattr(forward, "__code__", None)) for n in code.co_names}
    return {n for n in names if callable(known.get(n)) and not isinstance(known[n], type | types.ModuleType)}


def _codes(code: Any) -> Iterator[types.CodeType]:
    if isinstance(code, types.CodeType):
        yield code
        for inner in code.co_consts:
            yield from _codes(inner)


@functools.cache
def takes(function: Any, name: str) -> bool:
    """Whether what runs for this function names this parameter. transformers wraps a package's kernel, or else its own
    function, in one that takes everything and drops what the other does not name."""
    wrapped = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(name in inspect.signature(f).parameters for f in (function, *wrapped) if inspect.isroutine(f))
