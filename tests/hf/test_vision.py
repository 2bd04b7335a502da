"""Models that read images: loss and every gradient, the tower's too, are those of plain transformers."""

import contextlib
import functools

import peft
import pytest
import torch
import torch.distributed as dist
import yaml
from cases import attach, check_refusals, check_refused, check_step, freeze, gradients, on_ranks, own_step
from matrix import engine_of
from matrix import gradients as gradients_of
from pictures import IMAGE, MODELS, document, joined, plain_vlm, rows_of, small_gemma, small_vlm
from transformers.modeling_layers import GradientCheckpointingLayer

import alstlib
from alstlib.data.images import deal
from alstlib.data.shard import shard_batch
from alstlib.planner.measure.verify import in_full

CASES = yaml.safe_load("""
several: [[3, image, 9, image, 2, image, 4]]
dense: [[image, 1, image, 1, image, 1, image, 1, image]]
one: [[image, 21]]
none: [[23]]
at the end: [[2, image, 2, image]]
packed: [[4, image, 3], [6], [2, image, 5, image, 1]]
""")
"""The documents of one row."""
(SEVERAL,) = CASES["several"]
WAYS = {
    "default": ({}, None, CASES),
    "chunks": ({"chunk": 5}, None, ["dense", "packed"]),
    "blocks": ({}, 5, ["dense", "packed"]),
}
"""The options, the tokens of a block, and the cases."""


def one_step(handle, train, whole, known, engine="average", driven=None, block=None):
    """A step is what plain transformers makes of its samples, and gives all slabs back. `driven` is `train` in an
    engine: then a gradient that is zero but for rounding, as of a key's bias, is not judged closely."""
    (given,) = alstlib.SPDataLoader([whole], handle.ctx, replicated=True, images=handle.images)
    train.zero_grad()
    if block is None:
        out = alstlib.causal_lm_loss(driven or train, given)
        driven.backward(out.loss) if engine.startswith("zero") else out.loss.backward()
    else:
        out = alstlib.block_step(driven or train, given, block)
    got = gradients_of(train, engine) if handle.ctx.world_size > 1 else gradients(train)
    got = {n.removeprefix("base_model.model."): g for n, g in got.items()}  # a copy of PEFT's is of the model inside
    check_step((float(out.mean), got), known, *((1e-9, 1e-9) if engine == "average" else (1e-6, 1e-4)))
    assert handle.store.leased == 0


FROZEN = {"frozen text": ["language_model", "lm_head"], "frozen tower": ["visual"]}
"""Parts of the names of weights."""


def step_on_rank(rank, world, name, parts, *, engine="average", change=None, block=None, **options):
    """`one_step` of one row for each replica; in fp64, but under an engine that trains in fp32."""
    replicas = world if change == "replicas" else 1
    ctx, double = alstlib.SPContext.create(world // replicas), engine == "average"
    rows = [parts[i::replicas] for i in range(replicas)]
    rows = [[document(name, part, 7 * i + j) for j, part in enumerate(row)] for i, row in enumerate(rows)]
    train = model = small_vlm(name, torch.float64 if double else torch.float32)
    freeze(model, FROZEN.get(change, []))
    with in_full() if double else contextlib.nullcontext(), attach(model, ctx, **options) as handle:
        if change == "LoRA":
            config = peft.LoraConfig(target_modules=r".*(q_proj|v_proj|qkv|proj)$", init_lora_weights=False)
            train = peft.get_peft_model(model, config)
        with handle.as_its_own():
            known = plain_vlm(train, [one for row in rows for one in row])
        driven = fsdp2(train) if engine == "fsdp2" else engine_of(train, engine) if world > 1 else train
        whole = (rows_of if change == "padded samples" else joined)(rows[ctx.dp_rank])
        one_step(handle, train, whole, known, engine, driven, block)
        if engine.startswith("zero"):
            driven.destroy()


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module)
    return fully_shard(model)


