"""MoE layers (which route each token to a few experts) run in tiles like a dense MLP, so that their intermediates are
O(tile).

Such a layer may run in tiles, and on some of the sequence's tokens (a rank's slice, a chunk, a block of the model),
where its output for a token depends on that token alone. Most do: a router chooses experts for each token, and their
weights are the same for all. Some do not: experts of limited capacity drop what comes too late, others choose their
tokens, or a router looks at the whole batch. All MoE layers of transformers' own that can be attached are token-wise,
as the tests' sweep over its types compares. Of another one nobody knows: `Options.experts_by_token` says that it is.

The load-balancing loss is a mean over all tokens (`router_loss`): routers run inside the tiles, in forward, which adds
up, and in each tile's backward, where the loss's gradient joins in.

What tiles cost: each tile's backward makes a gradient of all experts, and these are added up in fp32, 4 bytes for each
weight of the layer that trains. So the default tile makes at least as many intermediates as these sums take, and where
cutting a slice would save less than that, it is one tile, without sums. Below: device bytes, and CPU time of one core,
of forward and backward of a layer like Mixtral's (width 256, 8 experts of width 896, 2 for each token; fp32, grouped
products). The time in tiles has the recompute of the layer in it, the time untiled has none.

    tokens   untiled             tiles of 256        default
     1,024    53 MiB   0.10 s     57 MiB   0.17 s     55 MiB   0.14 s   one tile
     4,096   191 MiB   0.47 s     66 MiB   0.68 s     84 MiB   0.54 s   tiles of 826
    16,384   745 MiB   2.19 s    102 MiB   2.77 s    120 MiB   2.25 s   tiles of 826

The backward of transformers' eager experts makes a gradient as large as all experts for each expert, so that tiles of
them cost more: 2.67 s by default, and 1.63 s untiled, for 16,384 tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from alstlib.base.recompute import entered, trained
from alstlib.base.sizing import default_tile, tile_of_sums
from alstlib.hf.handle import Handle
from alstlib.hf.pass_state import state_now
from alstlib.hf.router_loss import RouterLoss
from alstlib.tiled.compute import TiledMLP, tensors_of

MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp")
"""What decoder layers call their MLP or experts, and what every token goes to beside them."""


def routes(module: nn.Module) -> bool:
    """Whether a child of a layer looks like an MoE layer, and not like a plain MLP."""
    return any(hasattr(module, a) for a in ("experts", "router", "gate")) and not hasattr(module, "down_proj")


def why_untiled(moe: nn.Module, by_token: bool) -> str:
    """Why an MLP or an MoE layer cannot run in tiles; empty where it can. `by_token`: the user says that layers
    of experts work token by token."""
    if not routes(moe):
        return ""
    if not (known(moe) or by_token):
        return "may mix tokens (see Options.experts_by_token)"
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes = [p for p in inspect.signature(moe.forward).parameters.values() if p.kind not in several]
    # such as token ids for routing by hash, or another router's state
    return "routes to experts by more than its tokens" if len(takes) > 1 else ""


class TiledExperts(TiledMLP):
    """Stands in for an MoE layer and runs it in tiles, where it treats its tokens one by one.

    Args:
        moe: a module mapping [B, S, E] to [B, S, E], or to a tuple that begins with that.
        tile: tokens in one tile; None chooses by `default_tile`.
    """

    narrow = True

    def forward(self, x: Tensor) -> Any:
        captured = output_capturing._active_collector.get() or {}
        return self._run(x) if "router_logits" in captured else super().forward(x)

    def _run(self, x: Tensor) -> Any:
        made = self.inner(x)
        first = tensors_of(made)[0]
        if first.ndim == x.ndim:
            return made
        shaped = first.view(x.shape)  # Llama 4's block gives its tokens back in one row, which its layer takes too
        return shaped if first is made else (shaped, *made[1:])

    def _work(self) -> tuple[Callable[..., Any], Sequence[Tensor]]:
        """Each tile's router, now and in backward, belongs to the call that runs now, and knows the tile's padding."""
        state = state_now()
        if state is None or state.router is None:
            return self._run, ()
        own, real = replace(state, saved=None, part=None), state.real_tokens

        def run(x: Tensor, *real: Tensor) -> Any:
            with entered(replace(own, inputs=replace(own.inputs, real=real[0] if real else None))):
                return self._run(x)

        return run, () if real is None else (real,)

    def _default_tile(self, x: Tensor) -> int:
        """By bytes. One expert's widest intermediate, times the experts of a token, is as large as a dense MLP's; but a
        tile that is smaller than the fp32 sums of the gradients costs time and saves little (`tile_of_sums`)."""
        found = [getattr(m, name, None) for m in self.inner.modules() for name in ("top_k", "num_experts_per_tok")]
        each = max((k for k in found if isinstance(k, int)), default=1)
        listed = max([1, *(len(m) for m in self.inner.modules() if isinstance(m, nn.ModuleList))])
        widest, numbers, sums = x.shape[-1], 0.0, 0
        for name, p in self.inner.named_parameters():
            shape = getattr(p, "ds_shape", p.shape)
            sums += 4 * math.prod(shape) * p.requires_grad
            if len(shape) >= 2:  # a matrix for each expert, in one weight or in a list, or one for all tokens
                uses = each if len(shape) > 2 else each / listed if "experts." in name else 1
                widest, numbers = max(widest, *shape[-2:]), numbers + uses * sum(shape[-2:])
        tile = default_tile(each * widest, x.element_size(), x.device)
        return tile_of_sums(x.shape[:2].numel(), tile, sums, numbers * x.element_size())


@functools.cache
def tiled_kind(kind: type[nn.Module]) -> Any:
    """The class of an MoE layer's stand-in: it is `TiledExperts`, and the layer's own too. By its class
    (`set_z3_leaf_modules`), or by the name of its class (Accelerate), users say which modules DeepSpeed ZeRO-3 must
    take as leaves."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": TiledExperts.__doc__}
    return type(kind.__name__, (TiledExperts, kind), names)


