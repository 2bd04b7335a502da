"""One type that reads images judged on one rank: text alone and samples with images, whole and packed, against plain
transformers; or the refusal. Images are made by the layout that `apply` finds (`Handle.images`): of random values, and
of sizes that make a few features."""

import contextlib
import math
import re

import pictures
import small_vlm
import torch
import torch.distributed as dist
import yaml

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.hf.vision import why_no_images
from alstlib.planner.measure import verify

EXACT = {torch.float32: (1e-6, 1e-4), torch.float64: (1e-9, 1e-9)}
"""Largest relative error of the loss and of a gradient."""
WAYS = {"default": ({}, None), "chunks": ({"chunk": 4, "tiles": {"mlp": 5, "loss": 7}}, None), "blocks": ({}, 5)}
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


def judge(rank, world, kind, cases):
    """The outcome of each case of this type: exact, refused, wrong or crash, with the errors or the reason."""
    try:
        model = small_vlm.small_model(kind)
    except Exception as e:
        return [{"result": "not built", "reason": verify.why(e)} for _ in cases]
    ctx = alstlib.SPContext.create(world)
    found = _judged(model, ctx, cases)
    if wrong := [case for case in cases if found[case]["result"] == "wrong"]:
        with verify.in_full():
            found |= _judged(small_vlm.small_model(kind, torch.float64), ctx, wrong)
    return [found[case] for case in cases]


def _judged(model, ctx, cases):
    """The outcomes of these cases. The model is attached once for each way of running layers."""
    samples, plain, found = {}, {}, {}
    for how, (options, block) in WAYS.items():
        asked = [case for case in cases if case.endswith(f", {how}")]
        if found.get("images, default", {}).get("reason", "").startswith("images: "):
            found |= dict.fromkeys(asked, found["images, default"])
            continue
        try:
            handle = alstlib.apply(model, ctx, alstlib.Options(**options)) if asked else None
        except Exception as e:
            result = "refused" if isinstance(e, verify.REFUSALS) else "crash"
            outcome = {"result": result, "reason": verify.why(e)}
            found |= dict.fromkeys(asked, outcome)
            continue
        with handle or contextlib.nullcontext():
            for case in asked:
                found[case] = _one(handle, case.partition(", ")[0], block, samples, plain)
    return {case: found[case] for case in cases}


def _one(handle, data, block, samples, plain):
    """The outcome of one case; documents and plain transformers' gradients are kept in `samples` and `plain`."""
    model = handle.model
    if "images" in data and handle.images is None:
        return _refuses(handle)
    if block is not None and handle.facts.not_by_blocks:
        return {"result": "refused", "reason": f"ValueError: {handle.facts.not_by_blocks}"}
    try:
        if data not in samples:
            with handle.as_its_own():
                with torch.no_grad():
                    samples[data] = [document(model, handle.images, parts, i) for i, parts in enumerate(DATA[data])]
                plain[data] = pictures.plain_vlm(model, samples[data])
    except Exception as e:
        return {"result": "not built", "reason": f"plain transformers: {verify.why(e)}"}
    try:
        mean, got = _step(handle, samples[data], block)
    except Exception as e:
        refused = isinstance(e, verify.REFUSALS) and "use chunk=None" in str(e)
        return {"result": "refused" if refused else "crash", "reason": verify.why(e)}
    (loss, want), exact = plain[data], EXACT[model.dtype]
    want = {**{n: torch.zeros_like(g) for n, g in got.items() if "images" in data}, **want}
    errors, loss_error = verify.errors_of(got, want), abs(mean - loss) / abs(loss)
    worst = max(errors, key=errors.__getitem__)
    made = {"dtype": str(model.dtype), "loss": loss_error, "gradient": errors[worst]}
    if loss_error < exact[0] and errors[worst] < exact[1]:
        return {"result": "exact", "reason": "", **made}
    return {"result": "wrong", "reason": f"gradient of {worst}", **made}


def _refuses(handle):
    """The refusal of images, as a call with some gets it."""
    ids = torch.arange(4, 16)[None]
    try:
        handle.model(input_ids=ids, position_ids=torch.arange(12)[None], shift_labels=ids, pixel_values=torch.ones(1))
    except ValueError as e:
        if why_no_images(handle.model) in str(e):
            return {"result": "refused", "reason": f"images: {WHERE.split(verify.why(e))[0]}"}
    return {"result": "wrong", "reason": "images are not refused"}


def _step(handle, documents, block):
    model, ctx = handle.model, handle.ctx
    model.zero_grad()
    batch = shard_batch(pictures.joined(documents), ctx.sp, ctx.sp_rank, images=handle.images)
    if block is None:
        out = alstlib.causal_lm_loss(model, batch)
        out.loss.backward()
    else:
        out = alstlib.block_step(model, batch, block)
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for grad in grads.values() if ctx.sp > 1 else ():
        dist.all_reduce(grad, group=ctx.sp_group)
    return float(out.mean), {n: grad / ctx.sp for n, grad in grads.items()}


def document(model, layout, parts, seed):
    """A sample of text and images (`pictures.document`), of images as this model takes them."""
    g = torch.Generator().manual_seed(seed)
    ids, images = [], []
    for i, part in enumerate(parts):
        if part == "image":
            images.append(_image(layout, SIDES[(i + seed) % len(SIDES)], g, model.dtype))
            out = model.base_model.get_image_features(**layout.joined([images[-1]]))
            made = out.last_hidden_state if out.pooler_output is None else out.pooler_output  # Llama 4 has the first
            rows = made.flatten(0, -2) if isinstance(made, torch.Tensor) else torch.cat([*made])
            ids += [layout.token] * len(rows)
        else:
            ids += torch.randint(4, 80, (part,), generator=g).tolist()
    made = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])}
    made["labels"] = made["labels"].masked_fill(made["input_ids"] >= pictures.IMAGE, -100)
    return {**made, **(layout.joined(images) if images else {})}


def _image(layout, side, g, dtype):
    """The fields of an image with so many features along its sides; in pixels all images are padded to one size."""
    blank = layout.blank()
    shape, height, width = [*blank["pixel_values"].shape], *side
    if layout.sizes == "image_grid_thw":
        merge = math.isqrt(layout.unit)
        shape[0] = layout.unit * height * width
        pixels = torch.randn(shape, generator=g)
        more = {"image_grid_thw": torch.tensor([[1, merge * height, merge * width]])}
    elif layout.sizes:
        most, (high, wide) = max(map(max, SIDES)), (layout.unit * height, layout.unit * width)
        pixels = torch.zeros(*shape[:2], layout.unit * most, layout.unit * most)
        pixels[..., :high, :wide] = torch.randn(*shape[:2], high, wide, generator=g)
        more = {layout.sizes: torch.tensor([[high, wide]])}
    else:
        pixels = torch.randn(shape, generator=g)
        more = {name: value for name, value in blank.items() if name != "pixel_values"}
    return {"pixel_values": pixels.to(dtype), **more}
