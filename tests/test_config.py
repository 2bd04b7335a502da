"""Configurations: units, refusals that say what would work, changes, and rows that differ only in what they name."""

import ast
import json

import pytest
import yaml
from cases import ROOT, check_refused, lines_of, values_of
from operators import error_of
from pydantic import ValidationError

from alstlib.base.config import (
    FIELDS,
    GROUPS,
    PAPER_ROWS,
    ROWS,
    RunConfig,
    flat,
    merged,
    not_default,
    row_config,
    value_of,
)
from alstlib.base.options import Options
from alstlib.base.units import parse_quantity

QUANTITIES = """
3.7M    -> 3_700_000
500K    -> 500_000
80GB    -> 80_000_000_000
64GiB   -> 68_719_476_736
1.5 TiB -> 1_649_267_441_664
'2_048' -> 2048
'12'    -> 12
12B     -> 12
.5k     -> 500
1gb     -> 1_000_000_000
7       -> 7
7500.0  -> 7500
"""


@pytest.mark.parametrize("given, number", values_of(QUANTITIES))
def test_quantities(given, number):
    assert parse_quantity(given) == number


@pytest.mark.parametrize("text", ["", "many", "12 XB", "1e6", "-5", "5 5", True, "GB", 7.9, "7.9", None])
def test_what_is_no_quantity(text):
    check_refused("seq_len=", parse_quantity, text, "seq_len")


