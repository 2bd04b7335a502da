"""The picture of the course and its strips: every part is drawn, what it names is in colour, and texts can be read."""

import itertools
import re
from html import unescape

import pytest
from cases import check_refused, text_of

from alstlib.figures import layer
from alstlib.figures.layer import PARTS, draw_layer, save_svg
from alstlib.figures.lines import INK

SVG = "notebooks/images/layer.svg"


def test_an_unknown_part_is_refused_with_those_that_are_known():
    check_refused("part='mpl' must be one of logits, mlp, all_to_all, adapter", draw_layer, "mpl")


@pytest.mark.parametrize("part", PARTS)
def test_a_strip_has_what_its_part_names_in_colour(part):
    words, bright = PARTS[part]
    (axes,) = draw_layer(part).axes
    named = [text.get_text() for text in axes.texts if text.get_color() == "#111111"]
    boxes = [*layer._DEVICE, *((group, text) for group, _, text in layer._HOST)]
    assert sorted(named) == sorted(text for group, text in boxes if group in bright)
    assert part != "mlp" or named == ["Norm,\nMLP"]
    assert f"This lesson: {words}" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("part, width", [("", 1100), *((part, 935) for part in PARTS)])
def test_texts_lie_apart_inside_the_figure_and_are_large_enough(part, width):
    figure = draw_layer(part)
    figure.canvas.draw()
    texts = figure.axes[0].texts
    assert min(text.get_fontsize() for text in texts) >= 8
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    assert not [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
    assert figure.bbox.width == width
    assert not [name for name, box in boxes if min(box.x0, box.y0, width - box.x1, figure.bbox.y1 - box.y1) < 0]
    assert {text.get_color() for text in texts} <= {INK, "#111111", "#D55E00"}


def words(svg):
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", text_of(svg))]


def test_the_committed_picture_is_the_one_that_is_drawn(tmp_path):
    """Its words: coordinates differ a little between versions of matplotlib."""
    save_svg(str(tmp_path / "layer.svg"))
    assert words(SVG) == words(tmp_path / "layer.svg")
    assert "All-to-all" in words(SVG)
