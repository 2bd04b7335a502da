"""An attention function of the user's own, made into the pair of functions from which everything else is composed.

Shape legend: B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), D head width.

The contract is `fn(q, k, v, *, scale, causal) -> (out, lse)`: q and out [B, H, S, D], k and v [B, K, N, D], lse
[B, H, S] the natural logarithm of the sum of exp(scale * q k), in fp32 or wider; causal only with N = S. Strides are
arbitrary.

Documents, windows and pages need calls on a part of a query's keys, so gradients are asked for with the output and the
logsumexp over all of its keys. A function that has an attribute `backward(dout, q, k, v, out, lse, *, scale, causal) ->
(dq, dk, dv)` computes them as FlashAttention-2 does (section 3.1.2). Any other function runs once more in backward, and
autograd differentiates both of its results (`differentiated`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from alstlib.base import reference
from alstlib.base.recompute import sum_dtype
from alstlib.kernels.rule import Attended

TOLERANCE = 0.05
"""Largest relative error in the check of a function: more than rounding to 16 bits, less than any other formula."""


def differentiated(attention: Callable[..., Any], dout: Tensor, kept: Attended, **how: Any) -> Sequence[Tensor]:
    """Gradients of a function with this contract, by autograd -> dq, dk, dv; with the output and logsumexp over more
    keys than `k` holds, these keys' share. With w = exp(lse_part - lse), a part's output has the gradient w dout, and
    its logsumexp the gradient w dout (out_part - out)."""
    leaves = [t.detach().requires_grad_() for t in kept[:3]]
    with torch.enable_grad():
        out, lse = made = attention(*leaves, **how)
    for t, what in ((out, "output"), (lse, "logsumexp")):
        if not t.requires_grad:
            raise ValueError(
                f"attention returned a {what} that autograd cannot differentiate; give the function an attribute "
                "backward(dout, q, k, v, out, lse, *, scale, causal) -> (dq, dk, dv)"
            )
    share = (lse.detach() - kept.lse).exp()
    rest = ((out.detach() - kept.out).to(share.dtype) * dout).sum(-1)
    return torch.autograd.grad(made, leaves, [(dout * share[..., None]).to(out.dtype), rest * share])


class UserAttention:
    """`forward` and `backward` as `backends.Backend` has them, from the user's function.

    The first call checks the function on a few random tokens of the same dtype and head width against the plain
    formulas, because a logsumexp to the base 2, or one without a gradient, would give wrong gradients silently.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.checked = fn, False
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.own_backward: Callable[..., Any] | None = getattr(fn, "backward", None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Sequence[Tensor]:
        if not self.checked and not isinstance(q, FakeTensor):
            self.check(q, q.shape[1] // k.shape[1])
            self.checked = True
        return self._run(q, k, v, **how)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Sequence[Tensor]:
        made, wide = self.fn(q, k, v, **how), sum_dtype(q)
        pair = made if isinstance(made, (tuple, list)) else [made]
        shapes = [getattr(t, "shape", None) for t in pair]
        if shapes != [q.shape, q.shape[:3]] or torch.promote_types(pair[1].dtype, wide) != pair[1].dtype:
            found = ", ".join(f"{list(getattr(t, 'shape', []))} {getattr(t, 'dtype', type(t).__name__)}" for t in pair)
            needed = f"output {list(q.shape)} and logsumexp {list(q.shape[:3])} in {wide} are needed"
            raise ValueError(f"attention={self.name} returned {found}; {needed}")
        return pair

    def backward(self, dout: Tensor, kept: Attended, **how: Any) -> Sequence[Tensor]:
        if self.own_backward is not None:
            return self.own_backward(dout, *kept, **how)
        return differentiated(self._run, dout, kept, **how)

    def check(self, q: Tensor, groups: int) -> None:
        """Raises ValueError where the function does not keep the contract, for tensors like q."""
        seed = torch.Generator().manual_seed(0)
        x, keys, values, dout = (
            torch.randn(1, heads, 13, q.shape[3], generator=seed, dtype=torch.float64).to(q.device, q.dtype)
            for heads in (groups, 1, 1, groups)
        )
        for causal, part in ((True, slice(13)), (False, slice(6)), (False, slice(6, 13))):
            how: Any = {"scale": q.shape[3] ** -0.5, "causal": causal}
            given = x, keys[:, :, part], values[:, :, part]
            kept = Attended(*given, *reference.attention(x, keys, values, **how))
            got = *self._run(*given, **how), *self.backward(dout, kept, **how)
            want = *reference.attention(*given, **how), *differentiated(reference.attention, dout, kept, **how)
            for name, one, right in zip(("output", "logsumexp", "dq", "dk", "dv"), got, want):
                if not reference.relative_error(one, right) < TOLERANCE:
                    raise ValueError(
                        f"attention={self.name} is not softmax attention by the contract: on random tokens its {name} "
                        "differs from the plain formulas (alstlib/kernels/user_attention.py has the contract)"
                    )
