"""Models that read images: features travel to the owner of the token.

Each rank has its slice of the tokens, and its vision tower runs on the images that `alstlib.data.images` deals to it.
transformers' own forward puts the features of images in the place of their placeholders; here its `get_image_features`
goes on with one differentiable all-to-all, after which a rank has the features of its own slice's placeholders (and
those of DeepStack, which later layers add). Every rank calls the tower once for each micro-batch, so that engines that
gather weights (ZeRO-3, FSDP2) do not wait for a rank without an image.

Positions of several dimensions (M-RoPE) are made once, of the whole sample, by the model's own function.

Shape legend: B samples of a micro-batch, L tokens of one rank, E width of a feature, n features that a rank's tower
makes, m placeholders of its slice.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alstlib.base.options import Record
from alstlib.data.images import DEALT, IMAGE_KEYS, DealtImages, FeaturePlan, Fields, ImageLayout
from alstlib.hf.handle import Handle
from alstlib.hf.pass_state import PassState
from alstlib.offload.checkpoints import checkpoint
from alstlib.ulysses.alltoall import Exchange, Moved

REFUSED_MODELS = {
    **dict.fromkeys(
        ("gemma3", "shieldgemma2", "gemma4", "gemma4_unified", "paligemma"),
        "tokens of an image attend to each other in both directions, which is not exact on a sharded sequence",
    ),
    **dict.fromkeys(
        ("llava_next", "llava_next_video", "llava_onevision"),
        "how many features an image has follows from the size that it had before it was cut into tiles, and from the "
        "number of images in its sample, and the plan of features does not know this arithmetic",
    ),
}
"""Why models cannot read images here, by their type."""
NOT_TEXT = "pixel|image|video|vision|patches|encoder_outputs|audio"
"""Parts of the names of a model's arguments that have values of images, or of what else is not text."""


def image_layout(model: PreTrainedModel) -> ImageLayout | None:
    """How this model takes images; None where that is not known, or not exact."""
    config: Any = model.config
    make = LAYOUTS.get(config.model_type)
    if make is None or not hasattr(model.base_model, "get_image_features"):
        return None
    return make(model.base_model, config, config.vision_config)


def why_no_images(model: PreTrainedModel) -> str:
    """The refusal of images that this model is given."""
    name, kind = type(model).__name__, model.config.model_type
    why = REFUSED_MODELS.get(kind, f"known are {', '.join(sorted(LAYOUTS))}")
    return f"{name} ({kind}) cannot read images under sequence parallelism: {why}"


def attach_vision(handle: Handle) -> None:
    """Let the model's features travel, and checkpoint the layers of its tower."""
    if handle.images is None:
        return
    inner: Any = handle.model.base_model
    original = inner.get_image_features

    def get_image_features(*args: Any, **kwargs: Any) -> Any:
        out, state = original(*args, **kwargs), handle.state
        if state is None or "image_plan" not in state.inputs.images:
            return out
        return _travelled(out, _plan_of(handle, state), handle.attention.exchange)

    handle.edits.set(inner, "get_image_features", get_image_features)
    if handle.options.checkpoint:
        for layer in tower_modules(handle.model):
            if isinstance(layer, GradientCheckpointingLayer):
                handle.set_forward(layer, functools.partial(_checkpointed, handle, layer, layer.forward))


