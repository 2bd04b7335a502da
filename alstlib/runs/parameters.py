"""The groups of a run's settings in a notebook's parameters cell: objects whose attributes papermill assigns to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from alstlib.config import GROUPS, RunConfig, merged, row_config
from alstlib.options import Part, check_names

KNOWN = (*RunConfig.model_fields, "config", "out", "force", "worker")
"""Parameters of a notebook that starts a run: the run's groups and fields, and what the notebook itself reads."""


class Draft:
    """Fields of one group that are to be changed: `options.chunk = 16384`, which `-p options.chunk 16384` writes too.

    Raises:
        ValueError: a field that the group does not have; the message has the nearest one.
    """

    _group: str
    _known: tuple[str, ...]

    def __init__(self, group: str, known: Iterable[str]) -> None:
        vars(self).update(_group=group, _known=tuple(known))

    def __setattr__(self, name: str, value: Any) -> None:
        check_names([name], vars(self)["_known"], f"field of {vars(self)['_group']}")
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Draft:
        """What has no value yet; the parts of `options.tiles` are assigned to one by one too."""
        if (vars(self).get("_group"), name) != ("options", "tiles"):
            raise AttributeError(f"'{name}' has no value here")
        vars(self)[name] = made = Draft("options.tiles", get_args(Part))
        return made

    def __repr__(self) -> str:
        return repr(self.fields())

    def fields(self) -> dict[str, Any]:
        """What was assigned, by the fields' names with the group."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name not in ("_group", "_known"):
                found |= value.fields() if isinstance(value, Draft) else {f"{vars(self)['_group']}.{name}": value}
        return found


class Parameters:
    """What a notebook's parameters cell begins with. `Parameters(globals())` comes before that cell; in it each group
    gets its object, `options = parameters.options`; `parameters.config(globals())` comes after it. The cells may be run
    again: what the parameters cell says then counts."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self.drafts: dict[str, Draft] = {}
        self.others = {"parameters", *before} - set(KNOWN)
        self.read = False

    def __getattr__(self, name: str) -> Draft:
        if name not in GROUPS:
            raise AttributeError(f"no group of settings '{name}': there are {', '.join(GROUPS)}")
        self.drafts[name] = made = Draft(name, GROUPS[name].model_fields)  # without what the cell said before
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
        row = cell.get("row")
        values = {name: cell[name] for name in RunConfig.model_fields if name in cell and name != "row"}
        values = {name: value for name, value in values.items() if not isinstance(value, Draft)}
        changes = [*(draft.fields() for draft in self.drafts.values()), values, cell.get("config") or {}]

        def changed(fields: dict[str, Any]) -> RunConfig:
            for change in changes:
                fields = merged(fields, change)
            return RunConfig(**fields)

        run = changed({})
        run = changed(row_config(row, run).to_dict()) if row else run
        self.read = True
        return run
