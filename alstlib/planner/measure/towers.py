"""Simulate the vision tower of a model that reads images: what one rank's images take, and their FLOPs.

The real tower runs forward and backward on fake pixels, as `simulate` runs the decoder. A tower reads the sizes of its
images (lengths of attention, windows, positions): integers have values here, and only they.

Shape legend: n images of a rank, f features of each, E width of a feature.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from alstlib.base.config import RunConfig
from alstlib.data.images import Fields, ImageLayout
from alstlib.hf.pass_state import PassState, StepInputs
from alstlib.hf.vision import features_made, image_layout, why_no_images
from alstlib.planner.measure.simulate import attached, recorded, roomy, whole_model

PLANNED = ("llava", "qwen2_vl", "qwen2_5_vl")
"""Types of models of which plans were compared with steps of real tensors."""
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def tower(run: RunConfig, device: str, size: tuple[int, int] | None) -> dict[str, Any]:
    """What the tower takes for n images on a rank, as lines (bytes without any image, bytes of each): `peak`, over the
    weights; `kept` between its forward and its backward; `host`, its checkpoints. And of one image: `tokens` in the
    sequence, `size` in pixels, and the FLOPs of a forward in matrix `products` and in `attention`.

    Args:
        size: height and width in pixels; None where the tower has one size.

    Raises:
        ValueError: a model that cannot read images, a size that it does not take, or a tower that is not `PLANNED`.
    """
    with torch.device("meta"):
        model = whole_model(run, device, images=True)
    layout = image_layout(model)
    if layout is None:
        raise ValueError(why_no_images(model))
    if model.config.model_type not in PLANNED:
        raise ValueError(
            f"images of {_name(model)} are not planned: only plans of {', '.join(PLANNED)} were compared with steps"
        )
    made = _image(model, layout, size)
    one, two = (_step(copy.deepcopy(model), roomy(run), device, layout, made, n) for n in (1, 2))
    lines = {name: (2 * one[name] - two[name], two[name] - one[name]) for name in ("peak", "kept", "host")}
    return {**lines, **{name: one[name] for name in ("tokens", "products", "attention")}, "size": _pixels(model, made)}


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def _image(model: Any, layout: ImageLayout, size: tuple[int, int] | None) -> Fields:
    """The fields of one image of about this size."""
    blank = layout.blank()
    if layout.sizes != "image_grid_thw":
        own = tuple(blank["pixel_values"].shape[-2:])
        if size not in (None, own):
            raise ValueError(
                f"image-size={size[0]}x{size[1]}: the tower of {_name(model)} takes images of {own[0]}x{own[1]} only; "
                "leave --image-size out, and count each tile as an image where the processor cuts images into tiles"
            )
        return blank
    if size is None:
        raise ValueError(f"images of {_name(model)} have any size: say which with --image-size HEIGHTxWIDTH")
    side = _patch(model)
    merge = int(blank["image_grid_thw"][0, 1])
    grid = [merge * max(1, round(pixels / (merge * side))) for pixels in size]
    pixels = torch.empty(grid[0] * grid[1], blank["pixel_values"].shape[1], device="meta")
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *grid]])}


def _patch(model: Any) -> int:
    return int(model.base_model.visual.patch_embed.proj.weight.shape[-1])


def _pixels(model: Any, made: Fields) -> list[int]:
    """Height and width of an image."""
    if "image_grid_thw" in made:
        return [int(n) * _patch(model) for n in made["image_grid_thw"][0, 1:]]
    return [*made["pixel_values"].shape[-2:]]


def _step(
    model: Any, run: RunConfig, device: str, layout: ImageLayout, made: Fields, images: int
) -> dict[str, Any]:  # fmt: skip
    """What the tower takes for so many images, over its weights."""
    several = layout.joined([{**made, "pixel_values": made["pixel_values"].to("meta")}] * images)
    shape = several.pop("pixel_values").shape
    with attached(model, run, 1, device) as handle:
        state = PassState(inputs=StepInputs(shape=(1, 1), device=torch.device("cpu")))
        counter = FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention_flops})
        with recorded(model, handle) as (ledger, start):
            given = {**several, "pixel_values": torch.empty(shape)}
            with handle.entered(state), IntegersWithValues():
                with counter:
                    features = torch.cat(features_made(model.base_model.get_image_features(**given)), 1)
                tokens, total = len(features) // images, features.sum()
                del features  # the decoder has them, in the embeddings
                kept = ledger.device_bytes - start
                total.backward()
            peak = ledger.device_peak - start
    flops = counter.get_flop_counts().get("Global", {})
    attention = sum(n for operation, n in flops.items() if "attention" in str(operation))
    return {
        "tokens": tokens, "peak": peak, "kept": kept, "host": handle.store.peak_nbytes,
        "attention": attention, "products": sum(flops.values()) - attention,
    }  # fmt: skip


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


class IntegersWithValues(TorchDispatchMode):
    """While it is entered in a simulation, integers that follow from integers with values have values too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, FakeTensor) for t in tensors):
            args, kwargs = tree_map(_places, (args, kwargs))
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            if tensors or _makes_integers(func, args, kwargs):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _makes_integers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether what an operation makes of no tensors are integers: tried without memory."""
    made = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
    return all(not t.is_floating_point() for t in tree_leaves(made) if isinstance(t, Tensor))


def _places(value: Any) -> Any:
    """The places of what a mask chooses: how many there are is known here."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.dtype != torch.bool:
        return value
    with unset_fake_temporarily():
        return value.nonzero().flatten() if value.ndim == 1 else value
