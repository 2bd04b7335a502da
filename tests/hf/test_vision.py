"""Models that read images: loss and every gradient, the tower's too, are those of plain transformers."""

import peft
import pytest
import torch
import torch.distributed as dist
from cases import ALL_ON, attach, check_refused, gradients, on_ranks
from matrix import engine_of
from matrix import gradients as gradients_of
from pictures import IMAGE, MODELS, VIDEOS, document, joined, plain_vlm, rows_of, small_gemma, small_vlm
from transformers.modeling_layers import GradientCheckpointingLayer

import alstlib
from alstlib.data.images import deal, plan_features
from alstlib.data.shard import shard_batch
from alstlib.planner.measure.verify import errors_of, in_full

SEVERAL = [3, "image", 9, "image", 2, "image", 4]
CASES = {
    "several": [SEVERAL],
    "dense": [["image", 1, "image", 1, "image", 1, "image", 1, "image"]],
    "one": [["image", 21]],
    "none": [[23]],
    "at the end": [[2, "image", 2, "image"]],
    "packed": [[4, "image", 3], [6], [2, "image", 5, "image", 1]],
}
"""The documents of one row."""
WAYS = {
    "default": ({}, None, CASES),
    "chunks": ({"chunk": 5}, None, ["dense", "packed"]),
    "blocks": ({}, 5, ["dense", "packed"]),
}
"""The options, the tokens of a block, and the cases."""


def one_step(handle, train, whole, known, engine="average", driven=None, block=None):
    """Errors of the loss and of a gradient, and whose, of a step against what plain transformers makes of its samples;
    and the slabs that are not given back. `driven` is `train` in an engine."""
    (given,) = alstlib.SPDataLoader([whole], handle.ctx, replicated=True, images=handle.images)
    train.zero_grad()
    if block is None:
        out = alstlib.causal_lm_loss(driven or train, given)
        driven.backward(out.loss) if engine.startswith("zero") else out.loss.backward()
    else:
        out = alstlib.block_step(driven or train, given, block)
    loss, want = known
    got = gradients_of(train, engine) if handle.ctx.world_size > 1 else gradients(train)
    got = {n.removeprefix("base_model.model."): g for n, g in got.items()}  # a copy of PEFT's is of the model inside
    got |= {n: torch.zeros_like(w) for n, w in want.items() if n not in got and not w.any()}
    errors = errors_of(got, want)
    worst = max(errors, key=errors.__getitem__)
    return abs(float(out.mean) - loss) / abs(loss), errors[worst], worst, handle.store.leased


def step_on_rank(rank, world, name, parts, *, engine="average", change=None, dtype=None, block=None, **options):
    """What `one_step` finds; one row for each replica."""
    replicas = world if change == "replicas" else 1
    ctx = alstlib.SPContext.create(world // replicas)
    model = small_vlm(name, dtype or torch.float32)
    rows = [parts[i::replicas] for i in range(replicas)]
    rows = [[document(name, part, 7 * i + j) for j, part in enumerate(row)] for i, row in enumerate(rows)]
    for n, p in model.named_parameters():
        p.requires_grad_(change != "frozen tower" or "language_model" in n or "lm_head" in n)
        p.requires_grad_(p.requires_grad and (change != "frozen text" or not ("language_model" in n or "lm_head" in n)))
    train = model
    with attach(model, ctx, **options) as handle:
        if change == "LoRA":
            wanted = "q_proj|v_proj|qkv|proj"
            train = peft.get_peft_model(
                model, peft.LoraConfig(target_modules=rf".*({wanted})$", init_lora_weights=False)
            )
        with handle.as_its_own():
            known = plain_vlm(train, [one for row in rows for one in row])
        driven = fsdp2(train) if engine == "fsdp2" else engine_of(train, engine) if world > 1 else train
        whole = (rows_of if change == "padded samples" else joined)(rows[ctx.dp_rank])
        found = one_step(handle, train, whole, known, engine, driven, block)
        if engine.startswith("zero"):
            driven.destroy()
    return found


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module)
    return fully_shard(model)


def check(results, loss=1e-6, gradient=1e-4):
    """In fp32; a gradient that is zero but for rounding, as of a key's bias, is judged in fp64 alone."""
    for rank, (loss_error, error, name, leased) in enumerate(results):
        assert loss_error < loss, (rank, loss_error)
        assert error < gradient, (rank, error, name)
        assert leased == 0