def tower_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that make features of images, where the model can read them: what is neither in the decoder, nor
    around it, nor the head."""
    if image_layout(model) is None:
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    text = {*decoder.modules(), *([] if head is None else head.modules())}
    return [m for m in model.modules() if m not in text and not text & {*m.modules()}]


def take_images(handle: Handle, kwargs: dict[str, Any]) -> Record:
    """Take what is about images out of the `kwargs` of a model's call, where the model can read them.

    Raises:
        ValueError: they have no plan, or the model cannot read them.
    """
    known = dict.fromkeys((*DEALT, *IMAGE_KEYS))
    others = [name for name in kwargs if name not in known and re.search(NOT_TEXT, name)]
    if others := [name for name in others if any(isinstance(t, Tensor) for t in tree_leaves(kwargs[name]))]:
        raise ValueError(
            f"{type(handle.model).__name__} cannot read {', '.join(others)} when attached: leave them out, and give "
            f"images as {', '.join(DEALT[:4])}, where the model takes them so"
        )
    names = [name for name in known if kwargs.get(name) is not None]
    if not names:
        return {}
    if handle.images is None:
        raise ValueError(f"{why_no_images(handle.model)}; leave {', '.join(names)} out")
    given = {name: kwargs.pop(name) for name in names}
    if handle.ctx.sp > 1 and "image_plan" not in given:
        raise ValueError(
            f"{', '.join(names)} are of the whole sequence: give a batch of SPDataLoader or shard_batch with "
            "images=handle.images, which deals images to ranks"
        )
    return given


def _plan_of(handle: Handle, state: PassState) -> FeaturePlan:
    """Where the features of this call go, whose images have a plan."""
    dealt: DealtImages = state.inputs.images["image_plan"]
    if state.blocks is not None:
        return dealt.plan(state.blocks.block, state.blocks.index)
    return dealt.plan(handle.chunk if state.inputs.striped else None)


def no_images(handle: Handle, positions: Tensor) -> dict[str, Any]:
    """The blank image of a micro-batch of one token a rank, at positions [1, 1], that other ranks wait for."""
    assert handle.images is not None
    sp = handle.ctx.sp
    dealt = DealtImages(at=[], owners=[], lengths=[], padded=sp, sp=sp, sp_rank=handle.ctx.sp_rank)
    given: dict[str, Any] = {**handle.images.joined([]), "image_plan": dealt}
    several = {} if handle.images.positions is None else {"image_positions": positions[..., None].repeat(1, 1, 3)}
    return {**given, **several}


def give_images(handle: Handle, kwargs: dict[str, Any], state: PassState) -> None:
    """Give the model's own forward the images of this call, on its device: of a block those with placeholders in it, or
    a blank one where it has none."""
    images, layout, blocks = dict(state.inputs.images), handle.images, state.blocks
    if not images:
        return
    assert layout is not None
    dealt, several = images.pop("image_plan", None), images.pop("image_positions", None)
    if several is not None:  # [4, B, L]: those of the text come first
        several = several if blocks is None else several[:, blocks.tokens]
        at = kwargs["position_ids"].expand(several.shape[:2])
        kwargs["position_ids"] = torch.stack([at, *several.to(at.device, non_blocking=True).unbind(-1)])
    if dealt is not None and blocks is not None:
        images = layout.chosen(images, dealt.lengths, _plan_of(handle, state).images)
    ids = kwargs.get("input_ids")
    if dealt is not None and layout.video_token is not None and ids is not None:
        # frames and images arrive together; embeddings of placeholders are replaced, whichever they are
        kwargs["input_ids"] = ids.masked_fill(ids == layout.video_token, layout.token)
    for name, value in images.items():
        kwargs[name] = value.to(state.inputs.device, non_blocking=True) if isinstance(value, Tensor) else value


def _checkpointed(handle: Handle, layer: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer of the tower that keeps only its input, in the store of the text's layers."""
    if handle.state is None:
        return original(*args, **kwargs)
    x = args[0] if args else kwargs.pop(next(iter(inspect.signature(original).parameters)))
    return checkpoint(original, x, *args[1:], store=handle.store, module=layer, **kwargs)


# ----- features


def _travelled(out: Any, plan: FeaturePlan, exchange: Exchange) -> Any:
    """What the tower made, with the features of this rank's slice in the place of those of its images."""
    made, features, name = _made(out), features_made(out), _named(out)
    if len(plan.send) > len(features[0]):
        raise ValueError(
            f"the tower made {len(features[0])} features of images that have {len(plan.send)} placeholders"
        )
    sent = torch.cat(features, 1)[plan.send.to(features[0].device)]
    there = functools.partial(_swap, exchange, plan.to_ranks, plan.from_ranks)
    back = functools.partial(_swap, exchange, plan.from_ranks, plan.to_ranks)
    arrived = sent if exchange.ranks == 1 else Moved.apply(there, back, sent)[0]
    arrived = arrived[plan.order.to(arrived.device)]
    out[name], *deep = map(_like, arrived.split([t.shape[1] for t in features], 1), made)
    if deep:
        out.deepstack_features = deep
    return out


def _named(out: Any) -> str:
    """The field of a tower's output that has the features: those of Llama 4 are projected later."""
    return "last_hidden_state" if out.pooler_output is None else "pooler_output"


