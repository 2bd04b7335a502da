"""`RunConfig`, the one description of a run, in groups; and the rows of the ablation, as data.

One run is one frozen `RunConfig`: what is trained (`model`), on what (`data`), what `apply` attaches (`options`, which
are `alstlib.Options`), on which ranks and how states are divided (`engine`), how it is trained (`optim`), how far it
may go (`limits`) and what it leaves (`output`); and what single workers do besides. Imports neither torch nor
transformers, so that commands which only look at configurations start at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from alstlib.base.options import (
    Bytes,
    Count,
    Fields,
    FlagOrAuto,
    FlagOrNvme,
    Json,
    Name,
    Natural,
    Options,
    Rate,
    Record,
    Seconds,
    Settings,
    Share,
    Stage,
    Text,
    Texts,
    TiledPart,
    check_names,
    group_of,
)


def nearest_path(path: Path) -> str:
    """The end of a message about a path that does not exist: the nearest name that does."""
    parent = path.parent
    if path.is_symlink():
        return f"it is a symbolic link to {os.readlink(path)}, which does not exist or leads back to the link"
    if not parent.is_dir():
        return f"its folder {parent} does not exist either"
    near = difflib.get_close_matches(path.name, sorted(p.name for p in parent.iterdir()), n=1)
    return f"did you mean '{parent / near[0]}'?" if near else f"its folder {parent} has nothing of a similar name"


def check_path(field: str, name: str, local: bool = False) -> None:
    """Refuse a name that means a path on this machine, by its beginning or because it is `local`, where nothing is.

    Raises:
        ValueError: it names the nearest path.
    """
    path = Path(name).expanduser()
    local = local or path.is_absolute() or path.is_symlink() or name.startswith((".", "~"))
    if local and not path.exists():
        raise ValueError(f"{field}='{name}' does not exist; {nearest_path(path)}")


class ConfigGroup(Settings):
    """One group of a run's settings."""

    @classmethod
    def called(cls) -> str:
        return f"field of {cls.__name__.lower()}"


def _listed(fields: Any) -> Any:
    """Sets as sorted lists: JSON has none, and their order is not the same in each process."""
    if not isinstance(fields, Mapping):
        return fields
    return {
        name: sorted(value, key=str) if isinstance(value, set | frozenset) else value for name, value in fields.items()
    }


class Model(ConfigGroup):
    """What is trained."""

    name: Text = "small"
    """A built-in shape ('tiny', 'small', 'llama-3.1-8b'), a name on the hub, or a local path."""
    config: Fields = Field(default_factory=dict)
    """Fields of the model's own config that are replaced."""
    random_weights: bool | None = None
    """Whether the weights are random; None: only for built-in shapes."""
    trust_remote_code: bool = False
    """Whether the code that comes with the model may run."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of weights and activations; auto: bf16 on CUDA, fp32 on a CPU."""
    liger: FlagOrAuto = "auto"
    """Whether Liger's kernels compute norm, RoPE and SwiGLU; 'auto': with the loss in tiles, on a GPU, where they are
    installed and support the model."""
    lora: Annotated[Fields | None, BeforeValidator(_listed)] = None
    """Fine-tuning: fields of peft's LoraConfig, such as {r: 16}; None: all weights are trained."""
    bits: Literal[4] | None = None
    """Planning: 4 for an adapter on linear modules in 4 bits, as bitsandbytes has them with double quantization
    (QLoRA); None: in `dtype`. Runs refuse it: a script of one's own loads such a model and trains it."""


class Data(ConfigGroup):
    """What it is trained on."""

    name: Text = "stdlib"
    """'stdlib' (Python's library), a name on the hub, or a local file or folder (text, JSONL, Parquet)."""
    tokenizer: Text = "auto"
    """'auto' (the model's own, or one that is trained on the data), a name on the hub, or a local path."""
    seq_len: Count = 2048
    """The tokens of one sample, before padding to a multiple of sp."""
    batch_size: Count = 1
    """The number of samples in one micro-batch."""
    packed: bool = False
    """True: whole documents are packed into each sample; False: a sample is one long text."""
    eval: Share | Text | None = None
    """Fine-tuning: the data of the evaluation, named as in `name`, or a share of the documents of `name`, which are
    then not trained on."""
    allow_dropped: bool = False
    """Fine-tuning: whether more than 1% of the rows of the data may be left out."""


