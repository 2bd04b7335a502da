"""`RunConfig`, the settings of one run, and the types of fields that check a setting and say which values work.

One run is one frozen `RunConfig`. The rows of the ablation are data: `ROWS` names what each row changes. pydantic
converts and checks fields; what it refuses is said in our words, with the field, the value and what works.
Imports neither torch nor transformers, so that commands which only look at configurations start at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, TypeAdapter, ValidationError

from alstlib.units import parse_quantity


def check_names(
    given: Mapping[str, Any], known: Iterable[str], what: str, section: str = "", inside: Iterable[str] = ()
) -> None:
    """Raise ValueError for the first name that is not known; the message has the nearest known name.

    A name that belongs into `section`, such as a field of RunConfig into a spec's `base`, is told so.
    """
    names, inside = list(known), list(inside)
    for name in given:
        if name in names:
            continue
        near = difflib.get_close_matches(str(name), [*names, *inside], n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(names)}"
        if near and near[0] not in names:
            hint = f"; put '{name}' under '{section}'" if name in inside else f"{hint} It goes under '{section}'"
        raise ValueError(f"unknown {what} '{name}'{hint}")


def nearest_path(path: Path) -> str:
    """The end of a message about a path that does not exist: the nearest name that does."""
    parent = path.parent
    if path.is_symlink():
        return f"it is a symbolic link to {os.readlink(path)}, which does not exist or leads back to the link"
    if not parent.is_dir():
        return f"its folder {parent} does not exist either"
    near = difflib.get_close_matches(path.name, sorted(p.name for p in parent.iterdir()), n=1)
    return f"did you mean '{parent / near[0]}'?" if near else f"its folder {parent} has nothing of a similar name"


# Types of fields. A refusal quotes the description.


def _tile(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value if isinstance(value, bool) else parse_quantity(value)


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a flag is not a number")
    return value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_Quantity = Annotated[int, BeforeValidator(parse_quantity)]
_Number = Annotated[int | float, BeforeValidator(_no_flag)]  # a whole number stays one in a configuration's JSON
Count = Annotated[_Quantity, Field(ge=1, description="a whole number of at least 1, such as 2048 or 3.7M")]
Natural = Annotated[_Quantity, Field(ge=0, description="a whole number of at least 0")]
Stage = Annotated[_Quantity, Field(ge=0, le=3, description="one of 0, 1, 2, 3")]
Bytes = Annotated[_Quantity, Field(ge=1, description="a whole number of at least 1, such as 80GB or 64GiB")]
Tile = Annotated[
    StrictBool | Annotated[int, Field(ge=1)],
    BeforeValidator(_tile),
    Field(description="True, False or a tile of at least 1 token"),
]
FlagOrAuto = Annotated[bool | Literal["auto"], Field(description="True, False or 'auto'")]
Liger = Annotated[bool | Literal["auto", "loss"], Field(description="True, False, 'auto' or 'loss'")]
Rate = Annotated[_Number, Field(ge=0, allow_inf_nan=False, description="a number of at least 0, such as 1e-4")]
Seconds = Annotated[_Number, Field(ge=0, allow_inf_nan=False, description="a number of at least 0, such as 3600")]
Text = Annotated[str, BeforeValidator(_path), Field(description="a text")]
Share = Annotated[_Number, Field(gt=0, lt=1, description="a share between 0 and 1, such as 0.05")]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(description="a list of texts"),
]
Fields = Annotated[dict[str, Any], Field(description="a mapping of names to values")]
Place = Literal["auto", "device", "host"]
FOLDER_NAME = r"\w[\w.+-]*"
Name = Annotated[
    str,
    Field(pattern=f"^({FOLDER_NAME})?$", description="the name of a folder: letters, digits and _ . + - only"),
]


def _description(kind: Any) -> str:
    """What values of a type look like, in words."""
    for mark in getattr(kind, "__metadata__", ()):
        if getattr(mark, "description", None):
            return mark.description
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return ", or ".join(_description(one) for one in typing.get_args(kind))
    return {bool: "True or False", type(None): "None"}.get(kind) or f"of the type {kind}"


@functools.cache
def _types(cls: type) -> dict[str, tuple[TypeAdapter[Any], str]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: (TypeAdapter(hints[f.name]), _description(hints[f.name])) for f in dataclasses.fields(cls)}


def check_fields(settings: Any) -> None:
    """Check every field of a (frozen) dataclass and convert it to its type.

    Raises:
        ValueError: a value that is not of its field's type; it names the field, the value and what works.
    """
    for name, (adapter, works) in _types(settings.__class__).items():
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, adapter.validate_python(value))
        except ValidationError:
            raise ValueError(f"{name}={value!r} must be {works}") from None


def check_checkpoints(settings: Any) -> None:
    """Refuse features that work on checkpoints where there are none; for `RunConfig` and `Options`."""
    if settings.checkpoint:
        return
    if settings.offload != "none":
        raise ValueError(f"offload={settings.offload!r} moves checkpoints to the host: it needs checkpoint=True")
    if settings.save_attention is True:
        raise ValueError("save_attention=True keeps attention outputs with the checkpoints: it needs checkpoint=True")
    if settings.chunk is not None:
        raise ValueError(f"chunk={settings.chunk} recomputes layers chunk by chunk: it needs checkpoint=True")


def check_places(settings: Any, by_blocks: bool = False) -> None:
    """Refuse tensors on the host that nothing takes there; for `RunConfig`, and for `Options`, where keys and values
    of a model that runs block by block may lie there too."""
    for name in ("kv", "hidden"):
        if getattr(settings, name) != "host":
            continue
        if settings.chunk is None and not (by_blocks and name == "kv"):
            raise ValueError(f"{name}='host' works on layers that run in chunks: give chunk too, such as chunk=16384")
        if settings.offload == "none":
            raise ValueError(f"{name}='host' moves tensors to the host: it needs offload='async' (or 'sync')")
    if settings.hidden == "host" and not settings.tiled_loss:
        raise ValueError("hidden='host' needs the tiled loss: give tiled_loss=True")


# ----- one run


def _docs(text: str, default: Any = dataclasses.MISSING, **kw: Any) -> Any:
    return field(default=default, metadata={"doc": text}, **kw)


Attention = Literal[
    "sdpa", "auto", "cpu", "cudnn", "flash", "efficient", "flash_attention_2", "flash_attention_3", "flash_attention_4",
    "blockwise", "eager",
]  # fmt: skip
"""What `attention` may be (`alstlib/kernels/backends.py`)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run computes. Two runs with equal configs at the same commit compute the same.

    Raises:
        ValueError: a value does not fit its field, or contradicts another field; the message says what works.
    """

    row: Name = _docs("a label: the name of the run in its sweep", "")
    model: Text = _docs(
        "a built-in shape ('tiny', 'small', 'llama-3.1-8b'), a name on the hub, or a local path", "small"
    )
    model_config: Fields = _docs("fields of the model's config that are replaced", default_factory=dict)
    random_weights: bool | None = _docs("whether the weights are random; None: only for built-in shapes", None)
    trust_remote_code: bool = _docs("whether the code that comes with the model may run", False)
    data: Text = _docs(
        "'stdlib' (Python's library), a name on the hub, or a local file or folder (text, JSONL, Parquet)", "stdlib"
    )
    tokenizer: Text = _docs(
        "'auto' (the model's own, or one that is trained on the data), a name on the hub, or a local path", "auto"
    )
    seq_len: Count = _docs("the tokens of one sample, before padding to a multiple of sp", 2048)
    batch_size: Count = _docs("the number of samples in one micro-batch", 1)
    packed: bool = _docs("True: whole documents are packed into each sample; False: a sample is one long text", False)

    world_size: Natural = _docs("the number of ranks; 0: one for each GPU of this machine, or 2 ranks on a CPU", 0)
    sp: Natural = _docs("the sequence-parallel degree: ranks that share one sample; 0: all ranks", 1)
    zero_stage: Stage = _docs("the stage of DeepSpeed ZeRO, 0 to 3", 3)
    offload_optimizer: bool = _docs("whether ZeRO keeps the optimizer states in the host's memory", True)
    offload_params: bool = _docs("whether ZeRO-3 keeps the weights in the host's memory", False)
    prefetch: bool = _docs("whether ZeRO-3 gathers weights ahead of their layer; False lowers the peak", True)

    attention: Attention = _docs("'sdpa', 'auto' (flash-attn 3 or 4 where installed), or a kernel's name", "sdpa")
    tiled_loss: Tile = _docs("whether logits and loss are computed in tiles; a number is the tile in tokens", False)
    tiled_mlp: Tile = _docs("whether MLPs are computed in tiles; a number is the tile in tokens", False)
    tiled_norm: Tile = _docs("whether layers' norms are computed in tiles; a number is the tile in tokens", False)
    checkpoint: bool = _docs("whether decoder layers keep only their input and are recomputed in backward", True)
    offload: Literal["none", "sync", "async"] = _docs(
        "whether checkpoints are moved to the host; async: copies run at the same time as the computation", "none"
    )
    save_attention: FlagOrAuto = _docs(
        "whether attention outputs are kept with the checkpoints, so that attention runs forward only once; auto: as "
        "many as fit", False,
    )  # fmt: skip
    chunk: Count | None = _docs("run each decoder layer in chunks of this many tokens of each rank; None: whole", None)
    sparse: Fields | None = _docs(
        "with chunk: fields of alstlib.Sparse, such as {top: 16}; each chunk attends to selected pages of keys only, "
        "which approximates attention; None: to all keys, exactly", None,
    )  # fmt: skip
    block: Count | None = _docs("run the whole model in blocks of this many tokens of each rank (`block_step`)", None)
    kv: Place = _docs(
        "where keys and values of chunks and blocks are kept; auto: on the device where it has room", "auto"
    )
    hidden: Place = _docs("where hidden states of layers in chunks are kept; auto: on the host with offload", "auto")
    states: Literal["auto", "pass", "heads"] = _docs(
        "how layers with a state run over ranks: 'pass' it from rank to rank, or exchange tokens for 'heads'; auto: "
        "whichever takes less time", "auto",
    )  # fmt: skip
    liger: Liger = _docs(
        "Liger's kernels for norm, RoPE and SwiGLU; 'auto': with the tiled loss, on a GPU, where installed and "
        "supported; 'loss': also its fused loss in place of the tiled one (it chooses its own tiles and takes more "
        "memory)", "auto",
    )  # fmt: skip

    steps: Count = _docs("the number of optimizer steps", 3)
    accumulation: Count = _docs("the number of micro-batches in one optimizer step", 1)
    learning_rate: Rate = _docs("the learning rate of AdamW", 1e-4)
    warmup_steps: Natural = _docs("the number of steps of linear warm-up", 0)
    weight_decay: Rate = _docs("the weight decay of AdamW", 0.0)
    max_grad_norm: Rate = _docs("the norm to which gradients are clipped; 0: they are not clipped", 0.0)
    dtype: Literal["auto", "fp32", "bf16"] = _docs(
        "of weights and activations; auto: bf16 on CUDA, fp32 on a CPU", "auto"
    )
    seed: Natural = _docs("the seed of random weights and of the order of the data", 0)

    eval_data: Share | Text | None = _docs(
        "fine-tuning: the data of the evaluation, named as in `data`, or a share of the documents of `data`, which are "
        "then not trained on", None,
    )  # fmt: skip
    allow_dropped: bool = _docs("fine-tuning: whether more than 1% of the rows of the data may be left out", False)
    lora: Fields | None = _docs(
        "fine-tuning: fields of peft's LoraConfig, such as {r: 16}; None: all weights are trained", None
    )
    merge_lora: bool = _docs("fine-tuning: whether the adapter is merged into the weights that `save_to` gets", False)
    fsdp: bool = _docs("fine-tuning: whether FSDP2 is used in place of DeepSpeed", False)
    trainer: Fields = _docs("fine-tuning: fields of TRL's SFTConfig, which override those above", default_factory=dict)

    device_memory: Bytes | None = _docs(
        "bytes of the device that each rank may use; a run that needs more ends as `oom`", None
    )
    host_memory: Bytes | None = _docs("bytes of the host that each rank may use; None: its share of what is free", None)
    search: bool = _docs("whether to search for the longest sequence that fits, from seq_len on", False)
    search_granule: Count = _docs("the search tries multiples of this many tokens", 256)
    search_max: Count | None = _docs("the search ends at this length in tokens; None: no limit", None)
    emulate: Natural = _docs("run one rank of this many (`alstlib.measure.emulate`); 0: every rank is real", 0)
    peers: Texts = _docs("the programs that `alstlib.measure.peers` compares (`alstlib/measure/baselines.py`)", ())
    save_to: Text | None = _docs("the folder where the trained model is saved (safetensors); None: not saved", None)
    resume_from: Text | None = _docs("the folder of an earlier run whose training state is continued", None)
    resume: Literal["auto", "never"] = _docs(
        "auto: continue from a training state in the run's folder; never: begin anew", "auto"
    )
    checkpoint_every: Natural = _docs("the training state is saved every so many steps; 0: never", 0)
    checkpoint_local: Text | None = _docs(
        "a folder on each machine's own disk, where training states are written first", None
    )
    timeout: Seconds | None = _docs(
        "seconds after which the launcher ends the run; 0: never; None: ten times what the planner predicts, but at "
        "least an hour, and a day where it predicts no time",
        None,
    )
    step_timeout: Seconds | None = _docs(
        "seconds without a step or a message after which the launcher ends the run and says which rank the others wait "
        "for; 0: never; None: ten times what the planner predicts for a step, but at least an hour, and a day where it "
        "predicts no time",
        None,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_checkpoints(self)
        check_places(self, by_blocks=self.block is not None)
        if self.sparse is not None:
            if self.chunk is None:
                raise ValueError(
                    f"sparse={self.sparse} works on layers that run in chunks: give chunk too, such as chunk=16384"
                )
            check_names(self.sparse, ("top", "last", "first", "page"), "field of sparse")
            if "top" not in self.sparse:
                raise ValueError(
                    f"sparse={self.sparse} needs top, the number of pages chosen by their scores, such as {{top: 16}}"
                )
        if self.emulate and self.world_size not in (0, 1):
            raise ValueError(f"emulate={self.emulate} runs one real rank: world_size={self.world_size} must be 1")
        if self.world_size and self.sp and self.world_size % self.sp:
            raise ValueError(f"sp={self.sp} does not divide world_size={self.world_size}")
        if self.offload_params and self.zero_stage != 3:
            raise ValueError(f"offload_params=True needs zero_stage=3, not {self.zero_stage}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer=True needs zero_stage 1, 2 or 3, not 0")
        if self.liger == "loss" and self.tiled_loss is not True:
            raise ValueError(
                "liger='loss' replaces the tiled loss and chooses its own tiles: "
                f"tiled_loss={self.tiled_loss} must be True"
            )
        if self.block is not None and self.chunk is not None:
            raise ValueError(
                f"block={self.block} (blocks of the whole model) and chunk={self.chunk} (chunks of each layer) exclude "
                "each other: give only one of them"
            )
        if self.merge_lora and self.lora is None:
            raise ValueError("merge_lora=True merges an adapter into the model: give lora too, such as {'r': 16}")
        if self.packed and self.batch_size > 1:
            raise ValueError(f"packed=True packs documents into one sample: batch_size={self.batch_size} must be 1")

    def bf16(self, on_gpu: bool) -> bool:
        """Whether weights and activations are in bf16 on this device; otherwise they are in fp32."""
        return self.dtype == "bf16" or (self.dtype == "auto" and on_gpu)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The config with these fields. ValueError names an unknown field and the nearest known one."""
        check_names(values, [f.name for f in dataclasses.fields(cls)], "parameter")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def replace(self, **changes: Any) -> RunConfig:
        return RunConfig.from_dict({**self.to_dict(), **changes})

    def digest(self, salt: str = "") -> str:
        """12 hexadecimal digits that name this configuration (together with `salt`, such as a commit). What is only
        allowed does not count."""
        text = json.dumps({**self.to_dict(), "allow_dropped": False}, sort_keys=True, default=str) + salt
        return hashlib.sha256(text.encode()).hexdigest()[:12]