REFUSED = """
data.seq_len: 0                  -> data.seq_len=0 must be a whole number of at least 1, such as 2048 or 3.7M
optim.steps: 0                   -> optim.steps=0 must be a whole number of at least 1
optim.steps: 2.7                 -> optim.steps=2.7 must be a whole number of at least 1
optim.steps: true                -> optim.steps=True must be a whole number of at least 1
optim.steps: null                -> optim.steps=None must be a whole number of at least 1
optim.warmup_steps: -1           -> optim.warmup_steps=-1 must be a whole number of at least 0
limits.device_memory: much -> limits.device_memory='much' must be a whole number of at least 1, such as 80GB or 64GiB
engine.zero_stage: 4             -> engine.zero_stage=4 must be one of 0, 1, 2, 3
engine.zero_stage: true          -> engine.zero_stage=True must be one of 0, 1, 2, 3
options.offload: disk            -> options.offload='disk' must be True or False, or 'sync'
options.attention: fast          -> options.attention='fast' must be one of 'auto', 'sdpa', 'cpu'
model.dtype: fp16                -> model.dtype='fp16' must be one of
model.liger: loss                -> model.liger='loss' must be True, False or 'auto'
options.save_attention: some     -> options.save_attention='some' must be True, False or 'auto'
data.packed: perhaps             -> data.packed='perhaps' must be True or False
options.tiles: 0                 -> options.tiles=0 must be True, False or a tile of at least 1 token, or a mapping of
options.tiles.mlp: 1.5           -> 'mlp': 1.5
options.tiles.mpl: 1             -> must be True, False or a tile of at least 1 token, or a mapping of 'mlp', 'loss'
options.checkpoint: perhaps      -> options.checkpoint='perhaps' must be True or False
options.host_memory: -1 -> options.host_memory=-1 must be a whole number of at least 1, such as 80GB
{options.offload: true, options.disk: {1: 2}} -> unknown field of Disk '1'; known: folder, bytes
options.chunk: 2.5               -> options.chunk=2.5 must be a whole number of at least 1
options.chunk: 0 -> options.chunk=0 must be a whole number of at least 1, such as 2048 or 3.7M, or 'auto'
{options.checkpoint: false, options.chunk: 64} -> options.chunk=64 recomputes layers chunk by chunk
{options.checkpoint: false, options.offload: sync} -> it needs checkpoint=True
{options.checkpoint: false, options.save_attention: true} -> it needs checkpoint=True
options.on_host: hidden          -> options.on_host='hidden' moves tensors to the host: it needs offload=True
{options.offload: true, options.on_host: hidden} -> works on layers that run in chunks: give chunk too
{options.offload: true, options.on_host: hidden+kv} -> give options.chunk too, such as 'auto', or block
{options.chunk: 4, options.offload: true, options.on_host: hidden, options.tiles.loss: false} -> needs the loss in tiles
contrib.sparse: {top: 4}         -> works on layers that run in chunks: give options.chunk too
{contrib.sparse: {tops: 4}, options.chunk: 64} -> unknown field of sparse 'tops'; did you mean 'top'?
{contrib.sparse: {last: 4}, options.chunk: 64} -> needs top, the number of pages chosen by their scores
engine.sp: -1                    -> engine.sp=-1 must be a whole number of at least 0
{engine.sp: 3, engine.world_size: 4} -> engine.sp=3 does not divide world_size=4
{engine.offload_params: true, engine.zero_stage: 2} -> needs zero_stage=3, not 2
{engine.offload_optimizer: true, engine.zero_stage: 0} -> needs zero_stage 1, 2 or 3
engine.offload_optimizer: disk   -> engine.offload_optimizer='disk' must be True, False or 'nvme'
engine.offload_optimizer: nvme   -> nvme_path=None must be a folder on a local disk, such as '/scratch'
engine.nvme_path: files          -> nvme_path='files' must be a folder on a local disk, such as '/scratch', with
{engine.offload_optimizer: nvme, engine.nvme_path: x, engine.zero_stage: 2} -> needs zero_stage=3, not 2: DeepSpeed's
{engine.offload_optimizer: nvme, engine.nvme_path: x, engine.fsdp: true} -> is DeepSpeed's: leave fsdp out
engine.offload_params: nvme      -> nvme_path=None must be a folder on a local disk
{data.batch_size: 2, data.packed: true} -> data.batch_size=2 must be 1
{block: 4, options.chunk: 4}     -> exclude each other
{emulate: 4, engine.world_size: 2} -> engine.world_size=2 must be 1
output.merge_lora: true          -> give model.lora too
data.eval: 1.5                   -> data.eval=1.5 must be a share between 0 and 1
optim.learning_rate: .nan        -> optim.learning_rate=nan must be a number of at least 0
optim.learning_rate: fast        -> optim.learning_rate='fast' must be a number of at least 0, such as 1e-4
optim.learning_rate: true        -> optim.learning_rate=True must be a number
optim.weight_decay: .inf         -> optim.weight_decay=inf must be a number of at least 0
limits.timeout: -1               -> limits.timeout=-1 must be a number of at least 0, such as 3600, or None
model.name: 7                    -> model.name=7 must be a text
data.name: null                  -> data.name=None must be a text
model.config: [1]                -> model.config=[1] must be a mapping
model: tiny                      -> model='tiny' must be a mapping with fields of Model
search: 5                        -> search=5 must be a mapping with fields of Search, or None
search.granule: 0                -> search.granule=0 must be a whole number of at least 1
peers: 5                         -> peers=5 must be a list of texts
output.save_to: 5                -> output.save_to=5 must be a text, or None
row: ../../x                     -> row='../../x' must be the name of a folder: letters, digits and _ . + - only
row: ..                          -> row='..' must be the name of a folder
data.seqlen: 5                   -> unknown field of data 'seqlen'; did you mean 'seq_len'?
seq_len: 5                       -> unknown parameter 'seq_len'; did you mean 'data.seq_len'?
chunk: 5                         -> unknown parameter 'chunk'; did you mean 'options.chunk'?
optims: {}                       -> unknown parameter 'optims'; did you mean 'optim'?
qqq: 5                           -> unknown parameter 'qqq'; known: row, model
"""


@pytest.mark.parametrize("changes, message", lines_of(REFUSED))
def test_refusals(changes, message):
    refused = error_of(RunConfig.from_dict, yaml.safe_load(changes))
    assert message in refused
    assert "\n" not in refused


