"""What images take: a simulated tower against real tensors, and a plan against a real rank's step."""

import pictures
import pytest
import torch
from cases import check_refused, values_of
from torch import nn

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.sizing import as_on
from alstlib.data.shard import shard_batch
from alstlib.hf.loading.configs import find_config
from alstlib.hf.vision import image_layout
from alstlib.planner import fits
from alstlib.planner.activations import activations
from alstlib.planner.measure import towers
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.measure.simulate import drop_gradients, fake_ranks, roomy, whole_model
from alstlib.planner.model_shapes import read_shape

SIZES = {"qwen2_vl": (40, 56), "qwen2_5_vl": (40, 56), "llava": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("towers")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """One for all: towers of the same model are simulated once."""
    monkeypatch.setenv(fits.CACHE_VARIABLE, str(folder / "cache"))
    fits._known.cache_clear()


def run_of(folder, name, **options):
    pictures.small_vlm(name).config.save_pretrained(folder / name)
    fields = {"tiles": {"mlp": 128, "loss": 64, "norm": 256}, "save_attention": False, "attention": "sdpa", **options}
    return RunConfig(model={"name": str(folder / name), "dtype": "fp32"}, options=fields)


def sample_of(layout, one, images, tokens):
    """A sample of `tokens` tokens with so many images at equal distances: of two ranks each is sent some features, as
    the group that sends nothing refuses empty buffers."""
    features = int(one["image_grid_thw"].prod()) // layout.unit if layout.sizes else 16  # 8 x 8 pixels, patches of 2

    def picture(*_):
        return [layout.token] * features, {**one, "pixel_values": torch.randn(one["pixel_values"].shape)}

    parts = ["image", tokens // images - features] * images
    return pictures.sample([*parts, tokens % images], 0, picture)


def real_step(run, ranks, tokens, images, size):
    """Device and host bytes of the last rank's step with real tensors, over a group that sends nothing."""
    run = roomy(run)
    model = whole_model(run, "cpu", images=True)
    drop_gradients(model)
    with fake_ranks(ranks) as ctx, as_on("cpu"), alstlib.apply(model, ctx, run.options) as handle:
        one = towers._image(model, handle.images, size)
        data = sample_of(handle.images, one, images, tokens)
        batch = shard_batch(data, ctx.sp, ctx.sp_rank, images=handle.images)
        with Ledger(stores=[handle.store]) as ledger:
            start = ledger.device_bytes
            alstlib.causal_lm_loss(model, batch).loss.backward()
        return ledger.device_peak - start + batch["pixel_values"].nbytes, handle.store.peak_nbytes


STEPS = """
qwen2_5_vl -> 1 -> 2  -> 300  -> true
qwen2_5_vl -> 2 -> 4  -> 2500 -> true
qwen2_5_vl -> 1 -> 3  -> 1600 -> false
llava      -> 2 -> 64 -> 2400 -> true
qwen2_vl   -> 2 -> 4  -> 1200 -> true
"""


@pytest.mark.parametrize("name, ranks, images, tokens, offload", values_of(STEPS))
def test_a_rank_with_images_takes_what_is_planned(name, ranks, images, tokens, offload, folder):
    """Where the tower has the peak, and where the decoder has it, beside what the tower keeps."""
    run = run_of(folder, name, checkpoint=True, offload=offload)
    shape = read_shape(run.model.name, images=images, image_size=SIZES[name])
    planned = activations(shape, run, ranks, tokens, "cpu", workspace=False)
    device, host = real_step(run, ranks, tokens, images, SIZES[name])
    assert planned.peak == pytest.approx(device, rel=0.03), planned.place
    assert planned.host == host


def test_flops_and_tokens_are_those_of_the_real_tower():
    """Matrix products by the shapes of what goes through modules, and attention within windows and images."""
    name = "qwen2_5_vl"
    model, counted = pictures.small_vlm(name), []
    layout = image_layout(model)

    def count(module, args, out):
        counted.append(2 * out.numel() * module.weight[0].numel())

    for module in model.base_model.visual.modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            module.register_forward_hook(count)
    one = towers._image(model, layout, (32, 48))
    with torch.no_grad():
        out = model.base_model.get_image_features(**{**one, "pixel_values": torch.randn(one["pixel_values"].shape)})
    twin = pictures.small_vlm(name)
    twin.set_attn_implementation("sdpa")
    made = towers._step(twin.to("meta"), roomy(RunConfig()), "cpu", layout, one, 1)
    assert made["tokens"] == len(torch.cat([*out.pooler_output])) == 96
    assert made["products"] == sum(counted)
    windows, width = [16] * 24, model.config.vision_config.hidden_size  # of 8 x 8 pixels; the second layer has none
    assert made["attention"] == sum(4 * n**2 * width for n in (*windows, 384))


def test_sizes_are_those_of_the_processor():
    model, process = pictures.small_vlm("qwen2_vl"), pictures.processor().image_processor
    layout = image_layout(model)
    for height, width in ((12, 16), (13, 10), (18, 19)):
        made = process(images=[torch.zeros(3, height, width, dtype=torch.uint8).numpy()], return_tensors="pt")
        assert torch.equal(towers._image(model, layout, (height, width))["image_grid_thw"], made["image_grid_thw"])


REFUSED = """
llava    -> [8, 12] -> takes images of 8x8 only
qwen2_vl -> null    -> say which with --image-size
mistral3 -> null    -> only plans of llava
internvl -> null    -> only plans of llava, qwen2_vl, qwen2_5_vl
"""


@pytest.mark.parametrize("name, size, said", values_of(REFUSED))
def test_refused(name, size, said, tmp_path):
    check_refused(said, read_shape, run_of(tmp_path, name).model.name, images=1, image_size=size and tuple(size))


def test_models_of_one_text_with_other_towers_are_told_apart(tmp_path):
    """Before, the second one got what was kept of the first."""
    config, asked, texts = pictures.small_vlm("qwen2_vl").config, set(), []
    for depth in (2, 3):
        config.vision_config.depth, name = depth, str(tmp_path / str(depth))
        config.save_pretrained(name)
        texts.append(find_config(name))
        asked.add(fits.StepQuestion(RunConfig(model={"name": name}), 1, "cuda").text)
    assert texts[0] == texts[1]
    assert len(asked) == 2