FEATURES = ("tiled_loss", "sp", "tiled_mlp", "offload")
"""What the rows of the paper's Table 1 switch on, in its order."""

ROWS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "tiled_loss": {"tiled_loss": True},
    "ulysses": {"tiled_loss": True, "sp": 0},
    "ulysses+tiled_mlp": {"tiled_loss": True, "sp": 0, "tiled_mlp": True},
    "ulysses+offload": {"tiled_loss": True, "sp": 0, "offload": "sync"},
    "alst": {"tiled_loss": True, "sp": 0, "tiled_mlp": True, "offload": "sync"},
    "ours": {"tiled_loss": True, "sp": 0, "tiled_mlp": True, "tiled_norm": True, "offload": "async",
             "save_attention": "auto", "chunk": 16_384},
}  # fmt: skip
"""Rows of the ablation (ALST paper, Table 1) and a last one, `ours`: what this library adds to `alst`, row chunks
included. `sp=0` is the world size. The paper copies checkpoints synchronously and keeps no attention outputs; so do
its six rows here. `row_config("ours").replace(chunk=None)` runs whole layers, which is faster where they fit."""

PAPER_ROWS: dict[str, dict[str, Any]] = {
    "baseline": {"seq_len": 32_000, "step_seconds": 17, "tflops": 231.6},
    "tiled_loss": {"seq_len": 160_000, "step_seconds": 123, "tflops": 514.4},
    "ulysses": {"seq_len": 1_100_000, "step_seconds": 564, "tflops": 576.1},
    "ulysses+tiled_mlp": {"seq_len": 1_200_000, "step_seconds": 703, "tflops": 548.7},
    "ulysses+offload": {"seq_len": 2_400_000, "step_seconds": 2610, "tflops": 585.8},
    "alst": {"seq_len": 3_700_000, "step_seconds": 6455, "tflops": 590.6},
}
"""ALST paper, Table 1: Llama-3.1-8B on 8 H100-80GB, batch size 1, TFLOPS per GPU in the paper's convention."""


def row_config(row: str, base: RunConfig | None = None) -> RunConfig:
    """The config of one row of the ablation: `base` with the row's features switched on and all others off.

    Raises:
        ValueError: `row` is not in `ROWS`; the message has the nearest name.
    """
    check_names({row: None}, ROWS, "row")
    off = {"tiled_loss": False, "sp": 1, "tiled_mlp": False, "tiled_norm": False, "offload": "none",
           "save_attention": False, "chunk": None, "sparse": None}  # fmt: skip
    return (base or RunConfig()).replace(**{**off, **ROWS[row], "row": row})