def test_options_are_refused_by_their_own_names():
    assert error_of(Options, chunk=0).startswith("chunk=0 must be a whole number")
    assert error_of(Options, chunks=3).startswith("unknown field of Options 'chunks'; did you mean 'chunk'?")
    assert error_of(Options, attention=int).startswith("attention=int is a class; give a function, or an instance")


VALUES = """
optim.learning_rate: '1e-4'       -> 1e-4
optim.max_grad_norm: '0.5'        -> 0.5
optim.learning_rate: 0            -> 0
data.packed: 'false'              -> False
model.trust_remote_code: 'no'     -> False
engine.prefetch: 'True'           -> True
options.tiles: 'false'            -> False
options.tiles: 'true'             -> True
options.tiles: 1                  -> 1
options.tiles.norm: 4K            -> 4000
model.liger: auto                 -> 'auto'
model.liger: 'false'              -> False
options.save_attention: 1         -> True
optim.seed: '8'                   -> 8
engine.zero_stage: '2'            -> 2
limits.timeout: '600'             -> 600
optim.steps: 2.0                  -> 2
options.chunk: 16K                -> 16_000
options.chunk: null               -> None
options.chunk: auto               -> 'auto'
options.offload: 'true'           -> True
options.offload: sync             -> 'sync'
engine.sp: 2                      -> 2
peers: alst                       -> ('alst',)
peers: [alst, ref]                -> ('alst', 'ref')
row: a.b+c-d                      -> 'a.b+c-d'
optim.learning_rate: 1e-4         -> 1e-4
data.seq_len: 3.7M                -> 3_700_000
limits.device_memory: 80GB        -> 80_000_000_000
options.host_memory: 1.9TB        -> 1_900_000_000_000
search.max: 10M                   -> 10_000_000
options.tiles: {mlp: true}        -> {'mlp': True}
output.save_to: x                 -> 'x'
"""


@pytest.mark.parametrize("given, value", lines_of(VALUES))
def test_values_are_converted_by_their_fields_type(given, value):
    (name,) = fields = yaml.safe_load(given)
    found, want = value_of(RunConfig.from_dict(fields), name), ast.literal_eval(value)
    assert (found, type(found)) == (want, type(want))


def test_a_search_is_a_flag_or_a_mapping():
    given = [True, "true", {}, False, None]
    assert [RunConfig(search=one).search is not None for one in given] == [True, True, True, False, False]
    assert "search=1 must be" in error_of(RunConfig, search=1)


def test_options_have_one_set_of_defaults():
    """Code that is copied from a spec runs the same thing."""
    assert RunConfig().options == Options()
    plain = {"attention": "sdpa", "tiles": False, "save_attention": False}
    assert Options.plain() == Options(**plain)


def test_changes():
    """A mapping changes the fields of a group that it names, a name with a dot one field."""
    run = RunConfig.from_dict({"options": {"chunk": 64, "tiles": 32}, "model": {"config": {"vocab_size": 300}}})
    assert run.replace(options={"chunk": 128}).options == Options(chunk=128, tiles=32)
    assert run.replace(**{"options.tiles.mlp": False}).options.tiles == {"mlp": False, "loss": 32, "norm": 32}
    entry = run.replace(**{"model.config.head_dim": 8, "model.lora.r": 4})
    assert (entry.model.config, entry.model.lora) == ({"vocab_size": 300, "head_dim": 8}, {"r": 4})
    check_refused("data.seq_len", run.replace, **{"data.seq_len.x": 3})
    assert run.replace(options={"tiles": {"mlp": 8}}).options.tiles == {"mlp": 8}
    assert run.replace(options=Options(chunk=4)).options == Options(chunk=4)
    assert run.replace(options="plain").options == Options.plain()
    assert run.replace(model={"config": {}}).model.config == {}  # the model's own fields are not merged
    assert run.replace(**{"search.max": 512}).search is not None
    assert run.replace(data={"seq_len": "4K"}).replace(data={"seq_len": run.data.seq_len}) == run
    assert merged({"options": "plain"}, {"options.chunk": 4})["options"] == {**Options.plain().to_dict(), "chunk": 4}


