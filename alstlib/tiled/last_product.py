"""What a tile need not compute when it runs for its gradients alone: the product that makes an MLP's output."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from alstlib.base.recompute import Replay

_FORWARD = nn.Linear.forward
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def untouched(module: nn.Module) -> bool:
    """Whether a call of this module runs its class's forward and nothing else: it has no hooks of its own, and nobody
    has put another forward into it."""
    return "forward" not in vars(module) and not any(vars(module)[hooks] for hooks in _HOOKS)


class LastProduct:
    """Runs a token-wise module, and leaves its last product out where it runs again for gradients.

    The output of most MLPs is that of one `nn.Linear`. Backward makes a tile's intermediates again for the products
    that read them, and nothing reads the output: that is one of the 12 products of a gated MLP's step. Forward and
    backward of such an MLP (512 x 1,536, 2,048 tokens, one core) take 0.93 of the processor time.

    First passes show which one it is, and whether the module does anything with it but return it. Once it did, such as
    to clamp what is too large, the product is always computed. So it is where others watch or have changed what a
    product makes, where an adapter stands beside it, and under autocast.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: dict[bool, nn.Module | None] = {}
        """The product that made the module's output, by the module's mode: dropout comes after it in training only.
        None once something read what it made."""

    @torch.compiler.disable
    def first(self, x: Tensor) -> Any:
        """The module's output, after a look at what makes it."""
        last, mode = self._last(), self.module.training
        if last is None or self.seen.get(mode, last) is None:
            return self.module(x)
        made = _Made()
        hook = last.register_forward_hook(lambda m, args, out: made.note(out))
        try:
            with made:
                out = self.module(x)
        finally:
            hook.remove()
        self.seen[mode] = last if made.alone(out) else None
        return out

    @torch.compiler.disable
    def again(self, x: Tensor) -> Any:
        """The module's output for a backward: it has the output's graph and shape, and its values are zeros."""
        module, last = self.module, self._last()
        if last is None or self.seen.get(module.training) is not last or torch.is_autocast_enabled(x.device.type):
            return module(x)
        made, replay = _Made(), Replay(x.device)

        def unread(input: Tensor) -> Tensor:
            return made.note(_ProductOf.apply(input, last.weight, last.bias))

        vars(last)["forward"] = unread
        try:
            out = module(x)
        finally:
            del vars(last)["forward"]
        if made.alone(out):
            return out
        with replay():  # something has changed since the module was seen, and may draw what it drew
            return module(x)

    def _last(self) -> nn.Linear | None:
        """The last product of the module, unless others watch, compile or have changed what makes it."""
        inside = [*self.module.modules()]
        last = next((m for m in reversed(inside) if type(m) is nn.Linear), None)
        plain = all(untouched(m) and m._compiled_call_impl is None for m in inside)
        if last is None or not plain or type(last.weight) is not nn.Parameter:
            return None
        return None if _global_forward_hooks or nn.Linear.forward is not _FORWARD else last


class Watch(TorchFunctionMode):
    """Entered, it looks at what functions of PyTorch are given."""

    def given(self, values: Any) -> None:
        """A function is given these arguments."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.given((args, kwargs))
        return func(*args, **(kwargs or {}))


class _Made(Watch):
    """Recognises what a product made, without keeping it; entered, it sees whether a function is given that."""

    def __init__(self) -> None:
        super().__init__()
        self.of: list[tuple[Any, int]] = []
        self.read = False

    def note(self, out: Tensor) -> Tensor:
        self.of.append((weakref.ref(out), 0 if out.is_inference() else out._version))
        self.read = self.read or torch.is_autocast_enabled(out.device.type)
        return out

    def given(self, values: Any) -> None:
        if self.of and not self.read:
            made = [of() for of, _ in self.of]
            self.read = any(t is one for t in tree_leaves(values) if t is not None for one in made)

    def alone(self, out: Any) -> bool:
        """Whether this is the one thing that was made, as it was made, and nothing read it."""
        if self.read or len(self.of) != 1 or out is not self.of[0][0]():
            return False
        return not out.is_inference() and out._version == self.of[0][1]


class _ProductOf(torch.autograd.Function):
    """x W^T + b, whose gradients are right and whose values nobody reads: their memory is taken, so that a step takes
    what it would take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (need_x, need_weight, need_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            (rows @ weight).view_as(x) if need_x else None,
            rows.T @ x.flatten(0, -2) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )
