"""A dry run shows what a model does around its kernels, without its weights: which layers call attention, with what.

It takes milliseconds for each layer and no memory, also where an engine has sharded the model. The model's own forward
runs once on a few tokens. Weights outside the layers are zeros of one element, expanded; layers run on the meta device,
where tensors have shapes and no values; attention gives back an empty output, and the head numbers that show what the
model does to its logits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from alstlib.hf.by_position import attention_chunk
from alstlib.hf.indexed import AnyMask, has_indexer, is_indexer
from alstlib.tiled.logits import LogitTransform

ROWS = 11
"""Tokens of a dry run: few, and the size of nothing else."""


@dataclass(frozen=True)
class Keys:
    """What one layer's attention keeps of a token."""

    heads: int
    kv_heads: int
    """Key/value heads, of so many query heads."""
    width: int
    """Width of a query and of a key."""
    value_width: int
    window: int | None = None
    """Number of keys that a query sees; None: all."""

    @property
    def widths(self) -> int:
        """The width of a key and a value together."""
        return self.width + self.value_width


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: what a layer hands to it."""

    module: nn.Module
    keys: Keys
    mask: Any
    dropout: float
    kwargs: dict[str, Any]
    """What it hands over besides; and the window that its model's mask has, where it does not say one (PhiMoE)."""


@dataclass
class LayerCall:
    """One call of a decoder layer."""

    layer: nn.Module
    hidden: Tensor
    others: tuple[Any, ...]
    """Its further arguments, by order and by name."""
    attention: list[AttentionCall] = field(default_factory=list)
    more: bool = False
    """Whether it returns more than its output."""
    finished: bool = False
    """False where the layer does something that needs values, and its end is not known."""


def dry_run(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[list[LayerCall], LogitTransform | None]:
    """The calls of decoder layers that the model's forward makes, in order, and what it does to its logits (None where
    that is not known). The model is left as it was.

    Raises:
        Exception: what code of the model raises before its head, which needs the values of weights.
    """
    config, made = model.config.get_text_config(), None
    calls: list[LayerCall] = []
    token = int(getattr(config, "pad_token_id", None) == 0)  # any but padding, of which some models warn
    inputs: dict[str, Any] = {"input_ids": torch.full((1, ROWS), token), "position_ids": torch.arange(ROWS)[None]}
    inputs["use_cache"] = False
    if getattr(config, "output_router_logits", False):  # there are none
        inputs["output_router_logits"] = False
    with (
        unset_fake_temporarily(), _without_triton(), torch.enable_grad(), torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False), _masks_made(model) as masks, _standing_in(model, layers, calls) as logits,
    ):  # fmt: skip
        try:
            made = torch.func.functional_call(model, _weights(model, layers), (), inputs, tie_weights=False).logits
        except Exception:
            if not logits:
                raise
    if {name for name, made_by in masks if made_by.called} == {MASK_WITH_WINDOW}:
        window = config.sliding_window
        for call in calls:
            call.attention = [
                replace(a, keys=replace(a.keys, window=window), kwargs={**a.kwargs, "sliding_window": window})
                if "sliding_window" not in a.kwargs else a
                for a in call.attention
            ]  # fmt: skip
    outermost = model.get_output_embeddings() in model._modules.values()
    return calls, _transform(config, logits[0], made) if outermost and logits else None


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """Launches of Triton's kernels (Liger's, a model's own) do nothing: a tensor without memory is a null pointer to
    them, and to write there ends the process's use of its GPU. What they would write has its shape already."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    with mock.patch.object(KernelInterface, "__getitem__", return_value=lambda *args, **kwargs: None):
        yield


@contextlib.contextmanager
def _standing_in(model: Any, layers: Sequence[nn.Module], calls: list[LayerCall]) -> Iterator[list[Tensor]]:
    """Inside, calls of modules leave out hooks, which are the user's, count calls, or read values; calls of the layers
    are noted and run on the meta device, and so is attention. Gives the logits that the head returns when it is
    called."""
    name, head, inside = f"alst_{uuid.uuid4().hex}", model.get_output_embeddings(), False
    logits: list[Tensor] = []
    modules = [*model.modules()]

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, dropout: float = 0.0,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if calls:
            window = kwargs.get("sliding_window") or attention_chunk(module)
            keys = Keys(q.shape[1], k.shape[1], q.shape[3], v.shape[3], window)
            calls[-1].attention.append(AttentionCall(module, keys, attention_mask, dropout, kwargs))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    def call_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        x, *others = [*args, *kwargs.values()] if args else [kwargs.pop("hidden_states"), *kwargs.values()]
        calls.append(call := LayerCall(layer, x, tuple(others)))
        # a mapping in which layers leave something for each other stays
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), ((x, *args[1:]), kwargs))
        inside = True
        try:
            out = layer.forward(*args, **kwargs)
        except Exception:  # whatever code of the model it was
            return x
        finally:
            inside = False
        call.finished, call.more = True, isinstance(out, tuple) and any(o is not None for o in out[1:])
        return tree_map_only(Tensor, functools.partial(torch.zeros_like, device="cpu"), out)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is head:
            vocabulary = model.config.get_text_config().vocab_size
            logits.append(torch.linspace(-50, 50, ROWS * vocabulary).view(1, ROWS, vocabulary))
            return logits[0].clone()
        if is_indexer(module):  # what it selects are values, which are not there
            return args[0].new_empty(*args[0].shape[:2], module.index_topk, dtype=torch.int32)
        if has_indexer(module):
            kwargs["attention_mask"] = AnyMask()
        if type(module).__name__.endswith("Experts"):  # nor is where a router sends a token
            return args[0].new_empty(args[0].shape)
        whole = module in layers and not inside  # a layer may be a part of another, which is checkpointed as a whole
        return call_layer(module, *args, **kwargs) if whole else module.forward(*args, **kwargs)

    AttentionInterface.register(name, attend)
    with contextlib.ExitStack() as restored:
        restored.callback(AttentionInterface._global_mapping.pop, name, None)
        for m in modules:
            restored.callback(setattr, m, "training", m.training)
        for config in {id(c): c for m in modules for c in vars(m).values() if isinstance(c, PreTrainedConfig)}.values():
            restored.enter_context(mock.patch.object(config, "_attn_implementation_internal", name))
        model.train()
        restored.enter_context(mock.patch.object(nn.Module, "__call__", call))
        yield logits


MASK_WITH_WINDOW = "create_sliding_window_causal_mask"
"""The function of transformers by which a model makes a mask with a window."""


@contextlib.contextmanager
def _masks_made(model: nn.Module) -> Iterator[list[tuple[str, mock.Mock]]]:
    """Inside, calls of transformers' functions by which the model makes its masks are counted: names and counters."""
    with contextlib.ExitStack() as patched:
        yield [
            (name, patched.enter_context(mock.patch.object(file, name, wraps=vars(file)[name])))
            for file in {sys.modules[kind.__module__] for m in model.modules() for kind in type(m).__mro__}
            for name in {MASK_WITH_WINDOW, "create_causal_mask"} & vars(file).keys()
        ]


