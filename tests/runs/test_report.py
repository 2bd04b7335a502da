"""The page of a sweep: whole, escaped, and with nothing outside it."""

import itertools
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
import rich.console
import yaml

from alstlib.base.config import RunConfig
from alstlib.figures import plots
from alstlib.runs import report, results
from alstlib.runs.sweeps import load_spec, write_record

NASTY = "<script>alert('x')</script> & \"quoted\""


class Page(HTMLParser):
    """Tags with their attributes, and text outside scripts and styles."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.open, self.said, self.text = [], [], "", path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += "" if self.open[-1:] == ["style"] else data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def links(self):
        return [unquote(a["href"]) for a in self.all("a")]


def put(folder, row, status="ok", run=None, error=None, **metrics):
    """A result in the folder of its row."""
    run = (run or RunConfig()).replace(row=row.rpartition("/")[2].replace(" ", "_"))
    made = results.new_result(run, status, metrics=metrics, error=error, device="cpu")
    (folder / row).mkdir(parents=True)
    results.write_result(folder / row / "result.json", made)


def page_of(folder, *of):
    """Its page is written and read."""
    report.tell(folder, *of)
    return Page(folder / "report.html")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Results of each kind: measured and predicted, with trials, failed with everything that HTML could trip over."""
    folder = tmp_path_factory.mktemp("sweep")
    metrics = {
        "seq_len": 512, "tokens_per_step": 512, "step_seconds": [2.0], "loss": [3.0, 2.5, 2.25],
        "device_peak_bytes": [2**20, 3 * 2**20], "host_peak_bytes": [2**20, 2**20],
        "predicted": {"step_seconds": 1.5, "device_peak_bytes": 5 * 2**20, "host_peak_bytes": 2**21},
    }  # fmt: skip
    base = RunConfig(engine={"world_size": 2}, limits={"device_memory": "4MiB"})
    error = {"type": "Boom", "message": NASTY, "log_tail": f"the end {NASTY}"}
    put(folder, "alst", run=base, **metrics)
    put(folder, "ulysses+offload", run=base, **metrics)
    put(folder, "bad", "error", base.replace(data={"name": NASTY}), error)
    for row in folder.iterdir():
        (row / "run.ipynb").write_text("{}")
    return folder, page_of(folder)


def test_the_page_is_well_formed_and_what_results_say_is_text(written):
    _, page = written
    assert page.open == []
    for text in ("3.00 MiB", "5.00 MiB", "predicted device peak", "predicted step", "1.5 s", "torch", "git commit"):
        assert text in page.said, text
    assert len(page.all("details")) == 3 + 1  # configurations, and the log of the one that failed
    assert page.said.count(NASTY) >= 3  # the error, the log, the configuration
    assert "<script" not in page.text


def test_nothing_is_loaded_from_elsewhere_and_links_lead_to_files(written):
    folder, page = written
    assert page.all("link") == []
    (image,) = page.all("img")
    assert image["src"].startswith("data:image/png;base64,")
    assert len(image["alt"]) > 20
    links = page.links()
    assert all(link[0] == "#" or (folder / link).is_file() for link in links)
    assert sum(link.endswith("run.ipynb") for link in links) == 3
    assert not re.search(r"url\(|@import|https?://", page.text)
    assert str(folder) not in page.text


