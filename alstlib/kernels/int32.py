"""Kernels of other packages that count elements with 32 bits, and what keeps each call of theirs below 2^31.

Shape legend: B batch, S tokens of a call, C channels, H heads, K and V widths of keys and values.

A product that passes 2^31 wraps, and the kernel then reads and writes other elements: it ends with an illegal memory
access, or gives finite values that are wrong. So each call is measured before it runs. One that is short enough passes
as it is; a longer one is cut into calls that are, where its tokens can be cut, and refused otherwise. `KERNELS` was
made from the packages' sources. Attention kernels are cut in `kernels.attention`; of Liger only versions that count
with 64 bits are used (`hf.loading.models.liger_knows`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from alstlib.kernels.attention import ELEMENTS


def spanned(*values: Any, **more: Any) -> int:
    """Most elements that one of these tensors has, or spans in memory by its strides."""
    tensors = [t for t in (*values, *more.values()) if isinstance(t, Tensor)]
    return max(max(t.numel(), 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))) for t in tensors)


def _of_delta_rule(q: Tensor, k: Tensor, v: Tensor, *others: Any, **more: Any) -> int:
    """Keys are made for each value head."""
    return max(spanned(q, k, v, *others, **more), v.shape[:3].numel() * k.shape[3])


def _of_mamba2(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **more: Any) -> int:
    """A state is made for each chunk of the kernel, and a square of its tokens for each group."""
    batch, tokens, heads, width = x.shape
    chunks, square = batch * -(-tokens // chunk_size), chunk_size**2
    return max(spanned(x, dt, A, B, C, **more), chunks * heads * width * B.shape[3], chunks * B.shape[2] * square)


def _convolve(kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, *others: Any, **more: Any) -> Tensor:
    """x [B, C, S], in calls for some tokens of one sample, each with the tokens before them that its outputs need."""
    around, outs = weight.shape[-1] - 1, []
    step = max(1, (ELEMENTS - 1) // max(x.shape[1], x.stride(2)) - around)
    for sample in x.split(1):
        parts = []
        for first in range(0, x.shape[2], step):
            before = min(first, around)
            part = sample[..., first - before : first + step]
            if spanned(part) >= ELEMENTS:  # each channel's tokens lie together: those of the other parts lie between
                part = part.contiguous()
            parts.append(kernel(part, weight, *others, **more)[..., before:].transpose(1, 2))
        outs.append(torch.cat(parts, 1))
    return torch.cat(outs).transpose(1, 2)


@dataclass(frozen=True)
class Int32Kernel:
    """Functions of a package whose kernels count with 32 bits."""

    package: str
    """Its distribution."""
    names: tuple[str, ...]
    counts: str
    """The largest products that are counted so."""
    checked: str
    """Versions whose sources were read."""
    mended: str | None = None
    """The first of them that counts with 64 bits; None: none does."""
    tokens: int = 1
    """The axis of its first tensor that holds the tokens."""
    most: Callable[..., int] = spanned
    """The largest of the products, by the arguments of a call."""
    split: Callable[..., Any] | None = None
    """(kernel, its arguments) -> what the kernel gives, by calls that are small enough; None: refused."""


KERNELS = {
    "causal_conv1d": (
        Int32Kernel("causal-conv1d", ("causal_conv1d_fn",), "B S C by strides", "1.6.1", tokens=2, split=_convolve),
    ),
    "mamba_ssm": (
        Int32Kernel(
            "mamba-ssm", ("mamba_chunk_scan_combined",),
            "B S H V by strides; states B (S / chunk) H V K; squares B S groups chunk", "2.3.2.post1", most=_of_mamba2,
        ),
        Int32Kernel("mamba-ssm", ("selective_scan_fn",), "B S C by strides", "2.3.2.post1", "2.3.2", tokens=2),
    ),
    "fla": (
        Int32Kernel(
            "fla-core", ("chunk_gated_delta_rule", "chunk_kda"), "B S (value heads) max(K, V)", "0.4.2, 0.5.1, 0.6.0",
            "0.6.0", most=_of_delta_rule,
        ),
    ),
}  # fmt: skip
"""By the module that holds the functions."""


def below_int32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with calls that stay below `ELEMENTS`, where it is one of `KERNELS`, transformers' wrapper of one,
    or one of the hub in its place; any other function as it is.

    Raises:
        ValueError: in a call that would pass them and cannot be cut.
    """
    function, of_hub = _of_hub(function)
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    found = ((f, _known(f)) for f in (function, *filter(inspect.isroutine, held)))
    implementation, kernel = next(((f, k) for f, k in found if k), (function, of_hub))
    if kernel is None:
        return function
    name = implementation.__name__ if of_hub is None else f"a kernel of the hub for {' or '.join(kernel.names)}"

    @functools.wraps(implementation)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if (most := kernel.most(*args, **kwargs)) < ELEMENTS:
            return function(*args, **kwargs)
        if kernel.split is not None:
            return kernel.split(function, *args, **kwargs)
        tokens = args[0].shape[kernel.tokens]
        fits = tokens * (ELEMENTS - 1) // most
        newer = kernel.mended and of_hub is None
        mended = f", or install {kernel.package} {kernel.mended} or later" if newer else ""
        raise ValueError(
            f"{kernel.package}: {name} counts elements with 32 bits ({kernel.counts}), and a call "
            f"of {tokens:,} tokens has {most:,} of them (its first tensor: {[*args[0].shape]}): its result would be "
            f"wrong. A call of {fits - fits % 256 or fits:,} tokens passes: use a smaller options.chunk, or more ranks"
            f"{mended}"
        )

    return guarded


def _of_hub(function: Any) -> tuple[Callable[..., Any], Int32Kernel | None]:
    """Where the package `kernels` is installed, transformers' functions are modules: what such a module runs now, and
    the kernel's entry where its `kernelize` has put in one of the hub. That has a version of its own, so any counts."""
    name = getattr(function, "kernel_layer_name", None)
    if name is None:
        return function, None
    if "forward" in vars(function):
        return function.forward, next((k for some in KERNELS.values() for k in some if name in k.names), None)
    (own,) = (cell.cell_contents for cell in function.forward.__closure__)
    return own, None


def _known(function: Any) -> Int32Kernel | None:
    """The kernel's entry, where its package's version counts with 32 bits."""
    module = str(getattr(function, "__module__", None)).partition(".")[0]
    name = getattr(function, "__name__", "")
    kernel = next((k for k in KERNELS.get(module, ()) if name in k.names), None)
    if kernel is None or kernel.mended is None:
        return kernel
    try:
        installed = importlib.metadata.version(kernel.package)
    except importlib.metadata.PackageNotFoundError:  # a copy without its metadata: of any version
        return kernel
    return None if Version(installed) >= Version(kernel.mended) else kernel