def test_what_differs_from_the_default():
    run = RunConfig.from_dict({"search": True, "data.seq_len": 4, "options": "plain", "row": "x"})
    found = not_default(run)
    assert found["data.seq_len"] == 4
    assert {"row", "search.granule", "options.tiles"} <= set(found)
    assert RunConfig.from_dict(merged({}, found)) == run
    assert not_default(RunConfig()) == {}


def test_committed_configurations_are_read_as_they_were_written():
    """A run's id is a digest of its configuration: checking it must not change it."""
    results = sorted((ROOT / "papermill_runs/results").rglob("result.json"))
    for path in results:
        written = json.loads(path.read_text())["config"]
        read = RunConfig.from_dict(written).to_dict()
        assert {n: v for n, v in flat(read).items() if n in flat(written)} == flat(written), path
    assert len(results) > 20


def test_every_field_is_documented():
    for group in (*GROUPS.values(), RunConfig):
        for name, field in group.model_fields.items():
            assert name in GROUPS or len(field.description or "") > 8, (group, name)


def test_a_config_is_frozen_and_survives_json():
    run = RunConfig.from_dict(
        {"model.config": {"vocab_size": 300}, "options.tiles.mlp": 64, "limits.device_memory": "1GB", "peers": ["a"]}
    )
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    with pytest.raises(ValidationError, match="frozen"):
        run.data.seq_len = 5


def test_the_digest_names_a_config():
    run = RunConfig.from_dict({"model.name": "tiny"})
    assert run.digest() == RunConfig.from_dict({"model": {"name": "tiny"}}).digest()
    changes = {"data.seq_len": 4096, "row": "alst", "optim.seed": 1, "options.tiles.mlp": 64}
    digests = {run.replace(**{k: v}).digest() for k, v in changes.items()} | {run.digest(), run.digest("commit")}
    assert len(digests) == len(changes) + 2
    assert run.replace(**{"data.allow_dropped": True}).digest() == run.digest()


PAPER = yaml.safe_load("""
baseline: []
tiled_loss: [loss]
ulysses: [loss, sp]
ulysses+tiled_mlp: [loss, sp, mlp]
ulysses+offload: [loss, sp, offload]
alst: [loss, sp, mlp, offload]
ours: [loss, sp, mlp, norm, offload, save_attention, chunk]
""")
"""Table 1 of the paper: the boxes that each row ticks; and ours."""


def ticks(run):
    """What is on."""
    options = run.options
    on = {part for part in ("mlp", "loss", "norm") if options.tile(part)}
    on |= {name for name in ("offload", "save_attention", "chunk") if getattr(options, name)}
    return on | ({"sp"} if run.engine.sp != 1 else set())


@pytest.mark.parametrize("row", PAPER)
def test_a_row_differs_from_the_baseline_only_in_the_features_it_names(row):
    other = {"model.name": "tiny", "options": {"offload": True, "tiles": 5, "save_attention": True}, "engine.sp": 2}
    for base in (RunConfig(), RunConfig.from_dict(other)):
        plain, featured = row_config("baseline", base), row_config(row, base)
        assert ticks(plain) == set()
        assert ticks(featured) == {*PAPER[row]}
        changed = {n for n, v in flat(featured.to_dict()).items() if flat(plain.to_dict())[n] != v}
        assert changed <= {"row", "engine.sp", *(n for n in FIELDS if n.startswith("options."))}
        assert featured.row == row
        assert featured.model == base.model


def test_rows_are_those_of_the_paper_and_ours():
    assert list(ROWS) == list(PAPER) == [*PAPER_ROWS, "ours"]
    for row in PAPER_ROWS:  # the paper's options, besides the boxes
        run = row_config(row)
        assert (run.options.offload or "sync", run.options.save_attention) == ("sync", False)
        assert run.options.checkpoint
        assert (run.engine.zero_stage, run.engine.offload_optimizer) == (3, True)
    lengths = [paper["seq_len"] for paper in PAPER_ROWS.values()]
    assert lengths == sorted(lengths)
