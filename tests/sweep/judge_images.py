"""One type that reads images judged on one rank: text alone and samples with images, whole and packed, against plain
transformers; or the refusal. Images are made by the layout that `apply` finds (`Handle.images`): of random values, and
of sizes that make a few features. Judged as `judge` does."""

import functools
import re

import pictures
import small_vlm
import torch
import yaml
from judge import EXACT, outcomes

import alstlib
from alstlib.hf.vision import features_made, image_layout, why_no_images
from alstlib.planner.measure import verify

WAYS = yaml.safe_load("""
default: [{}, null]
chunks: [{chunk: 4, tiles: {mlp: 5, loss: 7}}, null]
blocks: [{}, 5]
""")
DATA = yaml.safe_load("""
text: [[19]]
packed text: [[5], [1], [13]]
images: [[3, image, 4, image, 5]]
packed images: [[4, image, 3], [6], [2, image, 5, image, 1]]
""")
CASES = [f"{data}, {how}" for data in DATA for how in WAYS if how == "default" or data == "packed images"]
WHERE = re.compile(": known are|; leave")
"""What a refusal goes on with after its reason, which is longer with each type that is known."""
SIDES = [(1, 2), (2, 2), (1, 1), (3, 1), (2, 3)]
"""Features along the sides of images, in turn, where images have sizes."""


def _one(ctx, case, known, model):
    data, _, how = case.partition(", ")
    (options, block), layout = WAYS[how], image_layout(model)
    if "images" in data and layout is None:
        return _refuses(model, ctx)
    try:
        with torch.no_grad():
            documents = [document(model, layout, parts, i) for i, parts in enumerate(DATA[data])]
    except Exception as e:
        return {"result": "not built", "reason": f"plain transformers: {verify.why(e)}"}

    def plain(model):
        """Once for all ways of running the layers. A tower that sees no image has no gradients."""
        if (data, model.dtype) not in known:
            known[data, model.dtype] = pictures.plain_vlm(model, documents)
        loss, grads = known[data, model.dtype]
        none = {n: torch.zeros_like(p) for n, p in model.named_parameters()} if "images" in data else {}
        return loss, none | grads

    found = verify.compare(model, ctx, alstlib.Options(**options), pictures.joined(documents), plain, EXACT, block)
    if "use chunk=None" in found["reason"]:  # what such a type says when it runs
        found["result"] = "refused"
    return found


def _refuses(model, ctx):
    """The refusal of images, as a call with some gets it, or that of the model."""
    ids = torch.arange(4, 16)[None]
    try:
        handle = alstlib.apply(model, ctx)
    except Exception as e:
        return {"result": "refused" if isinstance(e, verify.REFUSALS) else "crash", "reason": verify.why(e)}
    try:
        with handle:
            model(input_ids=ids, position_ids=torch.arange(12)[None], shift_labels=ids, pixel_values=torch.ones(1))
    except ValueError as e:
        if why_no_images(model) in str(e):
            return {"result": "refused", "reason": f"images: {WHERE.split(verify.why(e))[0]}"}
    return {"result": "wrong", "reason": "images are not refused"}


def document(model, layout, parts, seed):
    """A sample of text and images, of images as this model takes them."""

    def picture(part, place, g):
        image = _image(layout, SIDES[place % len(SIDES)], g, model.dtype)
        out = model.base_model.get_image_features(**layout.joined([image]))
        return [layout.token] * len(features_made(out)[0]), image

    return pictures.sample(parts, seed, picture, nested=layout is not None and layout.nested)


def _image(layout, side, g, dtype):
    """The fields of an image with so many features along its sides; in pixels all images are padded to one size."""
    image, (height, width) = layout.blank(), side
    shape, size = [*image["pixel_values"].shape], [layout.unit * height, layout.unit * width]
    if layout.sizes == "image_grid_thw":
        shape[0] *= height * width
        image[layout.sizes] *= torch.tensor([1, height, width])
    elif layout.sizes:
        shape[2:] = [layout.unit * max(map(max, SIDES))] * 2
        image[layout.sizes] = torch.tensor([size])
    pixels = torch.randn(shape, generator=g).to(dtype)
    if layout.sizes == "image_sizes":
        pixels[..., size[0] :, :] = pixels[..., size[1] :] = 0
    return {**image, "pixel_values": pixels}


judge = functools.partial(outcomes, small_vlm.small_model, _one)
