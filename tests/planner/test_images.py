"""A plan with images: the tokens that they take, what the tower takes beside the text, and what is refused."""

import pictures
import pytest
from cases import check_refused, lines_of
from quick_steps import question, quick  # noqa: F401

from alstlib.planner.activations import TOWER, _of_block
from alstlib.planner.step_time import model_flops


@pytest.fixture
def folder(tmp_path):
    pictures.small_vlm("qwen2_5_vl").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def of_images(options):
    return question(f"--gpus 4 {options}")


def test_images_are_counted(folder):
    plain = of_images(f"--model {folder}")
    ask = of_images(f"--model {folder} --images 9 --image-size 80x112")
    images, text, found = ask.shape.images, plain.at(100_000), ask.at(100_000)
    said = "9 of 80x112 pixels in each sample, which take 5,040 of its tokens; a rank has at most 3"
    assert (ask.understood["images"], images.each, images.of_rank(4)) == (said, 20 * 28, 3)
    assert ask.shape.parameters == plain.shape.parameters  # a model of both kinds is loaded whole in any case
    assert found.device[TOWER] > 0
    assert found.host["checkpoints"] > text.host["checkpoints"]
    assert found.seconds["matrix products"] > text.seconds["matrix products"]
    more = model_flops(ask.shape, ask.run, 100_000) - model_flops(plain.shape, plain.run, 100_000)
    assert more == pytest.approx(27 * (images.products + images.attention))  # 9 images, a forward and a backward of two
    assert (ask.shortest, ask.longest().seq_len > 5040) == (5040, True)
    block = _of_block(ask.shape, 20_000, 100_000)
    assert block.images.count == 3  # 1.8 on average, and one more where they cross its border


REFUSED = """
--image-size 8x8                     -> images=0 must be at least 1
--images -1                          -> images=-1 must be at least 0
--images 2 --image-size 8by8         -> must have the form HEIGHTxWIDTH
--images 2 --preset paper            -> leave out --tree and --preset
--images 2 --tree 8K,2x4K            -> leave out --tree and --preset
--images 2 --set 'model.lora={r: 4}' -> model.lora is not planned with --images
"""


@pytest.mark.parametrize("options, said", lines_of(REFUSED))
def test_refused(alst, options, said):
    assert said in alst(f"plan --gpus 4 {options}", 2)


def test_too_short(folder):
    check_refused(
        "must be at least 1120: the tokens of its images",
        of_images,
        f"--model {folder} --images 2 --image-size 80x112 --seq-len 1000",
    )


def test_no_adapter_is_advised(folder):
    """Which is not planned with images: the advice would end with its refusal."""
    ask = of_images(f"--model {folder} --images 2 --image-size 80x112")
    assert not ask.at(10**9).fits
    assert all("LoRA" not in one.what for one in ask.remedies(10**9))