def features_made(out: Any) -> list[Tensor]:
    """The features [n, E] of a tower's output, and those of DeepStack."""
    return [t.flatten(0, -2) if isinstance(t, Tensor) else torch.cat([*t]) for t in _made(out)]


def _made(out: Any) -> list[Any]:
    """A tower's features and those of DeepStack, as its model has made them."""
    return [out[_named(out)], *(getattr(out, "deepstack_features", None) or ())]


def _like(features: Tensor, made: Any) -> Any:
    """Features [m, E] as the model has made others: a list with a tensor for each image, or a tensor [..., E], in which
    each is an image of its own."""
    return features.view(-1, *[1] * (made.ndim - 2), features.shape[1]) if isinstance(made, Tensor) else [features]


def _swap(
    exchange: Exchange, to_ranks: list[int], from_ranks: list[int], features: Tensor
) -> list[Tensor]:  # fmt: skip
    """Features [n, E] in the order of the ranks that they go to -> those that arrive, in the order of theirs."""
    width = features.shape[1]
    counts = [[n * width for n in each] for each in (to_ranks, from_ranks)]
    return [exchange.swap_unequal(features.flatten(), *counts).view(-1, width)]


# ----- how models take images


def _same_size(inner: Any, config: Any, vision: Any) -> ImageLayout:
    """Every image, or tile of one, has the same size, and equally many features."""
    if vision.model_type == "pixtral":
        return _by_pixels(inner, config, vision)
    nested = not hasattr(inner, "multi_modal_projector")  # Idefics 2, 3 and their kin
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size

    def blank() -> Fields:  # no zeros: images of zeros fill up the samples of a batch
        made = {"pixel_values": torch.ones(1, getattr(vision, "num_channels", 3), height, width)}
        return {**made, "pixel_attention_mask": torch.ones(1, height, width, dtype=torch.bool)} if nested else made

    return ImageLayout(token=config.image_token_id, blank=blank, nested=nested)


def _by_pixels(inner: Any, config: Any, vision: Any) -> ImageLayout:
    """Images have sizes in pixels, up to which they are padded."""
    unit = vision.patch_size * getattr(config, "spatial_merge_size", 1)

    def blank() -> Fields:
        size = unit, 2 * unit  # of two features: transformers squeezes the only one of several
        return {"pixel_values": torch.ones(1, vision.num_channels, *size), "image_sizes": torch.tensor([size])}

    return ImageLayout(
        token=config.image_token_id, blank=blank, sizes="image_sizes", unit=unit, width=vision.hidden_size
    )  # fmt: skip


def _by_patches(inner: Any, config: Any, vision: Any) -> ImageLayout:
    """Images have sizes in patches, in which they come; attention is within an image, or a frame of a video."""
    merge = inner.visual.spatial_merge_size
    values = math.prod(inner.visual.patch_embed.proj.weight.shape[1:])

    def blank() -> Fields:
        grid = torch.tensor([[1, merge, merge]])
        return {"pixel_values": torch.ones(merge**2, values), "image_grid_thw": grid}

    def positions(ids: Tensor, types: Tensor, **grids: Tensor) -> Tensor:
        return inner.get_rope_index(input_ids=ids, mm_token_type_ids=types, **grids)[0]

    return ImageLayout(
        token=config.image_token_id, blank=blank, sizes="image_grid_thw", unit=merge**2,
        video_token=config.video_token_id if config.model_type.startswith("qwen") else None,
        positions=positions if hasattr(inner, "get_rope_index") else None,
        width=getattr(vision, "embed_dim", None) or vision.hidden_size,
    )  # fmt: skip


_TYPES = {
    _same_size: "llava vipllava internvl qianfan_ocr idefics2 idefics3 smolvlm aya_vision cohere2_vision got_ocr2 "
    "pp_chart2table llama4",
    _by_pixels: "mistral3 lighton_ocr",
    _by_patches: "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v glm4v_moe glm46v glmga glm_ocr "
    "cosmos3_omni",
}
LAYOUTS = {kind: layout for layout, kinds in _TYPES.items() for kind in kinds.split()}
"""What makes the layout of a model, by its type: of its base model, its config and that of its tower."""
