"""The picture that opens the lessons: every part is drawn, what it names is bright, and texts can be read."""

import itertools
import re
from html import unescape
from pathlib import Path

import pytest

from alstlib.figures.layer import PARTS, draw_layer, save_svg

SVG = Path(__file__).resolve().parents[2] / "notebooks" / "images" / "layer.svg"


def inks(part):
    return {text.get_text(): text.get_color() for text in draw_layer(part).axes[0].texts}


def test_an_unknown_part_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="part='mpl' must be one of memory, logits, mlp, all_to_all, adapter"):
        draw_layer("mpl")


def test_what_a_part_names_is_bright_and_the_rest_is_pale():
    whole, mlp = inks(""), inks("mlp")
    names = ("Data adapter", "Norm and MLP", "Attention", "Sum over ranks", "Model states")
    assert len({whole[name] for name in names}) == 1
    assert [name for name in names if mlp[name] == whole[name]] == ["Norm and MLP"]


def test_texts_lie_apart_inside_the_figure_and_are_large_enough():
    figure = draw_layer("time")  # of the longest words
    figure.canvas.draw()
    texts = figure.axes[0].texts
    assert min(text.get_fontsize() for text in texts) >= 8
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    assert not [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
    assert figure.bbox.width == 1100
    assert not [name for name, box in boxes if min(box.x0, box.y0, 1100 - box.x1, figure.bbox.y1 - box.y1) < 0]
    assert max(PARTS, key=lambda part: len(PARTS[part][0])) == "time"


def words(svg):
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg.read_text(encoding="utf-8"))]


def test_the_committed_picture_is_the_one_that_is_drawn(tmp_path):
    """Its words: coordinates differ a little between versions of matplotlib."""
    save_svg(str(tmp_path / "layer.svg"))
    assert words(SVG) == words(tmp_path / "layer.svg")
    assert "All-to-all" in words(SVG)
