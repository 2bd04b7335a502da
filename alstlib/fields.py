"""Fields of settings: types that say what works, and the check of a dataclass by its types.

pydantic converts and checks; what it refuses is said in our words, with the field, the value and what works.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, TypeAdapter, ValidationError

from alstlib.units import parse_quantity


def check_names(
    given: Mapping[str, Any], known: Iterable[str], what: str, section: str = "", inside: Iterable[str] = ()
) -> None:
    """Refuse names that are not known, each with the nearest one that is, or that is known inside of a section."""
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
    """What is there in place of a path that is not."""
    parent = path.parent
    if not parent.is_dir():
        return f"neither does its folder {parent}"
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
Text = Annotated[str, BeforeValidator(_path), Field(description="text")]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(description="a list of texts"),
]
Fields = Annotated[dict[str, Any], Field(description="a mapping of names to values")]
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
        raise ValueError(f"offload={settings.offload!r} moves checkpoints: it needs checkpoint=True")
    if settings.save_attention is True:
        raise ValueError("save_attention=True keeps outputs for the recompute: it needs checkpoint=True")
    if settings.chunk is not None:
        raise ValueError(f"chunk={settings.chunk} recomputes layers chunk by chunk: it needs checkpoint=True")
