"""An account of what was read: which rows of a data set train nothing, by format, place and reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alstlib.data.formats import format_of
from alstlib.units import IGNORE

CHAT = "no message of the assistant"
LACKS = {
    "input_ids": "no label besides -100", "messages": CHAT, "conversations": CHAT,
    "prompt and completion": "no completion", "instruction and output": "no output", "text": "no text",
}  # fmt: skip
"""Reason for which a row of each format has no token with a loss."""
SHOWN = 3
"""Number of rows that are named for each reason."""

Places = Callable[[Sequence[int]], str]
"""A function that says where rows are, which are counted from 0."""


def by_number(rows: Sequence[int]) -> str:
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(str(row + 1) for row in rows)}"


class Account:
    """Reads rows as documents, and counts those that train nothing.

    Args:
        read: makes a document (`samples.Document`) of a row.
        of: how the data are called in messages, with a space before it.
        limit: the number of tokens of a row that are trained on; None: all.
        places: says where rows are.
    """

    def __init__(
        self,
        read: Callable[[Mapping[str, Any]], Any],
        of: str = "",
        limit: int | None = None,
        places: Places = by_number,
    ) -> None:
        self.read, self.of, self.limit, self.places = read, of, limit, places
        self.rows = 0
        self.useless: dict[str, list[int | None]] = {}
        """Numbers of the rows that train nothing, by the reason."""

    def __call__(self, row: Mapping[str, Any], number: int | None) -> Any:
        """The row's document; its `labels` say whether it trains.

        Raises:
            ValueError: a row that cannot be read; it says which.
        """
        kind = format_of(row)
        try:
            document = self.read(row)
        except (TypeError, ValueError) as e:
            where = "" if number is None else f"{self.places([number])}, "
            raise ValueError(f"data{self.of or ' of the corpus'}, {where}read as {kind}: {e}") from e
        self.rows += 1
        if not self.trains(document):
            first = len(document.ids) and (document.labels[1:] != IGNORE).any()
            lacks = f"no token with a loss among the first {self.limit:,}" if first else LACKS.get(kind, "")
            what = f"read as {kind}, {lacks}" if kind else "of no known format: no column of one has a value"
            self.useless.setdefault(what, []).append(number)
        return document

    def trains(self, document: Any) -> bool:
        """Whether a document has a token with a loss: the first token is no other's next."""
        return bool((document.labels[1 : self.limit] != IGNORE).any())

    @property
    def lost(self) -> int:
        """The number of rows that train nothing."""
        return sum(map(len, self.useless.values()))

    def notes(self, fate: str = "") -> list[str]:
        """A sentence for each format and reason; `fate` says what becomes of these rows."""
        made = []
        found = {what: sorted(row for row in rows if row is not None) for what, rows in self.useless.items()}
        for what, known in sorted(found.items(), key=lambda item: item[1][:1]):
            rows = self.useless[what]
            more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
            where = f" ({self.places(known[:SHOWN])}{more})" if known else ""
            made.append(f"{len(rows)} of {self.rows} rows{self.of} train nothing{fate}: {what}{where}")
        return made