class Engine(ConfigGroup):
    """On which ranks it runs, and where these keep weights, gradients and the optimizer's states."""

    world_size: Natural = 0
    """The number of ranks; 0: one for each GPU of this machine, or 2 ranks on a CPU."""
    sp: Natural = 1
    """The sequence-parallel degree: ranks that share one sample; 0: all ranks."""
    zero_stage: Stage = 3
    """The stage of DeepSpeed ZeRO, 0 to 3."""
    offload_optimizer: FlagOrNvme = True
    """Whether ZeRO keeps the optimizer states in the host's memory; 'nvme': ZeRO-3 keeps them in files."""
    offload_params: FlagOrNvme = False
    """Whether ZeRO-3 keeps the weights in the host's memory; 'nvme': in files."""
    nvme_path: Text | None = None
    """With 'nvme', the folder on a local disk where each run has files, which end with it; those of a run that is
    killed end when it starts again on this node."""
    prefetch: bool = True
    """Whether ZeRO-3 gathers weights ahead of their layer; False lowers the peak."""
    fsdp: bool = False
    """Fine-tuning: whether FSDP2 is used in place of DeepSpeed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.world_size and self.sp and self.world_size % self.sp:
            fitting = max(d for d in range(1, self.sp) if self.world_size % d == 0)
            raise ValueError(
                f"sp={self.sp} does not divide world_size={self.world_size}: use sp={fitting}, or world_size={self.sp}"
            )
        if self.offload_optimizer == "nvme" and self.zero_stage != 3:
            raise ValueError(
                f"offload_optimizer='nvme' needs zero_stage=3, not {self.zero_stage}: DeepSpeed's other stages would "
                "keep the states in the host's memory, as offload_optimizer=True does"
            )
        if self.offload_params and self.zero_stage != 3:
            raise ValueError(f"offload_params={self.offload_params!r} needs zero_stage=3, not {self.zero_stage}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer=True needs zero_stage 1, 2 or 3, not 0")
        in_files = [name for name in ("offload_optimizer", "offload_params") if getattr(self, name) == "nvme"]
        if in_files and self.fsdp:
            raise ValueError(f"{in_files[0]}='nvme' is DeepSpeed's: leave fsdp out")
        if bool(in_files) != (self.nvme_path is not None):
            raise ValueError(
                f"nvme_path={self.nvme_path!r} must be a folder on a local disk, such as '/scratch', with "
                "offload_optimizer='nvme' or offload_params='nvme', and None without"
            )
        return self


class Optim(ConfigGroup):
    """How it is trained."""

    steps: Count = 3
    """The number of optimizer steps."""
    accumulation: Count = 1
    """The number of micro-batches in one optimizer step."""
    learning_rate: Rate = 1e-4
    """The learning rate of AdamW."""
    warmup_steps: Natural = 0
    """The number of steps of linear warm-up."""
    weight_decay: Rate = 0.0
    """The weight decay of AdamW."""
    max_grad_norm: Rate = 0.0
    """The norm to which gradients are clipped; 0: they are not clipped."""
    seed: Natural = 0
    """The seed of random weights and of the order of the data."""
    trainer: Fields = Field(default_factory=dict)
    """Fine-tuning: fields of TRL's SFTConfig, which override those above."""


class Limits(ConfigGroup):
    """How far it may go."""

    device_memory: Bytes | None = None
    """Bytes of the device that each rank may use; a run that needs more ends as `oom`."""
    timeout: Seconds | None = None
    """Seconds after which the launcher ends the run; 0: never; None: ten times what the planner predicts, but at least
    an hour, and a day where it predicts no time."""
    step_timeout: Seconds | None = None
    """Seconds without a step or a message after which the launcher ends the run and says which rank the others wait
    for; 0: never; None: ten times what the planner predicts for a step, but at least an hour, and a day where it
    predicts no time."""


