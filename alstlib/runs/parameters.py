"""The groups of a run's settings in a notebook's parameters cell: objects whose attributes papermill assigns to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from alstlib.base.config import GROUPS, RunConfig, merged, row_config
from alstlib.base.options import Json, check_names

KNOWN = (*RunConfig.model_fields, "config", "out", "force", "worker")
"""Parameters of a notebook that starts a run: the run's groups and fields, and what the notebook itself reads."""


class Parameters:
    """What a notebook's parameters cell begins with. `Parameters(globals())` comes before that cell; in it each group
    gets its object, `options = parameters.options`; `parameters.config(globals())` comes after it. The cells may be run
    again: what the parameters cell says then counts."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self.groups: dict[str, SimpleNamespace] = {}
        self.others = {"parameters", *before} - set(KNOWN)
        self.read = False

    def __getattr__(self, name: str) -> SimpleNamespace:
        """An object for the fields of a group: `options.chunk = 16384`, which `-p options.chunk 16384` writes too."""
        if name not in GROUPS:
            raise AttributeError(f"no group of settings '{name}': there are {', '.join(GROUPS)}")
        parts = {"tiles": SimpleNamespace()} if name == "options" else {}  # of which each may be assigned to
        self.groups[name] = made = SimpleNamespace(**parts)  # without what the cell said before
        return made

    def config(self, cell: Mapping[str, Any]) -> RunConfig:
        """The run that the cell describes. A mapping that is given for a group (`-y`) changes the fields that the cell
        has for it. What is given wins over what `row` turns on, and `config` over all.

        Raises:
            ValueError: a name that nothing reads, with the nearest one, or values that RunConfig refuses.
        """
        if not self.read:  # later, what the notebook's other cells assigned is among the names
            given = [name for name in cell if name not in self.others and name[0] != "_"]
            check_names(given, KNOWN, RunConfig.called(), RunConfig.elsewhere())
        values = {name: cell[name] for name in RunConfig.model_fields if name in cell and name != "row"}
        whole = {name: value for name, value in values.items() if not isinstance(value, SimpleNamespace)}

        def changed(fields: Json) -> RunConfig:
            for change in (dict(_fields("", self.groups)), whole, cell.get("config") or {}):
                fields = merged(fields, change)
            return RunConfig(**fields)

        run = changed({})
        if row := cell.get("row"):
            run = changed(row_config(row, run).to_dict())
        self.read = True
        return run


def _fields(group: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What was assigned to objects, by the fields' names with the group."""
    for name, value in given.items():
        if isinstance(value, SimpleNamespace):
            yield from _fields(f"{group}{name}.", vars(value))
        else:
            yield f"{group}{name}", value
