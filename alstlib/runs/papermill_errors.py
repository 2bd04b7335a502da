"""What the program papermill prints where a cell of a notebook fails: the error's message, in place of some 70 lines of
traceback, which are in the output notebook. It does not warn about parameters such as `data.seq_len` either, which
papermill takes for unknown ones. papermill imports this module as one of its engines (pyproject.toml); the engine is
papermill's own.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


def __getattr__(name: str) -> Any:
    from papermill import engines  # which imports this module

    return getattr(engines, name)


def _say(kind: type[BaseException], error: Any, traceback: TracebackType | None) -> None:
    if kind is KeyboardInterrupt:
        print("\npapermill: interrupted", file=sys.stderr)
    elif kind.__name__ == "PapermillExecutionError":
        where = f"papermill: cell [{error.exec_count}] failed; the output notebook has its traceback"
        print(f"{where}\n{error.ename}: {error.evalue}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


# `papermill ...` or `python -m papermill ...`; a program that imports papermill has its own ways
if "papermill" in [Path(word).name for word in sys.orig_argv[:3]]:
    sys.excepthook = _say
    # papermill warns of each name with a dot; our notebooks refuse those that are unknown
    logging.getLogger("papermill").addFilter(
        lambda record: not re.match(r"Passed unknown parameter: \w+\.", record.getMessage())
    )
