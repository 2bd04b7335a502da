"""`Options`, what `apply` attaches to a model, and what settings are made of: types of fields, and messages that name
the field, the value and what works.

pydantic converts and checks. This module imports neither torch nor transformers, so that commands which only look at
settings start at once.
"""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    model_validator,
)

from alstlib.base.units import parse_quantity

Json = dict[str, Any]
"""A JSON object: settings, a model's config, a result, or a row of a table."""
Record = Mapping[str, Any]
"""Values by name, to be read: a row of a data set, a message of a chat, a batch of a loader, changes of settings."""


def check_names(
    given: Iterable[str], known: Iterable[str], what: str, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError for the first name that is not known; the message has the nearest known name.

    Args:
        elsewhere: names that belong into a section, such as `chunk` into `options`, with what to write instead.
    """
    names, elsewhere = list(known), elsewhere or {}
    for name in given:
        if name in names:
            continue
        near = difflib.get_close_matches(str(name), [*names, *elsewhere], n=1, cutoff=0.5)
        hint = f"did you mean '{elsewhere.get(near[0], near[0])}'?" if near else f"known: {', '.join(names)}"
        raise ValueError(f"unknown {what} '{name}'; {hint}")


# Types of fields


@dataclass(frozen=True)
class Works:
    """What values of a type look like, in words, which a refusal quotes."""

    text: str


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


_Quantity = Annotated[int, BeforeValidator(lambda value: parse_quantity(value))]
_Number = Annotated[int | float, BeforeValidator(_no_flag)]  # a whole number stays one in a configuration's JSON
Count = Annotated[_Quantity, Field(ge=1), Works("a whole number of at least 1, such as 2048 or 3.7M")]
Natural = Annotated[_Quantity, Field(ge=0), Works("a whole number of at least 0")]
Stage = Annotated[_Quantity, Field(ge=0, le=3), Works("one of 0, 1, 2, 3")]
Bytes = Annotated[_Quantity, Field(ge=1), Works("a whole number of at least 1, such as 80GB or 64GiB")]
Tile = Annotated[
    StrictBool | Annotated[int, Field(ge=1)],
    BeforeValidator(_tile),
    Works("True, False or a tile of at least 1 token"),
]
FlagOrAuto = Annotated[bool | Literal["auto"], Works("True, False or 'auto'")]
FlagOrNvme = Annotated[bool | Literal["nvme"], Works("True, False or 'nvme'")]
Rate = Annotated[_Number, Field(ge=0, allow_inf_nan=False), Works("a number of at least 0, such as 1e-4")]
Seconds = Annotated[_Number, Field(ge=0, allow_inf_nan=False), Works("a number of at least 0, such as 3600")]
Text = Annotated[str, BeforeValidator(_path), Works("a text")]
Share = Annotated[_Number, Field(gt=0, lt=1), Works("a share between 0 and 1, such as 0.05")]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    PlainSerializer(list),
    Works("a list of texts"),
]
Fields = Annotated[dict[str, Any], Works("a mapping of names to values")]
FOLDER_NAME = r"\w[\w.+-]*"
Name = Annotated[
    str,
    Field(pattern=f"^({FOLDER_NAME})?$"),
    Works("the name of a folder: letters, digits and _ . + - only"),
]


def describe(kind: Any) -> str:
    """What values of a type look like, in words."""
    for mark in getattr(kind, "__metadata__", ()):
        if isinstance(mark, Works):
            return mark.text
    if typing.get_origin(kind) is Literal:
        return f"{'one of ' * (len(get_args(kind)) > 1)}{', '.join(map(repr, get_args(kind)))}"
    if typing.get_origin(kind) is Annotated:
        return describe(get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return ", or ".join(describe(one) for one in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a mapping with fields of {kind.__name__}"
    return {bool: "True or False", type(None): "None"}.get(kind) or f"of the type {kind}"


def group_of(kind: Any) -> type[Settings] | None:
    """The class of settings that a field of this type holds, which may also be None."""
    if isinstance(kind, type):
        return kind if issubclass(kind, Settings) else None
    return next((found for one in get_args(kind) if (found := group_of(one))), None)


class Settings(BaseModel):
    """Frozen settings. A refusal is a ValueError of one line: the field, the value and what works."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True, validate_default=True
    )

    def __init__(self, **given: Any) -> None:  # pydantic calls it for a mapping in a field too
        check_names(given, type(self).model_fields, self.called(), self.elsewhere())
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ValueError(self._why(error.errors()[0])) from None

    @classmethod
    def _why(cls, error: Any) -> str:
        """The first thing that is wrong, in words."""
        name = next(iter(error["loc"]), "")
        own = str(error.get("ctx", {}).get("error", ""))  # what a validator of ours said
        kind = typing.get_type_hints(cls, include_extras=True).get(name)
        if own and not name:
            return own
        if own and group_of(kind):  # a whole sentence about a field of the group
            return own if own.startswith("unknown ") else f"{name}.{own}"
        return f"{name}={error['input']!r} must be {describe(kind)}"

    @classmethod
    def called(cls) -> str:
        """What messages call one of its fields."""
        return f"field of {cls.__name__}"

    @classmethod
    def elsewhere(cls) -> dict[str, str]:
        """Names that are taken for fields of it, and what to write instead."""
        return {}

    def to_dict(self) -> Json:
        """Its fields as JSON and YAML have them: mappings, lists, numbers and texts."""
        return self.model_dump()

    def replace(self, **changes: Any) -> Self:
        """The settings with other values in some fields."""
        return type(self)(**{**dict(self), **changes})