def in_fp64(rank, world, name, cases, **how):
    with in_full():
        return {
            case: step_on_rank(rank, world, name, parts, dtype=torch.float64, **how) for case, parts in cases.items()
        }


def images_on_rank(rank, world, name):
    """Of each way of running layers, the errors of its cases; the model is attached once for all of them, and plain
    transformers runs on one rank for all ranks."""
    ctx, found = alstlib.SPContext.create(world), {}
    with in_full():
        model = small_vlm(name, torch.float64)
        samples = {case: [document(name, one, j) for j, one in enumerate(parts)] for case, parts in CASES.items()}
        known = [{case: plain_vlm(model, one) for case, one in samples.items()} if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(known, 0)
        for way, (options, block, cases) in WAYS.items():
            with attach(model, ctx, **options) as handle:
                for case in cases:
                    found[way, case] = one_step(handle, model, joined(samples[case]), known[0][case], block=block)
    return found


@pytest.mark.parametrize("sp", [3, 1])
@pytest.mark.parametrize("name", MODELS)
def test_images_are_exact(pools, name, sp):
    """Several images in a sample, one, none; some cross a border between slices, chunks or blocks, or lie at it; a
    dense sample has images of several ranks in one slice, which arrive in another order. What follows has two ranks."""
    for result in on_ranks(pools, sp, images_on_rank, name):
        check(result.values(), 1e-9, 1e-9)


def videos_on_rank(rank, world):
    """Frames are dealt one by one, images come before and after them, and a second document is packed behind."""
    parts = [[3, "video", 2, "image", 4, "video", 1], [2, "image", 2, "video", 3]]
    made = [in_fp64(rank, world, name, {name: parts})[name] for name in VIDEOS]
    return [*made, in_fp64(rank, world, "qwen3_vl", {"blocks": parts}, block=5)["blocks"]]


def test_videos_are_exact(ranks2):
    for result in ranks2(videos_on_rank):
        check(result, 1e-9, 1e-9)


def rows_on_rank(rank, world):
    parts = [[3, "image", 2, "image", 4], [2, "image", 17]]
    names = ("llava", "qwen2_vl", "idefics3")
    return [in_fp64(rank, world, name, {name: parts}, change="padded samples")[name] for name in names]


def test_padded_rows_are_exact(ranks2):
    for result in ranks2(rows_on_rank):
        check(result, 1e-9, 1e-9)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_on_one_rank_the_model_takes_what_its_processor_makes(name):
    """Without a plan: its own forward sees all images."""
    model, one = small_vlm(name, torch.float64), document(name, SEVERAL)
    types = {"mm_token_type_ids": (one["input_ids"] == IMAGE).long()} if name == "qwen2_vl" else {}
    with in_full():
        loss, want = plain_vlm(model, [one])
        with attach(model):
            out = model(**one, **types)
            out.loss.backward()
        errors = errors_of(gradients(model), want)
    assert abs(out.loss.item() - loss) < 1e-9 * loss
    assert max(errors.values()) < 1e-9


def ways_on_rank(rank, world):
    """Frozen towers and texts, adapters in both, and every way of running layers."""
    parts, made = [SEVERAL], {}
    for change in ("frozen tower", "frozen text", "LoRA"):
        made[change] = in_fp64(rank, world, "qwen3_vl", {change: parts}, change=change)[change]
    ways = {"all on": ALL_ON, "no checkpoints": {"checkpoint": False, "tiles": False}}
    ways |= {"chunks": {**ALL_ON, "chunk": 5}, "blocks": {"block": 5}}
    for name, options in ways.items():
        made[name] = in_fp64(rank, world, "qwen3_vl", {name: parts}, **options)[name]
    return made


@pytest.mark.parametrize("sp", [1, 2])
def test_what_trains_and_how_layers_run_does_not_matter(pools, sp):
    for result in on_ranks(pools, sp, ways_on_rank):
        check(result.values(), 1e-9, 1e-9)


def engines_on_rank(rank, world):
    """With one image, one rank's tower runs on a blank one; with replicas, all of one replica's do."""
    made = {}
    for engine in ("zero3", "fsdp2"):
        made[engine, "one image"] = step_on_rank(rank, world, "qwen3_vl", CASES["one"], engine=engine)
        parts = [[4, "image", 3, "image", 2], [17]]
        for block in (None, 9):  # in blocks, one replica has three and the other two
            made[engine, "one replica", block] = step_on_rank(
                rank, world, "qwen3_vl", parts, change="replicas", engine=engine, block=block
            )
    return made


def test_engines_that_gather_weights_do_not_wait(ranks2):
    for result in ranks2(engines_on_rank):
        check(result.values())


# ----- the plan


@pytest.mark.parametrize("sp", [1, 2, 3, 5])
def test_the_plan_brings_each_feature_to_its_placeholder(sp):
    """Features that say their places arrive in the order of a slice; images lie across rows and borders."""
    padded, at = (
        30,
        [torch.arange(2, 14), torch.tensor([15]), torch.arange(20, 29), torch.arange(29, 45), torch.arange(55, 60)],
    )
    owners = deal([len(one) ** 2 for one in at], sp)
    plans = [plan_features(at, owners, padded, sp, rank) for rank in range(sp)]
    made = [torch.cat([*(one for one, owner in zip(at, owners) if owner == r), torch.tensor([-1])]) for r in range(sp)]
    sent = [made[r][plan.send].split(plan.to_ranks) for r, plan in enumerate(plans)]
    for rank, plan in enumerate(plans):
        parts = [parts[rank] for parts in sent]
        assert [*map(len, parts)] == plan.from_ranks
        places = torch.cat(at)
        mine = places[places % padded // (padded // sp) == rank].sort().values
        assert torch.equal(torch.cat(parts)[plan.order], mine)


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


def test_positions_of_several_dimensions_are_those_of_the_whole_document():
    """Of each document in a packed row, with its own images, by the model's own function."""
    model = small_vlm("qwen2_vl")
    documents = [document("qwen2_vl", parts, i) for i, parts in enumerate(CASES["packed"])]
    with attach(model) as handle:
        slices = [shard_batch(joined(documents), 2, r, images=handle.images)["image_positions"] for r in range(2)]
    got, want = torch.cat(slices, 1), []
    for one in documents:
        ids, grid = one["input_ids"], one.get("image_grid_thw")
        want.append(model.model.get_rope_index(ids, (ids == IMAGE).long(), grid)[0].permute(1, 2, 0))
    want = torch.cat(want, 1)
    assert torch.equal(got[:, : want.shape[1]], want)
    assert not torch.equal(want[..., 1], want[..., 2])


# ----- refusals


def test_what_does_not_fit_is_refused():
    model, one = small_vlm("qwen2_vl"), joined([document("qwen2_vl", SEVERAL)])
    two = alstlib.SPContext(sp=2)
    with attach(model) as handle:
        check_refused("with replicated=True", alstlib.SPDataLoader, [one], two, images=handle.images)
        check_refused("give images=handle.images", shard_batch, one, 1, 0)
        short = {**one, "input_ids": one["input_ids"].masked_fill(torch.arange(one["input_ids"].shape[1]) == 3, 5)}
        check_refused(
            r"has \d+ placeholders of the token 90, but its 3 images", shard_batch, short, 1, 0, images=handle.images
        )
        check_refused("image_sizes: this model takes images as", shard_batch, {**one, "image_sizes": [[2, 2]]}, 1, 0,
                      images=handle.images)  # fmt: skip
        less = {n: t for n, t in one.items() if n != "pixel_values"}
        check_refused("but no image", shard_batch, less, 1, 0, images=handle.images)
        batch = shard_batch(one, 1, 0, images=handle.images)
        del batch["image_plan"]
        check_refused("without a plan cannot be cut into blocks", alstlib.block_step, model, batch, 4)


def test_models_whose_images_are_not_exact_are_refused_by_name():
    model = small_gemma()
    ids = torch.arange(3, 15)[None]
    with attach(model) as handle:
        assert handle.images is None
        given = {"input_ids": ids, "labels": ids, "pixel_values": torch.ones(1, 3, 8, 8)}
        check_refused("Gemma3ForConditionalGeneration .* in both directions", model, **given)
