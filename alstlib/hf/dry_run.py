"""A dry run shows what a model does around its kernels, without its weights: which layers call attention, with what.

It takes milliseconds for each layer and no memory, also where an engine has sharded the model. The model's own forward
runs once on a few tokens. Weights outside the layers are zeros of one element, expanded; layers run on the meta device,
where tensors have shapes and no values; attention gives back an empty output; the head ends it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

ROWS = 11
"""Tokens of a dry run: few, and the size of nothing else."""


CAPTURES = "_output_capturing_hooks_installed"
"""Attribute of a model in which transformers has installed the hooks that capture outputs, of routers and others."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: what a layer hands to it."""

    module: nn.Module
    heads: int
    kv_heads: int
    width: int
    """Width of a query and of a key."""
    value_width: int
    mask: Any
    dropout: float
    kwargs: dict[str, Any]


@dataclass
class LayerCall:
    """One call of a decoder layer."""

    layer: nn.Module
    hidden: Tensor
    others: tuple[Any, ...]
    """Its further arguments, by order and by name."""
    attention: list[AttentionCall] = field(default_factory=list)
    reads: bool = False
    """Whether it read a mapping in which layers leave something for each other."""
    outputs: int = 1
    """How many it returned, without what is None."""
    finished: bool = False
    """False where the layer does something that needs values, and its end is not known."""


@dataclass
class DryRun:
    """What was seen. Facts that are not there (`finished` is False) were not to be had without values."""

    calls: list[LayerCall] = field(default_factory=list)
    finished: bool = False

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers that ran, in order."""
        return list(dict.fromkeys(call.layer for call in self.calls))

    @property
    def attention(self) -> list[AttentionCall]:
        return [attended for call in self.calls for attended in call.attention]


class _Watched(MutableMapping[Any, Any]):
    """A mapping that notes when a layer reads it."""

    def __init__(self, inner: MutableMapping[Any, Any], call: LayerCall) -> None:
        self.inner, self.call = inner, call

    def __getitem__(self, key: Any) -> Any:
        self.call.reads = True
        return self.inner[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        self.call.reads = True
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class _Ended(Exception):
    """The dry run has seen enough."""


def dry_run(model: PreTrainedModel, layers: Sequence[nn.Module]) -> DryRun:
    """Run `model` dry, with `layers` those modules that may be its decoder layers. The model is left as it was."""
    run = DryRun()
    with unset_fake_temporarily(), _without_triton(), _standing_in(model, layers, run) as forward:
        run.finished = _ends(forward)
    return run


def _ends(forward: Callable[[], Any]) -> bool:
    """Whether the forward comes to its end, which it does not where it needs the values of weights."""
    try:
        forward()
    except _Ended:
        pass
    except Exception:  # whatever code of the model it was
        return False
    return True


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """Launches of Triton's kernels (Liger's, a model's own) do nothing: a tensor without memory is a null pointer to
    them, and to write there ends the process's use of its GPU. What they would write has its shape already."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    def launcher(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: None

    with mock.patch.object(KernelInterface, "__getitem__", launcher):
        yield


