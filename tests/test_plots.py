"""Figures say what they were given."""

from __future__ import annotations

from matplotlib.colors import to_hex

from alstlib import plots


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
