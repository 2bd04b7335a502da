"""Parameters of the notebooks `run` and `finetune`: a run's groups, as papermill's command line assigns to them."""

import os
import re
import subprocess

import nbformat
import pytest
import yaml
from cases import check_refused, lines_of
from test_launch import PATHS, papermill, result_of

from alstlib.base.config import RunConfig, not_default, row_config, value_of
from alstlib.runs.parameters import Parameters


def cell(source, before=None):
    """The names after a parameters cell with this source, and what came before it."""
    names = dict(before or {})
    names["parameters"] = Parameters(names)
    exec(source, names)
    return names["parameters"], names


def config_of(source):
    parameters, names = cell(f"model, data, options, search = (getattr(parameters, n) for n in NAMES)\n{source}", GIVEN)
    return parameters.config(names)


GIVEN = {"NAMES": ("model", "data", "options", "search")}


CELLS = """
pass                                -> {}
config, out, force, worker, row = {}, 'x', True, 'y', '' -> {}
model.name = 'tiny'; data.seq_len = '4K'                 -> {model.name: tiny, data.seq_len: 4000}
options = {'tiles': 64}             -> {options.tiles: 64}
options.chunk = 64; options = {'tiles': 64}              -> {options.chunk: 64, options.tiles: 64}
options.tiles.mlp = 64              -> {options.tiles: {mlp: 64, loss: true, norm: true}}
options.chunk = 64; config = {'options': {'chunk': 32}}  -> {options.chunk: 32}
engine = {'sp': 2}                  -> {engine.sp: 2}
search = True                       -> {search.granule: 256, search.max: null}
search.max = 4096                   -> {search.granule: 256, search.max: 4096}
block = 64                          -> {block: 64}
"""


@pytest.mark.parametrize("source, fields", lines_of(CELLS))
def test_what_the_cell_says_is_the_run(source, fields):
    assert not_default(config_of(source)) == yaml.safe_load(fields)


def test_what_is_given_wins_over_the_row():
    assert config_of("row = 'alst'") == row_config("alst")
    assert config_of("row = 'alst'; options.offload = False") == row_config("alst").replace(options={"offload": False})
    tiles = config_of("row = 'alst'; options.tiles.mlp = 64").options.tiles
    assert tiles == {"loss": True, "mlp": 64}
    assert config_of("row = 'alst'; config = {'engine': {'sp': 1}}").engine.sp == 1


UNREAD = r"""
options.chunks = 3      -> unknown field of Options 'chunks'; did you mean 'chunk'\?
options.tiles.mpl = 3   -> options.tiles=.*'mpl'.* must be .*'mlp', 'loss' and 'norm'
seq_len = 4             -> unknown parameter 'seq_len'; did you mean 'data.seq_len'\?
config = {'seq_len': 4} -> unknown parameter 'seq_len'; did you mean 'data.seq_len'\?
row = 'ulises'          -> unknown row 'ulises'; did you mean 'ulysses'\?
data = 'mine.jsonl'     -> data='mine.jsonl' must be a mapping with fields of Data
"""


@pytest.mark.parametrize("source, why", lines_of(UNREAD))
def test_a_name_that_nothing_reads_is_refused(source, why):
    check_refused(why, config_of, source)


def test_there_is_no_group_of_another_name():
    with pytest.raises(AttributeError, match="no group of settings 'option': there are model, data, options"):
        Parameters({}).option  # noqa: B018


def test_cells_are_run_again():
    """With other parameters, after the notebook's other cells, and from its first cell on."""
    parameters, names = cell("options = parameters.options\noptions.chunk = 64")
    names["run"] = parameters.config(names)
    exec("options = parameters.options\noptions.tiles = 32", names)
    assert not_default(parameters.config(names)) == {"options.tiles": 32}
    parameters, names = cell("options = parameters.options\noptions.chunk = 16", names)
    assert not_default(parameters.config(names)) == {"options.chunk": 16}


@pytest.mark.launch
def test_papermills_command_line_runs_it(tmp_path):
    output, out = tmp_path / "o.ipynb", tmp_path / "run"
    given = {"model.name": "tiny", "data.seq_len": 256, "options.chunk": 64, "options.tiles.mlp": 32, "optim.steps": 1}
    options = " ".join(f"-p {name} {value}" for name, value in {**given, "out": out}.items())
    more = "{limits: {timeout: 300}, worker: fake_worker, config: {model.config: {fake: ok}}}"
    command = papermill(output, "--no-progress-bar", *options.split(), "-y", more)
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # a kernel reads it
    env |= {**PATHS, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not re.search("unknown parameter|Unable to parse", ran.stderr)  # of papermill: the parameters cell
    assert "starting 2 ranks" in ran.stdout
    assert re.search(r"step 2/2 .*\n", ran.stdout), "how far the run is, and not only which share of the cells is done"
    assert ran.stdout.splitlines()[-1] == "run  ok"
    result = result_of(out)
    said = RunConfig.from_dict(result["config"])
    assert {name: value_of(said, name) for name in given} == given
    assert said.limits.timeout == 300
    assert nbformat.read(output, 4).cells[-1].outputs