# Options

Kernel = Literal[
    "auto", "sdpa", "cpu", "cudnn", "flash", "efficient", "flash_attention_2", "flash_attention_3", "flash_attention_4",
    "blockwise", "eager",
]  # fmt: skip
"""Names of attention kernels, which `alstlib/kernels/backends.py` implements."""

Core = Annotated[Callable[..., Any], Works("a function (q, k, v, *, scale, causal) -> (out, lse)")]
TiledPart = Literal["mlp", "loss", "norm"]
Tiles = Annotated[dict[TiledPart, Tile], Works("a mapping of 'mlp', 'loss' and 'norm' to such values")]
Place = Literal["auto", "device", "host"]


class Disk(Settings):
    """A folder on a local disk, where checkpoints go that the host has no room for."""

    folder: Text
    """The folder; the files in it have no names, and end with the process."""
    bytes: Bytes | None = None
    """Bytes that each rank may take there; None: an even share of what is free at each forward."""


def _disk(value: Any) -> Any:
    if isinstance(value, Mapping):  # pydantic takes its keys for names
        check_names(value, Disk.model_fields, Disk.called())
    return {"folder": value} if isinstance(value, (str, os.PathLike)) else value


class Options(Settings):
    """What `apply` attaches to a model. Every feature works alone and together with all others.

    Raises:
        ValueError: a value does not fit its field, or contradicts another field; the message says what works.
    """

    attention: Kernel | Core = "auto"
    """The attention kernel: `auto` (flash-attn 3 or 4 where it is installed, else `sdpa`), `sdpa` (the best that
    PyTorch has on this device), a kernel's name, or a function of your own for one device: (q, k, v, *, scale, causal)
    -> (out, lse), where lse is the logsumexp of the scores. Autograd must be able to differentiate it, or it has an
    attribute `backward` (`alstlib/kernels/user_attention.py` has the contract)."""
    tiles: Tile | Tiles = True
    """What runs tile by tile: a mapping with the keys `mlp` (MLPs, and MoE layers), `loss`
    (logits, loss and the norm before them) and `norm` (norms of decoder layers, which compute in fp32 and need several
    times the memory of their input); a key that is missing is off. A number is the tile in tokens; True chooses it. One
    value that is no mapping counts for all three. With `chunk`, norms run in chunks instead. Each tile of an MLP adds
    the gradients of all experts in fp32, so that small tiles of large layers cost time (`alstlib.hf.experts` has
    figures)."""
    checkpoint: bool = True
    """Activation checkpointing: decoder layers keep only their input, and backward recomputes them."""
    offload: bool | Literal["sync"] = False
    """Whether checkpoints are kept in the host's memory. The copies run at the same time as the computation, on a
    stream of their own. `"sync"` copies on the compute stream, as the paper does; it serves comparisons."""
    save_attention: FlagOrAuto = "auto"
    """Whether attention outputs are kept with the checkpoints, so that attention runs forward only once. `auto` keeps
    as many as fit: with offload, in the host's memory; without, on a GPU, in the memory that earlier steps left free
    (from the second step on)."""
    chunk: Count | Literal["auto"] | None = None
    """Run each decoder layer in chunks of this many tokens of each rank's slice. `auto` chooses by the model's width
    (`chunk_for`); None runs layers whole."""
    on_host: Literal["auto", "none", "hidden", "hidden+kv"] = "auto"
    """What of the sequence itself is kept on the host, beside checkpoints: layers' `hidden` states and their gradients
    (with `chunk`), and keys and values with the sums of their gradients (`kv`: those of one layer with `chunk`, those
    of all layers with `block_step`). The device then holds one chunk, or two pages, at a time. `auto`, with offload:
    hidden states, and keys and values where they would take more than half of a GPU's free memory and the host has
    room."""
    linear_attention: Literal["auto", "pass", "heads"] = "auto"
    """How layers with a state run over ranks: they `pass` their state from rank to rank, or exchange tokens for `heads`
    as attention does. The results are equal. `auto` takes heads where they divide evenly among the ranks; layers with
    fewer heads, or with others, pass their state. `handle.notes` says what each layer does."""
    experts_by_token: bool = False
    """Say of MoE layers that are not transformers' own that their output for a token depends on that token
    alone. Otherwise they run on whole sequences only, and untiled; `alst verify` compares."""
    host_memory: Bytes | None = None
    """Bytes of the host's memory that the checkpoints of each rank may take; None: what is free at each forward. When
    they do not suffice, attention outputs are dropped first, and then the inputs of all but every k-th layer (not with
    chunks whose hidden states are on the device). All ranks keep as much as the rank that can keep least."""

    disk: Annotated[
        Disk | None,
        BeforeValidator(_disk),
        Works("None, a folder, or a mapping such as {'folder': '/scratch', 'bytes': '1TB'}"),
    ] = None
    """With offload, a folder on a local disk (NVMe) for the checkpoints that the host has no room for: layers' inputs
    and attention outputs. They pass through the host's memory, which holds their share of three layers. Rotary
    tables, gradients of hidden states, and keys and values in pages stay on the host. A mapping has the bytes that each
    rank may take: {"folder": "/scratch", "bytes": "1TB"}."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.attention, type):
            raise ValueError(
                f"attention={self.attention.__name__} is a class; give a function, or an instance of the class"
            )
        for name, works in (
            ("offload", "moves checkpoints to the host"),
            ("save_attention", "keeps attention outputs with the checkpoints"),
            ("chunk", "recomputes layers chunk by chunk"),
        ):
            value = getattr(self, name)
            if not self.checkpoint and value not in (None, False) and (name, value) != ("save_attention", "auto"):
                raise ValueError(f"{name}={value!r} {works}: it needs checkpoint=True")
        if self.disk is not None and not self.offload:
            raise ValueError("disk takes what the host has no room for: it needs offload=True")
        if self.on_host in ("hidden", "hidden+kv"):
            if not self.offload:
                raise ValueError(f"on_host={self.on_host!r} moves tensors to the host: it needs offload=True")
            if self.on_host == "hidden" and self.chunk is None:
                raise ValueError("on_host='hidden' works on layers that run in chunks: give chunk too, such as 'auto'")
            if self.chunk is not None and not self.tile("loss"):
                raise ValueError(f"on_host={self.on_host!r} needs the loss in tiles: give tiles={{'loss': True, ...}}")
        return self

    def tile(self, part: TiledPart) -> bool | int:
        """Whether this part runs in tiles: False, True (the tile is chosen) or the tile in tokens."""
        return self.tiles.get(part, False) if isinstance(self.tiles, dict) else self.tiles

    def place(self, what: Literal["hidden", "kv"]) -> Place:
        """Where hidden states, or keys and values, are to be kept."""
        if self.on_host == "auto":
            return "auto"
        return "host" if what in self.on_host else "device"

    def chunk_for(self, width: int) -> int | None:
        """Tokens of one chunk in a model with hidden states of this width; None: layers run whole.

        "auto" takes the power of two next to 2^26 / width: a chunk of every model then takes about the same memory
        (16,384 tokens for the width of Llama-3.1-8B, 4,096).
        """
        return 2 ** max(8, round(26 - math.log2(width))) if self.chunk == "auto" else self.chunk

    @classmethod
    def plain(cls, **turned_on: Any) -> Self:
        """Everything is off but activation checkpointing and what is given: what the ablation begins from."""
        return cls(**{"attention": "sdpa", "tiles": False, "save_attention": False, **turned_on})
