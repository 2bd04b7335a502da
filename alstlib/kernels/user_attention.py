"""An attention function of the user's own, made into the pair of functions from which everything else is composed.

Shape legend: B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), D head width.

The contract is `fn(q, k, v, *, scale, causal) -> (out, lse)`: q and out [B, H, S, D], k and v [B, K, N, D], lse
[B, H, S] the natural logarithm of the sum of exp(scale * q k), in fp32 or wider; causal only with N = S. Strides are
arbitrary.

Documents, windows and pages need calls on a part of a query's keys, so gradients are asked for with the output and the
logsumexp over all of its keys. A function that has an attribute `backward(dout, q, k, v, out, lse, *, scale, causal) ->
(dq, dk, dv)` computes them as FlashAttention-2 does (section 3.1.2). Any other function runs once more in backward, and
autograd differentiates both of its results. With w = exp(lse_part - lse), a part's output has the gradient w dout, and
its logsumexp the gradient w dout (out_part - out).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from alstlib import reference
from alstlib.kernels.rule import Attended

TOLERANCE = 0.05
"""Largest relative error in the check of a function: more than rounding to 16 bits, less than any other formula."""


class UserAttention:
    """`forward` and `backward` as `backends.Backend` has them, from the user's function.

    The first call checks the function on a few random tokens of the same dtype and head width against the plain
    formulas, because a logsumexp to the base 2, or one without a gradient, would give wrong gradients silently.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.checked = fn, False
        self.name = getattr(fn, "__name__", type(fn).__name__)
        try:
            inspect.signature(fn).bind(*"qkv", scale=1.0, causal=True)
        except TypeError as error:
            raise ValueError(f"attention={self.name} must take (q, k, v, *, scale, causal): {error}") from None
        self.own_backward: Callable[..., Any] | None = getattr(fn, "backward", None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        if not self.checked and not isinstance(q, FakeTensor):
            self.check(q, q.shape[1] // k.shape[1])
            self.checked = True
        return self._run(q, k, v, scale, causal)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        made = self.fn(q, k, v, scale=scale, causal=causal)
        shapes, wide = [list(q.shape), list(q.shape[:3])], torch.promote_types(q.dtype, torch.float32)
        pair = list(made) if isinstance(made, (tuple, list)) else [made]
        if [list(t.shape) if isinstance(t, Tensor) else None for t in pair] != shapes:
            found = ", ".join(str(list(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in pair)
            raise ValueError(
                f"attention={self.name} returned {found}; output {shapes[0]} and logsumexp {shapes[1]} are needed"
            )
        if torch.promote_types(pair[1].dtype, wide) != pair[1].dtype:
            raise ValueError(f"attention={self.name} returned a logsumexp in {pair[1].dtype}; {wide} is needed")
        return pair[0], pair[1]

    def backward(self, dout: Tensor, kept: Attended, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        if self.own_backward is not None:
            return self.own_backward(dout, *kept, scale=scale, causal=causal)
        leaves = [t.detach().requires_grad_() for t in (kept.q, kept.k, kept.v)]
        with torch.enable_grad():
            out, lse = self._run(leaves[0], leaves[1], leaves[2], scale, causal)
        if not (out.requires_grad and lse.requires_grad):
            what = "logsumexp" if out.requires_grad else "output"
            raise ValueError(
                f"attention={self.name} returned a {what} that autograd cannot differentiate; give the function an "
                "attribute backward(dout, q, k, v, out, lse, *, scale, causal) -> (dq, dk, dv)"
            )
        share = (lse.detach() - kept.lse).exp()
        rest = ((out.detach() - kept.out).to(share.dtype) * dout).sum(-1)
        upstream = [(dout * share[..., None]).to(out.dtype), rest * share]
        dq, dk, dv = torch.autograd.grad([out, lse], leaves, upstream)
        return dq, dk, dv

    def check(self, q: Tensor, groups: int) -> None:
        """Raises ValueError where the function does not keep the contract, for tensors like q."""
        seed = torch.Generator().manual_seed(0)
        x, keys, values, dout = (
            torch.randn(1, heads, 13, q.shape[3], generator=seed, dtype=torch.float64).to(q.device, q.dtype)
            for heads in (groups, 1, 1, groups)
        )
        scale = q.shape[3] ** -0.5
        for causal in (True, False):
            out, lse = reference.attention(x, keys, values, scale=scale, causal=causal)
            for part in [slice(None)] if causal else [slice(0, 6), slice(6, 13)]:
                k, v = keys[:, :, part], values[:, :, part]
                want = reference.attention(x, k, v, scale=scale, causal=causal)
                self._compare(self._run(x, k, v, scale, causal), want, ("output", "logsumexp"))
                kept = Attended(x, k, v, out, lse)
                wanted = reference.attention_backward(dout, *kept, scale=scale, causal=causal)
                self._compare(self.backward(dout, kept, scale, causal), wanted, ("dq", "dk", "dv"))

    def _compare(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...], names: tuple[str, ...]) -> None:
        for name, one, right in zip(names, got, want):
            if not reference.relative_error(one, right) < TOLERANCE:
                raise ValueError(
                    f"attention={self.name} is not softmax attention by the contract: on random tokens its {name} "
                    "differs from the plain formulas (alstlib/kernels/user_attention.py has the contract)"
                )