def images_on_rank(rank, world, name, some):
    """`one_step` of some cases in each way of running layers; the model is attached once for all of them, and plain
    transformers runs on one rank for all ranks."""
    ctx, model = alstlib.SPContext.create(world), small_vlm(name, torch.float64)
    with in_full():
        samples = {case: [document(name, one, j) for j, one in enumerate(CASES[case])] for case in some}
        known = [{case: plain_vlm(model, one) for case, one in samples.items()} if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(known, 0)
        for options, block, cases in WAYS.values():
            with attach(model, ctx, **options) as handle:
                for case in [case for case in cases if case in some]:
                    one_step(handle, model, joined(samples[case]), known[0][case], block=block)


@pytest.mark.parametrize("sp, some", [(3, [*CASES][1:]), (1, ["none", "packed"])], ids=["3", "1"])
@pytest.mark.parametrize("name", MODELS)
def test_images_are_exact(pools, name, sp, some):
    """Many images in a sample, one, none; some cross a border between slices, chunks or blocks, or lie at it; a
    dense sample has images of several ranks in one slice, which arrive in another order. What follows has two ranks."""
    on_ranks(pools, sp, images_on_rank, name, some)


STEPS = yaml.safe_load("""
videos: &videos [[3, video, 2, image, 4, video, 1], [2, image, 2, video, 3]]
rows: &rows [[3, image, 2, image, 4], [2, image, 17]]
several: &several [[3, image, 9, image, 2, image, 4]]
one: &one [[image, 21]]
replicas: &replicas [[4, image, 3, image, 2], [17]]
tiles: &tiles {tiles: {mlp: 5, loss: 7, norm: 6}, offload: true, save_attention: true}

steps:
  # frames are dealt one by one, images come before and after them, and a second document is packed behind
  - [2, qwen2_vl, *videos, {}]
  - [2, qwen2_5_vl, *videos, {}]
  - [2, qwen3_vl, *videos, {}]
  - [2, qwen3_vl, *videos, {block: 5}]
  - [2, qwen3_vl_moe, *videos, {}]
  - [2, qwen3_5, *videos, {}]
  - [2, llava, *rows, {change: padded samples}]
  - [2, qwen2_vl, *rows, {change: padded samples}]
  - [2, idefics3, *rows, {change: padded samples}]
  # adapters lie in the tower and in the text
  - [1, qwen3_vl, *several, {change: LoRA}]
  - [2, qwen3_vl, *several, {change: LoRA}]
  - [2, qwen3_vl, *several, {change: frozen tower}]
  - [2, qwen3_vl, *several, {change: frozen text}]
  - [1, qwen3_vl, *several, *tiles]
  - [2, qwen3_vl, *several, *tiles]
  - [2, qwen3_vl, *several, {<<: *tiles, chunk: 5}]
  - [2, qwen3_vl, *several, {checkpoint: false, tiles: false}]
  - [1, qwen3_vl, *several, {checkpoint: false, tiles: false}]
  - [2, qwen3_vl, *several, {block: 5}]
  # with one image, one rank's tower runs on a blank one; with replicas, all of one replica's do, and in blocks of 9 one
  # has three and the other two
  - [2, qwen3_vl, *one, {engine: zero3}]
  - [2, qwen3_vl, *one, {engine: fsdp2}]
  - [2, qwen3_vl, *replicas, {engine: zero3, change: replicas}]
  - [2, qwen3_vl, *replicas, {engine: fsdp2, change: replicas}]
  - [2, qwen3_vl, *replicas, {engine: zero3, change: replicas, block: 9}]
  - [2, qwen3_vl, *replicas, {engine: fsdp2, change: replicas, block: 9}]
""")["steps"]
"""The ranks, the model, the documents, and how: an engine, what trains or how samples come, the length of a block, and
options."""


@pytest.mark.parametrize("ranks, name, parts, how", STEPS, ids=str)
def test_steps_are_exact(pools, ranks, name, parts, how):
    on_ranks(pools, ranks, step_on_rank, name, parts, **how)


def test_frequencies_by_the_longest_of_several_positions(monkeypatch):
    """An image takes up as many positions as its longer side, not as it has features."""
    text, *others = MODELS["qwen2_vl"]
    rope = {**text["rope_parameters"], "rope_type": "dynamic", "factor": 4.0}
    monkeypatch.setitem(MODELS, "qwen2_vl", ({**text, "max_position_embeddings": 16, "rope_parameters": rope}, *others))
    step_on_rank(0, 1, "qwen2_vl", [SEVERAL])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_on_one_rank_the_model_takes_what_its_processor_makes(name):
    """Without a plan: its own forward sees all images."""
    model, one = small_vlm(name, torch.float64), document(name, SEVERAL)
    types = {"mm_token_type_ids": (one["input_ids"] == IMAGE).long()} if name == "qwen2_vl" else {}
    with in_full():
        want = plain_vlm(model, [one])
        with attach(model):
            check_step(own_step(model, **one, **types), want, 1e-9, 1e-9)


# ----- the plan


def test_images_are_dealt_by_cost():
    assert deal([1, 9, 2, 3, 3], 2) == [1, 0, 1, 1, 1]
    assert deal([], 3) == []


def test_a_rank_is_given_the_images_that_it_is_dealt():
    """Each image on one rank; the rank without one gets the smallest, of which nothing is sent."""
    model, one = small_vlm("qwen2_vl"), joined([document("qwen2_vl", SEVERAL)])
    with attach(model) as handle:
        slices = [shard_batch(one, 4, r, images=handle.images) for r in range(4)]
    sizes = [tuple(part["image_grid_thw"].flatten().tolist()) for part in slices]
    assert sorted(sizes) == sorted([*map(tuple, one["image_grid_thw"].tolist()), (1, 2, 2)])
    sent = [len(part["image_plan"].plan().send) for part in slices]
    assert sorted(sent) == sorted([0, *(one["image_grid_thw"].prod(1) // 4).tolist()])
    for size, part in zip(sizes, slices):
        assert len(part["pixel_values"]) == size[1] * size[2]


# ----- refusals


REFUSED = r"""
alstlib.SPDataLoader([one], alstlib.SPContext(sp=2), images=handle.images) | with replicated=True
shard_batch(one, 1, 0)                                                     | give images=handle.images
shard({**one, "input_ids": short})              | has \d+ placeholders of the token 90, but its 3 images
shard({**one, "image_sizes": [[2, 2]]})         | image_sizes: this model takes images as
shard({n: one[n] for n in one if n != "pixel_values"})                     | but no image
alstlib.block_step(handle.model, unplanned, 4)                             | without a plan cannot be cut into blocks
"""


def test_what_does_not_fit_is_refused():
    model, one = small_vlm("qwen2_vl"), joined([document("qwen2_vl", SEVERAL)])
    short = one["input_ids"].masked_fill(torch.arange(one["input_ids"].shape[1]) == 3, 5)
    with attach(model) as handle:
        shard = functools.partial(shard_batch, sp=1, sp_rank=0, images=handle.images)
        unplanned = {n: t for n, t in shard(one).items() if n != "image_plan"}
        check_refusals(REFUSED, {**globals(), **locals()})


def test_models_whose_images_are_not_exact_are_refused_by_name():
    model = small_gemma()
    ids = torch.arange(3, 15)[None]
    with attach(model) as handle:
        assert handle.images is None
        given = {"input_ids": ids, "labels": ids, "pixel_values": torch.ones(1, 3, 8, 8)}
        check_refused("Gemma3ForConditionalGeneration .* in both directions", model, **given)
