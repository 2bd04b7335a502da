"""A lock for a folder, so that only one process at a time writes there. It ends with its process, and says which
process that is."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alstlib.base.options import Json

FILE = ".lock"
PATIENCE_SECONDS = 0.5
"""How long a lock is asked for again: `holder` takes it for a moment."""


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[Callable[..., None]]:
    """Hold a folder, made where it is not there, for this block; yields `note(**fields)`, which adds to what others
    read about the holder. A file system without locks protects nothing.

    Raises:
        ValueError: another process holds it (the message says which, and since when), or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # without a buffer, of which what it cannot write would be an error at the end
        opened = open(folder / FILE, "a+b", buffering=0)  # noqa: SIM115
    except OSError as e:
        raise ValueError(f"out={str(folder)!r} cannot be written to ({e.strerror}); name another folder") from e
    with opened as file:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ValueError(
                    f"out={str(folder)!r} is in use by another run: {describe(read_object(folder / FILE) or {})}; wait "
                    "for its end or name another folder"
                )
            time.sleep(0.05)
        since = datetime.datetime.now().astimezone().isoformat(" ", timespec="seconds")  # with its zone
        about: Json = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}

        def note(**fields: Any) -> None:
            about.update(fields)
            with contextlib.suppress(OSError):  # a full disk: what others read is not worth a run
                file.truncate(0)
                file.write(json.dumps(about).encode())

        note()
        yield note


def holder(folder: Path) -> Json | None:
    """What is known about the process that holds a folder (`pid`, `host`, `since` and its notes); None when none does.

    The lock decides, so a process that was killed holds nothing.
    """
    try:
        with open(folder / FILE, encoding="utf-8") as file:
            free = _lock(file, fcntl.LOCK_SH)
    except OSError:
        return None
    return None if free else read_object(folder / FILE) or {}


def describe(about: Mapping[str, Any]) -> str:
    """`process 123 on node7 since 2026-01-31 12:00:00+01:00`."""
    return "process {pid} on {host} since {since}".format_map({"pid": "?", "host": "?", "since": "?", **about})


def _lock(file: Any, kind: int) -> bool:
    """False where another process has it. True also on a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def read_object(path: Path) -> Json | None:
    """The JSON object in a file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
