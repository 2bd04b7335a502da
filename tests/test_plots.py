"""Figures say what they were given, and controls draw them anew."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.colors import to_hex

from alstlib import plots, widgets


def test_a_training_curve_draws_every_step_of_every_run() -> None:
    (axes,) = plots.training({"after": {3: 2.0, 4: 1.5}, "before": {1: 4.0, 2: 3.0, 3: 2.0}}, {"saved": 2}).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(zip(*lines["after"].get_data())) == [(3, 2.0), (4, 1.5)]
    assert list(zip(*lines["before"].get_data())) == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert (lines["after"].get_linestyle(), lines["before"].get_linestyle()) == ("-", "None")
    assert lines["before"].get_marker() in plots.MARKERS
    assert [text.get_text().strip() for text in axes.texts] == ["saved"]
    assert axes.get_ylim()[0] == 0
    assert "nats" in axes.get_ylabel()


def test_bars_have_names_numbers_and_colours_that_differ() -> None:
    (axes,) = plots.bars({"a": 1000.0, "b": 2.5, "c": 0.0}, "sent [MiB]", "title").axes
    assert [bar.get_width() for bar in axes.patches] == [1000.0, 2.5, 0.0]
    assert [text.get_text().strip() for text in axes.texts] == ["1,000.0", "2.5", "0.0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert [to_hex(bar.get_facecolor()).upper() for bar in axes.patches] == list(plots.PALETTE[:3])
    assert len({bar.get_hatch() for bar in axes.patches}) == 3
    assert axes.get_xlabel() == "sent [MiB]"


def draw(ranks: int, heads: int) -> tuple[Any, str]:
    return plots.bars({"a": float(ranks * heads)}, "MiB"), widgets.html_table(
        ("", "MiB"), [("a<b", str(ranks * heads))]
    )


def test_controls_draw_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALST_STATIC", raising=False)
    ranks, heads, shown = widgets.follow(draw, ranks=([2, 4], 4), heads=([1, 8], 8)).children
    first = shown.value
    assert ">32<" in first
    assert "a&lt;b" in first
    assert 'alt="figure for ranks 4, heads 8' in first
    ranks.value = 2
    assert ">16<" in shown.value
    heads.value = 1
    assert ">2<" in shown.value
    assert shown.value.partition("</table>")[0] != first


def test_controls_without_a_kernel_show_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALST_STATIC", "1")
    figures: list[Any] = []
    monkeypatch.setattr("IPython.display.display", figures.append)
    left = widgets.follow(draw, ranks=([2, 4], 4), heads=([1, 8], 8))
    assert [bar.get_width() for bar in figures[0].axes[0].patches] == [32.0]
    assert ">32<" in left.data
    assert not hasattr(left, "children")