@contextlib.contextmanager
def _standing_in(model: Any, layers: Sequence[nn.Module], run: DryRun) -> Iterator[Callable[[], None]]:
    """Give the model's forward for a few tokens while layers, head, attention and weights are replaced."""
    name = f"alst_{uuid.uuid4().hex}"
    configs = {id(c): c for m in model.modules() for c in vars(m).values() if isinstance(c, PreTrainedConfig)}
    implementations = {key: config._attn_implementation_internal for key, config in configs.items()}
    head, training = model.get_output_embeddings(), {m: m.training for m in model.modules()}
    own = {m: m.__dict__.get("forward") for m in (*layers, head)}
    hooks = [(m, n, m.__dict__[n]) for m in training for n in ("_forward_hooks", "_forward_pre_hooks")]
    captured = {m for m in training if CAPTURES in m.__dict__}
    weights, inside = _weights(model, layers), False

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any) -> Any:
        mask, dropout = kwargs.pop("attention_mask", mask), kwargs.pop("dropout", 0.0)
        if run.calls:
            run.calls[-1].attention.append(
                AttentionCall(module, q.shape[1], k.shape[1], q.shape[3], v.shape[3], mask, dropout, kwargs)
            )
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    def stand_in(layer: nn.Module, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # a part of another layer, which is checkpointed as a whole
                return original(*args, **kwargs)
            x, *others = [*args, *kwargs.values()] if args else [kwargs.pop("hidden_states"), *kwargs.values()]
            run.calls.append(call := LayerCall(layer, x, tuple(others)))
            dry, inside = [_for_layer(value, call) for value in (x, *args[1:])], True
            try:
                out = original(*dry, **{key: _for_layer(value, call) for key, value in kwargs.items()})
            except Exception:  # whatever code of the model it was
                return x
            finally:
                inside = False
            call.finished, call.outputs = True, 1 if isinstance(out, Tensor) else sum(o is not None for o in out)
            return tree_map(lambda t: torch.zeros_like(t, device="cpu") if isinstance(t, Tensor) else t, out)

        return forward

    def end(*args: Any, **kwargs: Any) -> Any:
        raise _Ended

    def forward() -> None:
        token = int(model.config.get_text_config().pad_token_id == 0)  # any but padding, of which some models warn
        inputs = {"input_ids": torch.full((1, ROWS), token), "position_ids": torch.arange(ROWS)[None]}
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            torch.func.functional_call(model, weights, (), {**inputs, "use_cache": False}, tie_weights=False)

    AttentionInterface.register(name, attend)
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        model.train()
        for m, kind, _ in hooks:  # a user's hooks count calls, or read values
            m.__dict__[kind] = OrderedDict()
        for layer in layers:
            layer.forward = stand_in(layer, layer.forward)
        head.forward = end
        yield forward
    finally:
        for m, was in own.items():
            m.__dict__.pop("forward", None)
            if was is not None:
                m.forward = was
        for m, mode in training.items():
            m.training = mode
        for m, kind, those in hooks:
            m.__dict__[kind] = those
        for m in training.keys() - captured:  # those of the dry run are gone
            m.__dict__.pop(CAPTURES, None)
        for key, config in configs.items():
            config._attn_implementation_internal = implementations[key]
        AttentionInterface._global_mapping.pop(name, None)


def _for_layer(value: Any, call: LayerCall) -> Any:
    """A layer's argument for the meta device."""
    if isinstance(value, MutableMapping):
        return _Watched(value, call)
    return tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, value)


def _weights(model: nn.Module, dry: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Stand-ins for all weights: on the meta device in the modules `dry`, zeros elsewhere; and small buffers.

    Each module comes once: functional_call takes a module that has two names apart twice and puts it back once.
    """
    inside = {id(t) for m in dry for t in (*m.parameters(), *m.buffers())}
    made: dict[str, Tensor] = {}
    tied: dict[int, Tensor] = {}
    for prefix, m in model.named_modules():
        for n, p in m.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if id(p) not in tied:
                shape, alike = getattr(p, "ds_shape", p.shape), {"dtype": p.dtype, "requires_grad": p.requires_grad}
                dry_p = torch.empty(shape, device="meta", **alike) if id(p) in inside else None
                tied[id(p)] = torch.zeros((), **alike).expand(shape) if dry_p is None else dry_p
            made[n] = tied[id(p)]
        for n, b in m.named_buffers(prefix, recurse=False, remove_duplicate=False):
            if id(b) in inside:
                made[n] = torch.empty_like(b, device="meta")
            else:
                made[n] = torch.zeros(b.shape, dtype=b.dtype) if b.is_meta or isinstance(b, FakeTensor) else b.cpu()
    return made