class Output(ConfigGroup):
    """What it leaves, and what it continues."""

    save_to: Text | None = None
    """The folder where the trained model is saved (safetensors); None: not saved."""
    merge_lora: bool = False
    """Fine-tuning: whether the adapter is merged into the weights that `save_to` gets."""
    resume_from: Text | None = None
    """The folder of an earlier run whose training state is continued."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from a training state in the run's folder; never: begin anew."""
    checkpoint_every: Natural = 0
    """The training state is saved every so many steps; 0: never."""


class Search(ConfigGroup):
    """How the longest sequence that fits is searched for, from `data.seq_len` on."""

    granule: Count = 256
    """The search tries multiples of this many tokens."""
    max: Count | None = None
    """The search ends at this length in tokens; None: no limit."""


class Contrib(ConfigGroup):
    """Parts without a promise to combine with everything (`alstlib/contrib`)."""

    sparse: Fields | None = None
    """With chunks: fields of `contrib.sparse.Sparse`, such as {top: 16}; each chunk attends to selected pages of keys
    only, which approximates attention; None: to all keys, exactly."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.sparse is not None:
            check_names(self.sparse, ("top", "last", "first", "page"), "field of sparse")
            if "top" not in self.sparse:
                raise ValueError(
                    f"sparse={self.sparse} needs top, the number of pages chosen by their scores, such as {{top: 16}}"
                )
        return self


def _options(value: Any) -> Any:
    return Options.plain() if value == "plain" else value


def _search(value: Any) -> Any:
    """A flag in place of a mapping."""
    flag = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
    return (Search() if flag else None) if isinstance(flag, bool) else flag


class RunConfig(Settings):
    """Everything that decides what a run computes. Two runs with equal configs at the same commit compute the same.

    A group is given as its class or as a mapping. `options` may be the word `plain` (`Options.plain`).

    Raises:
        ValueError: a value does not fit its field, or contradicts another field; the message says what works.
    """

    row: Name = ""
    """A label: the name of the run in its sweep."""
    model: Model = Model()
    data: Data = Data()
    options: Annotated[Options, BeforeValidator(_options)] = Options()
    """What `alstlib.apply` attaches to the model."""
    engine: Engine = Engine()
    optim: Optim = Optim()
    limits: Limits = Limits()
    output: Output = Output()
    block: Count | None = None
    """Run the whole model in blocks of this many tokens of each rank (`block_step`); None: by layers."""
    search: Annotated[Search | None, BeforeValidator(_search)] = None
    """Search for the longest sequence that fits; None: train at `data.seq_len`. True: with the usual settings."""
    emulate: Natural = 0
    """Run one rank of this many (`papermill_runs/referee/emulate.py`); 0: every rank is real."""
    peers: Texts = ()
    """The programs that `papermill_runs/referee/peers.py` compares (`baselines.py` there)."""
    contrib: Contrib = Contrib()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        options, engine = self.options, self.engine
        if options.on_host == "hidden+kv" and options.chunk is None and self.block is None:
            raise ValueError(
                "options.on_host='hidden+kv' works on layers that run in chunks, or on blocks: give options.chunk too, "
                "such as 'auto', or block"
            )
        if self.contrib.sparse is not None and options.chunk is None:
            raise ValueError(
                f"contrib.sparse={self.contrib.sparse} works on layers that run in chunks: give options.chunk too, "
                "such as 16384"
            )
        if self.emulate and engine.world_size not in (0, 1):
            raise ValueError(
                f"emulate={self.emulate} runs one real rank: engine.world_size={engine.world_size} must be 1"
            )
        if self.block is not None and options.chunk is not None:
            raise ValueError(
                f"block={self.block} (blocks of the whole model) and options.chunk={options.chunk} (chunks of each "
                "layer) exclude each other: give only one of them"
            )
        if self.output.merge_lora and self.model.lora is None:
            raise ValueError(
                "output.merge_lora=True merges an adapter into the model: give model.lora too, such as {'r': 16}"
            )
        if self.model.bits is not None and self.model.lora is None:
            raise ValueError(
                f"model.bits={self.model.bits} is for weights that are not trained: give model.lora={{'r': 16}}"
            )
        if self.data.packed and self.data.batch_size > 1:
            raise ValueError(
                f"data.packed=True packs documents into one sample: data.batch_size={self.data.batch_size} must be 1"
            )
        return self

    @classmethod
    def called(cls) -> str:
        return "parameter"

    @classmethod
    def elsewhere(cls) -> dict[str, str]:
        return {name.split(".")[1]: name for name in reversed(FIELDS) if "." in name}

    @property
    def chunk(self) -> int | None:
        """Tokens of one chunk; None: whole layers. Where `options.chunk` is 'auto', ask for `for_width` first."""
        assert self.options.chunk != "auto", "the model's width decides"
        return self.options.chunk

    def for_width(self, width: int) -> RunConfig:
        """The run with the chunk that `auto` takes for a model with hidden states of this width."""
        return self.replace(options={"chunk": self.options.chunk_for(width)}) if self.options.chunk == "auto" else self

    def bf16(self, on_gpu: bool) -> bool:
        """Whether weights and activations are in bf16 on this device; otherwise they are in fp32."""
        return self.model.dtype == "bf16" or (self.model.dtype == "auto" and on_gpu)

    @classmethod
    def from_dict(cls, values: Record) -> RunConfig:
        """The config with these fields. ValueError names an unknown field and the nearest known one."""
        return cls(**merged({}, values))

    def replace(self, **changes: Any) -> RunConfig:
        """The config with other values in some fields: a mapping changes the fields of a group that it names, a name
        with a dot one field (`**{"data.seq_len": 4096}`, also `"options.tiles.mlp"`, and an entry of a mapping:
        `"model.config.num_hidden_layers"`), and a group takes the place of the whole group."""
        return RunConfig(**merged(self.to_dict(), changes))

    def digest(self, salt: str = "") -> str:
        """12 hexadecimal digits that name this configuration (together with `salt`, such as a commit). What is only
        allowed does not count."""
        fields = self.replace(data={"allow_dropped": False}).to_dict()
        text = json.dumps(fields, sort_keys=True, default=str) + salt
        return hashlib.sha256(text.encode()).hexdigest()[:12]


GROUPS = {name: group for name, field in RunConfig.model_fields.items() if (group := group_of(field.annotation))}
"""Fields of a run that have fields of their own, and their classes."""
FIELDS = tuple(
    dotted
    for name in RunConfig.model_fields
    for dotted in ([f"{name}.{own}" for own in GROUPS[name].model_fields] if name in GROUPS else [name])
)
"""Names of all fields of a run, with their group: `data.seq_len`."""


def merged(base: Record, changes: Record) -> Json:
    """Fields of a run with changes in them, as `RunConfig.replace` describes; nothing is checked."""
    made = dict(base)
    for name, value in changes.items():
        group, _, inside = str(name).partition(".")
        before = made.get(group)
        if group == "options" and before == "plain":
            before = Options.plain().to_dict()
        if name == "options" and value == "plain":
            value = Options.plain().to_dict()
        within = before if isinstance(before, Mapping) else {}
        if inside.startswith("tiles."):  # one of the parts that `tiles` counts for
            tiles = within.get("tiles", Options().tiles)
            each = tiles if isinstance(tiles, Mapping) else dict.fromkeys(typing.get_args(TiledPart), tiles)
            inside, value = "tiles", {**each, inside.removeprefix("tiles."): value}
        inside, _, entry = inside.partition(".")
        if entry:  # of a mapping, such as `model.lora.r`
            own = within.get(inside)
            value = {**(own if isinstance(own, Mapping) else {}), entry: value}
        if inside:
            value = {inside: value}
        made[group] = {**within, **value} if group in GROUPS and isinstance(value, Mapping) else value
    return made


def value_of(run: RunConfig, name: str) -> Any:
    """The value of a field by its name in `FIELDS`, or of a part of `options.tiles`; None of a search that is not."""
    group, _, inside = name.partition(".")
    if inside.startswith("tiles."):
        return run.options.tile(typing.cast(typing.Any, inside.removeprefix("tiles.")))
    return getattr(getattr(run, group), inside, None) if inside else getattr(run, group)


def flat(fields: Record) -> Json:
    """Fields in groups, as `RunConfig.to_dict` has them, by their names with the group: `data.seq_len`."""
    made: Json = {}
    for name, value in fields.items():
        grouped = name in GROUPS and isinstance(value, Mapping)
        made |= {f"{name}.{inside}": own for inside, own in value.items()} if grouped else {name: value}
    return made


def not_default(run: RunConfig) -> Json:
    """The fields of a run that are not the default, by their names with the group. `merged({}, ...)` groups them."""
    return {name: value for name, value in flat(run.to_dict()).items() if _DEFAULTS.get(name, ...) != value}


_DEFAULTS = flat(RunConfig().to_dict())


ROWS: dict[str, Json] = {
    "baseline": {},
    "tiled_loss": {"options": {"tiles": {"loss": True}}},
    "ulysses": {"options": {"tiles": {"loss": True}}, "engine": {"sp": 0}},
    "ulysses+tiled_mlp": {"options": {"tiles": {"loss": True, "mlp": True}}, "engine": {"sp": 0}},
    "ulysses+offload": {"options": {"tiles": {"loss": True}, "offload": "sync"}, "engine": {"sp": 0}},
    "alst": {"options": {"tiles": {"loss": True, "mlp": True}, "offload": "sync"}, "engine": {"sp": 0}},
    "ours": {
        "options": {"tiles": True, "offload": True, "save_attention": "auto", "chunk": 16_384}, "engine": {"sp": 0}
    },
}  # fmt: skip
"""Rows of the ablation (ALST paper, Table 1) and a last one, `ours`: what this library adds to `alst`, chunks
included. Each turns on its features, and everything else is off. `sp=0` is the world size. The paper copies checkpoints
synchronously and keeps no attention outputs; so do its six rows here. `row_config("ours")` without its chunk runs whole
layers, which is faster where they fit."""

PAPER_ROWS: dict[str, Json] = {
    "baseline": {"seq_len": 32_000, "step_seconds": 17, "tflops": 231.6},
    "tiled_loss": {"seq_len": 160_000, "step_seconds": 123, "tflops": 514.4},
    "ulysses": {"seq_len": 1_100_000, "step_seconds": 564, "tflops": 576.1},
    "ulysses+tiled_mlp": {"seq_len": 1_200_000, "step_seconds": 703, "tflops": 548.7},
    "ulysses+offload": {"seq_len": 2_400_000, "step_seconds": 2610, "tflops": 585.8},
    "alst": {"seq_len": 3_700_000, "step_seconds": 6455, "tflops": 590.6},
}
"""ALST paper, Table 1: Llama-3.1-8B on 8 H100-80GB, batch size 1, TFLOPS per GPU in the paper's convention."""


def row_config(row: str, base: RunConfig | None = None) -> RunConfig:
    """The config of one row of the ablation: `base` with the row's features switched on and all others off. Its kernel,
    its host memory and how layers with a state run stay.

    Raises:
        ValueError: `row` is not in `ROWS`; the message has the nearest name.
    """
    check_names([row], ROWS, "row")
    base = base or RunConfig()
    kept = {name: getattr(base.options, name) for name in ("attention", "linear_attention", "host_memory")}
    off = base.replace(options=Options.plain(**kept), engine={"sp": 1}, contrib={"sparse": None})
    return off.replace(**ROWS[row], row=row)
