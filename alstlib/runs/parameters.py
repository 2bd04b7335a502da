"""The groups of a run's settings in a notebook's parameters cell: objects whose attributes papermill assigns to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alstlib.config import FIELDS, GROUPS, ROWS, RunConfig, merged, row_config
from alstlib.options import check_names

ITSELF = ("row", "config", "out", "force", "worker")
"""Parameters of the notebook that are no fields of a run, or not only."""


class Draft:
    """Fields of one group that are to be changed: `options.chunk = 16384`, which `-p options.chunk 16384` writes too.

    Raises:
        ValueError: a field that the group does not have; the message has the nearest one.
    """

    def __init__(self, group: str) -> None:
        vars(self)["_group"] = group

    def __setattr__(self, name: str, value: Any) -> None:
        group = vars(self)["_group"]
        check_names([name], GROUPS[group].model_fields, f"field of {group}")
        vars(self)[name] = value

    def __repr__(self) -> str:
        return repr(self.fields())

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_group"}


class Parameters:
    """What a notebook's parameters cell begins with. `Parameters(globals())` comes before that cell; in it each group
    gets its object, `options = parameters.options`; `parameters.config(globals())` comes after it."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self.before = {*before, "parameters"}
        self.drafts = {name: Draft(name) for name in GROUPS}

    def __getattr__(self, name: str) -> Draft:
        drafts = vars(self).get("drafts", {})
        if name not in drafts:
            raise AttributeError(f"no group of settings '{name}': there are {', '.join(drafts)}")
        return drafts[name]

    def config(self, cell: Mapping[str, Any]) -> RunConfig:
        """The run that the cell describes. A mapping that is given for a group (`-y`) changes the fields that the cell
        has for it. What is given wins over what `row` turns on, and `config` over all.

        Raises:
            ValueError: a name that nothing reads, with the nearest one, or values that RunConfig refuses.
        """
        given = [name for name in cell if name not in self.before and name[0] != "_"]
        known = [*RunConfig.model_fields, *ITSELF]
        check_names(given, known, "parameter", {name.split(".")[-1]: name for name in FIELDS})
        fields: dict[str, Any] = {}
        for name in given:
            value = cell[name]
            if name in self.drafts:
                fields[name] = self.drafts[name].fields()
                value = {} if value is self.drafts[name] else value
            if name not in ITSELF:
                fields = merged(fields, {name: value})
        fields = {name: value for name, value in merged(fields, cell.get("config") or {}).items() if value != {}}
        row, base = cell.get("row"), RunConfig.from_dict(fields)
        if not row:
            return base
        check_names([row], ROWS, "row")
        return row_config(row, base).replace(**fields)