def unknown_experts(layers: Sequence[nn.Module]) -> str:
    """An MoE layer among these of which nobody knows that it is token-wise, with what to do; empty where there is
    none."""
    for i, layer in enumerate(layers):
        for name, m in layer.named_children():
            if (hasattr(m, "experts") or (name in MLPS and routes(m))) and not known(m):
                return (
                    f"layer {i}: {name} ({type(m).__name__}) routes tokens to experts, and may mix them: if its output "
                    "for a token depends on that token alone, say so with Options(experts_by_token=True), and let "
                    "`alst verify` compare"
                )
    return ""


def known(moe: nn.Module) -> bool:
    """Whether an MoE layer is transformers' own."""
    return type(moe).__module__.startswith("transformers.models.")


# ----- routers


def attach_routers(handle: Handle) -> None:
    @torch.compiler.disable
    def see(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        state = handle.state
        if state is None or state.router is None:
            return None
        if isinstance(out, Tensor):  # a projection alone, as Jamba's is before transformers 5.21
            return state.router.see(out, out, state.real_tokens)
        return (out[0], state.router.see(out[0], out[1], state.real_tokens), *out[2:])

    for router in handle.facts.routers:
        handle.edits.hook(router, router.register_forward_hook(see))


def router_loss(handle: Handle, labels: Tensor | None, kwargs: dict[str, Any]) -> RouterLoss | None:
    """The load-balancing loss of this call where it is asked for; transformers itself is told not to make it."""
    config = handle.model.config.get_text_config()
    asked = kwargs.get("output_router_logits")
    if not (getattr(config, "output_router_logits", False) if asked is None else asked):
        return None
    if not handle.facts.routers and "output_router_logits" not in inspect.signature(handle.model.forward).parameters:
        return None  # a model without routers, that has no such loss
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not handle.facts.routers or experts is None or not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"output_router_logits=True: the router's loss of {type(handle.model).__name__} is not known here; use "
            "False, which is router_aux_loss_coef=0.0 for TRL"
        )
    if labels is None:
        options = handle.options  # transformers itself makes the loss, of logits that have a graph or have none
        recomputed = options.checkpoint or handle.chunk is not None or options.tile("mlp")
        trains = torch.is_grad_enabled() and bool(trained(handle.model))
        if handle.ctx.sp > 1 or (recomputed and trains):
            raise ValueError(
                "output_router_logits=True needs shift_labels: with sp > 1 its loss is that of all ranks, and tiles, "
                "checkpoints and chunks keep no graph of the router's logits. Give labels, call the model under "
                "torch.no_grad(), or use output_router_logits=False"
            )
        return None
    kwargs["output_router_logits"] = False
    return RouterLoss(experts, config.num_experts_per_tok, config.router_aux_loss_coef, handle.ctx.sp_group)
