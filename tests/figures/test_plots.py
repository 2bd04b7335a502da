"""Figures say what they were given."""

import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text

from alstlib.figures import plots
from alstlib.figures.lines import PLACES


def texts_of(part):
    """Of axes or a legend."""
    return [text.get_text().strip() for text in part.texts]


def test_a_training_curve_draws_every_step_of_every_run():
    runs = {"after": {3: 2.0, 4: 1.5}, "before": {1: 4.0, 2: 3.0, 3: 2.0}}
    (axes,) = plots.training(runs, {"saved": 2}).axes
    drawn = {line.get_label(): dict(zip(*line.get_data())) for line in axes.lines}
    assert drawn | runs == drawn
    assert texts_of(axes) == ["saved"]
    assert axes.get_ylim()[0] > 1.0  # losses fill the axis: it does not begin at 0
    assert "nats" in axes.get_ylabel()


def brightness(color):
    """Relative luminance, as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("background", ["#ffffff", "#111111"], ids=["light", "dark"])
def test_texts_and_axes_can_be_read_in_both_themes_of_jupyterlab(background):
    figure = plots.versus({"a": {1: 2.0, 2: 1.0}, "b": {1: 3.0, 2: 1.0}}, "x", "y", "title", marks={"here": 1.5})
    assert figure.get_facecolor()[3] == figure.axes[0].get_facecolor()[3] == 0  # transparent
    inks = {to_hex(text.get_color()) for text in figure.findobj(Text)}
    inks |= {to_hex(spine.get_edgecolor()) for spine in figure.axes[0].spines.values()}
    dark, light = sorted((brightness(*inks), brightness(background)))
    assert (light + 0.05) / (dark + 0.05) > 4


def test_places_can_be_told_apart_in_grey():
    looks = [(look["hatch"], round(brightness(look["facecolor"]), 1)) for look in PLACES.values()]
    assert len(set(looks)) == len({hatch for hatch, _ in looks}) == len({grey for _, grey in looks}) == len(PLACES)


def test_a_grid_shows_places_as_all_figures_do():
    figure = plots.blocks([[[["device", "host", -1]]]], [""], [""], legend={"host": "on the host"})
    device, host, nothing = figure.axes[0].patches
    for cell, place in ((device, "device"), (host, "host"), (figure.legends[0].get_patches()[0], "host")):
        assert to_hex(cell.get_facecolor()) == PLACES[place]["facecolor"].lower()
        assert cell.get_hatch() == PLACES[place]["hatch"]
    assert nothing.get_facecolor()[3] < 0.2


def test_pairs_of_bars_begin_at_zero():
    rows = {"a": (1234.56, 2.0), "b": (3.0, 4.0)}
    (axes,) = plots.paired(rows, ("measured", "predicted"), "peak [MiB]", show="{:,.1f}".format).axes
    assert axes.get_xlim()[0] == 0
    assert texts_of(axes) == ["1,234.6", "3.0", "2.0", "4.0"]
    assert texts_of(axes.get_legend()) == ["measured", "predicted"]


@pytest.mark.parametrize("draw, names", [(plots.training, ()), (plots.versus, ("x", "y")), (plots.degrees, ("y",))])
def test_any_number_of_lines_can_be_told_apart(draw, names):
    (axes,) = draw({f"run {i}": {1: 2.0 + i, 2: 1.0} for i in range(20)}, *names).axes
    lines = [line for line in axes.lines if str(line.get_label()).startswith("run")]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20


def test_a_legend_has_the_first_of_too_many_lines():
    legend = plots.peaks({f"row {i}": [(1000, 2**20), (2000, 2**21)] for i in range(25)}).axes[0].get_legend()
    assert texts_of(legend) == [f"row {i}" for i in range(10)]
    assert legend.get_title().get_text() == "and 15 more"


def test_parts_that_figures_know_differ_in_colour():
    """A hatch alone is hard to see in a thin area."""
    look = plots.looks([group[0] for group in plots.KNOWN])
    assert len({part["facecolor"] for part in look.values()}) == len(plots.KNOWN)
    assert not any(part["hatch"] for part in look.values())


def test_a_wide_grid_stays_on_the_page_and_its_texts_can_be_read():
    """White on the two darkest colours, black on the others."""
    grid = [list(range(7)) * 4]
    figure = plots.blocks([[grid]], [""], ["wide"], texts=[[[list("abcdefg") * 4]]], cell=(1, 0.3))
    assert figure.get_figwidth() == plots.PAGE
    inks = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert inks == {**dict.fromkeys("bcdef", "#111111"), "a": "white", "g": "white"}


def test_lines_of_memory_name_their_peaks_and_begin_at_zero():
    (axes,) = plots.memory_curves({"whole": [0, 2**21, 0], "tiles": [0, 2**20, 2**20]}).axes
    assert texts_of(axes.get_legend()) == ["whole: peak 2.00 MiB", "tiles: peak 1.00 MiB"]
    tried = {"a": [(1000, 2**29), (2000, 2**30)]}
    assert plots.peaks(tried).axes[0].get_ylim()[0] == 0