def _weights(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Stand-ins for all weights: on the meta device in the layers, zeros elsewhere; and small buffers. One weight that
    has several names has several stand-ins, which are alike.

    Each module comes once: functional_call takes a module that has two names apart twice and puts it back once.
    """
    inside = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    made: dict[str, Tensor] = {}
    for prefix, m in model.named_modules():
        for name, p in m.named_parameters(prefix, recurse=False, remove_duplicate=False):
            shape, alike = getattr(p, "ds_shape", p.shape), {"dtype": p.dtype, "requires_grad": p.requires_grad}
            one = torch.empty(shape, device="meta", **alike) if id(p) in inside else torch.zeros((), **alike)
            made[name] = one.expand(shape)
        for name, b in m.named_buffers(prefix, recurse=False, remove_duplicate=False):
            if id(b) in inside:
                made[name] = torch.empty_like(b, device="meta")
            else:
                made[name] = torch.zeros(b.shape, dtype=b.dtype) if b.is_meta or isinstance(b, FakeTensor) else b.cpu()
    return made


def _transform(config: Any, logits: Tensor, made: Any) -> LogitTransform | None:
    """The scale and soft cap by which a model made this of its head's logits; None where it did something else. They
    are among the fields of its config."""
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    scales = [1.0]
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling", "logits_scale"):
        if isinstance(value := getattr(config, name, None), int | float) and value:
            scales += [float(value), 1.0 / float(value)]
    candidates = [LogitTransform(scale=s, softcap=c) for s in scales for c in (None, *(c for c in caps if c))]
    if not isinstance(made, Tensor) or made.shape != logits.shape:
        return None
    made = made.to(logits.dtype)
    return next((c for c in candidates if torch.allclose(c(logits), made, rtol=1e-5, atol=1e-5)), None)
