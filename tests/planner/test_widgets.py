"""Controls: live ones follow their values, and where there is no kernel a plain view is left."""

from cases import check_refused

from alstlib.base.config import RunConfig, row_config
from alstlib.base.units import format_tokens
from alstlib.figures import plots
from alstlib.planner import widgets
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import longest
from alstlib.planner.tables import listed


def bar(width):
    return plots.paired({"a": (float(width), 1.0)}, ("this", "that"), "MiB", show=str)


CONTROLS = {"ranks": ([2, 4], 4), "heads": ([1, 8], 8)}


def draw(ranks, heads):
    return bar(ranks * heads), widgets.in_html(listed(("", "MiB"), [("a<b", str(ranks * heads))]))


def test_a_prediction_is_its_table_in_a_kernel_too(monkeypatch):
    """Where rich shows what it is given, and leaves a file empty."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    shape, machine = read_shape("tiny"), Machine()
    found = longest(shape, RunConfig(), machine)
    assert "weights" in widgets.told(found, machine)


def test_controls_draw_anew(monkeypatch):
    monkeypatch.delenv("ALST_STATIC", raising=False)
    ranks, heads, shown = widgets.follow(draw, **CONTROLS).children
    first = shown.value
    assert all(part in first for part in ("a&lt;b  32<", 'alt="figure for ranks 4, heads 8'))
    for control, value, product in ((ranks, 2, "a&lt;b  16<"), (heads, 1, "a&lt;b  2<")):
        control.value = value
        assert product in shown.value
    assert shown.value.partition("<pre")[0] != first.partition("<pre")[0]


def test_controls_without_a_kernel_show_the_first(monkeypatch):
    monkeypatch.setenv("ALST_STATIC", "1")
    figures = []
    monkeypatch.setattr("IPython.display.display", figures.append)
    left = widgets.follow(draw, **CONTROLS)
    assert [bar.get_width() for bar in figures[0].axes[0].patches] == [32.0, 1.0]
    assert "a&lt;b  32<" in left.data
    assert not hasattr(left, "children")


def test_a_figure_or_a_table_by_itself(monkeypatch):
    """With values named as lengths are, and a checkbox for a flag."""

    def one(tokens, table):
        return str(tokens) if table else bar(tokens)

    monkeypatch.setenv("ALST_STATIC", "1")

    def follow(table):
        return widgets.follow(one, tokens=([1000, 2000], 1000), table=((True, False), table))

    assert follow(False).axes
    assert follow(True).data == "1000"
    monkeypatch.delenv("ALST_STATIC")
    slider, box, shown = follow(False).children
    first = shown.value
    slider.value = 2000
    assert 'alt="figure for tokens 2K, table False"' in shown.value != first
    box.value = True
    assert shown.value == "2000"


def test_the_wall_marks_the_longest_that_fits():
    shape, lengths = read_shape("llama-3.1-8b"), [2**n for n in range(14, 24)]
    run = row_config("alst", RunConfig(model={"name": "llama-3.1-8b", "dtype": "bf16"}, engine={"sp": 0}))
    figure, table = widgets.wall(shape, run, Machine(gpus=8), lengths, "alst")
    assert f"{format_tokens(longest(shape, run, Machine(gpus=8)).seq_len)} tokens" in table
    assert figure.axes[0].get_title("left") == "alst"
    assert len(figure.axes[0].get_legend().texts) == len(widgets.COLOURS)
    assert figure.axes[0].get_xlim()[1] == lengths[-1]
    check_refused("gpu_memory=None", widgets.wall, shape, run, Machine(gpu_memory=None), lengths, "")