def test_rows_of_the_same_name_in_several_sweeps_stay_apart(tmp_path):
    """Ids and figures of `alst report` over a folder of sweeps."""
    for row in ("first/alst", "first/only first", "the second/alst", "the second/only the second"):
        predicted = {"device_peak_bytes": 2**21}
        put(tmp_path, row, loss=[3.0, 2.5, 2.25], device_peak_bytes=[2**20], predicted=predicted)
    page = page_of(tmp_path)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {"row-first/alst", "row-the_second/alst", "row-first/only_first", "row-the_second/only_the_second"}
    assert named <= set(ids)
    assert {link[1:] for link in page.links() if link[0] == "#"} <= set(ids)
    assert len(page.all("img")) == 1


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are put into pages."""
    made, data_uri = [], plots.data_uri
    monkeypatch.setattr(plots, "data_uri", lambda figure, dpi: made.append(figure) or data_uri(figure, dpi))
    return made


def tile_sweep(folder):
    """A spec over the size of a tile, in an order that is not the alphabet's, of which the second row never ran; its
    results and their page."""
    rows = [{"name": f"tile-{size}", "options.tiles": size or 1024} for size in (64, 256, None)]
    path = folder / "tiles.yaml"
    path.write_text(yaml.safe_dump({"name": "tiles", "base": {"model.name": "tiny"}, "rows": rows}))
    spec = load_spec(path, folder / "out")
    for i, (row, config) in enumerate(spec.rows.items()):
        if i != 1:
            put(spec.out, row, run=config, seq_len=512, step_seconds=[2.0 + i], device_peak_bytes=[(3 + i) * 2**20])
    return spec, page_of(spec.out, spec)


def test_rows_come_in_the_specs_order_with_the_swept_field(tmp_path, alst):
    spec, page = tile_sweep(tmp_path)
    names = ["tile-64", "tile-None"]
    assert re.findall(r">(?:<a[^>]*>)?(tile-\w+)<", page.text)[:2] == names
    assert ">options.tiles<" in page.text
    table = alst(f"report {spec.path} --out {spec.out}")
    assert "| row | status | mode | options.tiles |" in table
    write_record(spec)
    for shown in (table, alst(f"report {spec.out}")):  # by the record of the folder
        assert re.findall(r"\| (tile-\w+) \| ok \| real \| (\w+) ", shown) == [*zip(names, ("64", "1024"))]


def test_a_terminal_shows_a_column_for_each_row(tmp_path, monkeypatch, capsys):
    spec, _ = tile_sweep(tmp_path)
    capsys.readouterr()
    rows = results.table(results.collect(spec.out, spec.rows))
    rows[0]["notes"] = ["a note"]
    terminal = rich.console.Console(force_terminal=True, width=60, color_system=None, markup=False)
    monkeypatch.setattr(report, "console", lambda: terminal)
    report.show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["row", "tile-64", "tile-None"]
    assert lines[-1] == "- tile-64: a note"


def test_a_sweep_over_one_number_is_drawn_over_it(tmp_path, drawn):
    spec, page = tile_sweep(tmp_path)
    said = [image["alt"].partition(". ")[0] for image in page.all("img")]
    assert said == ["Step over the swept field", "Device peak over the swept field"]
    found = results.collect(spec.out)
    for one, rate in zip((*found, {**found[0], "label": "none"}), (1e-5, 0.0, None)):
        one["config"] = {**one["config"], "optim": {"learning_rate": rate}, "options": {}}
    drawn.clear()
    (made, _) = report.figures(found)
    assert made["what"].startswith("The rows differ in optim.learning_rate only.")
    (axes,) = drawn[0].axes
    (line,) = axes.get_lines()
    assert list(zip(*line.get_data())) == [(0.0, 4.0), (1e-5, 2.0)]
    assert axes.get_xlabel() == "optim.learning_rate"


def test_a_sweep_over_more_than_a_number_is_not_drawn(tmp_path):
    """Two fields; and one row that ran."""
    spec, _ = tile_sweep(tmp_path)
    found = results.collect(spec.out)
    assert not list(report.figures(found[:1]))
    found[0]["config"]["optim"]["seed"] = 2
    assert {"options.tiles", "optim.seed"} <= set(results.table(found)[0])
    assert not list(report.figures(found))


def test_a_figure_that_fails_says_so_and_the_others_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(report.FIGURES, "Step over the swept field", lambda *_: 1 / 0)
    _, page = tile_sweep(tmp_path)
    assert page.open == []
    assert len(page.all("img")) == 1
    assert "It could not be drawn: ZeroDivisionError" in page.said


def test_losses_are_drawn_with_those_of_an_evaluation(tmp_path):
    for row, end in (("full", 2.0), ("lora", 2.5)):
        losses = {"loss": [4.0, 3.0, end], "loss_steps": [5, 10, 15]}
        put(tmp_path, row, **losses, eval_loss=[3.5, end], eval_steps=[7, 15])
    (made,) = report.figures(found := results.collect(tmp_path))
    assert "documents that the model is not trained on" in made["what"]
    assert report.by_step(found[0]["metrics"], "loss", "loss_steps") == {5: 4.0, 10: 3.0, 15: 2.0}
    assert report.by_step({"loss": [4.0, None]}, "loss", "loss_steps")[1] == 4.0


def test_results_that_cannot_be_used_are_not_said_to_be_missing(tmp_path, alst):
    (tmp_path / "result.json").write_text("{")
    with pytest.warns(UserWarning, match="left out"):
        assert "that can be used" in alst(f"report {tmp_path}", 2)


@pytest.mark.parametrize("count", [20, 200])
def test_figures_of_many_rows_have_room_for_their_lines(drawn, recwarn, count):
    """A legend of 200 names left none: matplotlib warned that the axes had collapsed to zero."""
    found = []
    for i in range(count):
        metrics = {
            "loss": [3.0, 2.0, 1.0 + i / count],
            "step_seconds": [1.0 + i],
            "eval_loss": [2.5],
            "eval_steps": [2],
        }
        run = RunConfig(row=f"row-{i:03}", optim={"learning_rate": 1e-5 * (i + 1)})
        found.append({**results.new_result(run, "ok", metrics=metrics), "label": run.row})
    swept = ["Step over the swept field", "Last loss over the swept field"]
    assert [one["title"] for one in report.figures(found)] == [*swept, "Losses"]
    assert [
        str(w.message) for w in recwarn if not issubclass(w.category, ResourceWarning)
    ] == []  # others may leave those
    for figure in drawn:
        (axes,) = figure.axes
        assert axes.get_window_extent().width > 0.6 * figure.get_window_extent().width
        ticks = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ticks))


def test_a_page_elsewhere_links_to_the_results(written, tmp_path):
    folder, _ = written
    report.tell(folder, page=(path := tmp_path / "deep/page.html"))
    links = [link for link in Page(path).links() if link[0] != "#"]
    assert links
    assert all((path.parent / link).is_file() for link in links)
