"""What the agents of the nodes say to the head: lines in the output of what it started (`alstlib.train.agent`)."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from alstlib.runs.torchrun import SAYS

LOST = ("RankKilled", "NodeLost", "NodeFailed")
"""Kinds of errors that end the ranks of other nodes too, and that their errors do not tell."""


def read_reports(log: Path) -> list[dict[str, Any]]:
    """All that was said so far, in this order. Launchers may put words of their own before and between the lines."""
    found = []
    with contextlib.suppress(OSError):
        for line in re.findall(rf"{SAYS}(\{{.*\}})", log.read_text(errors="replace")):
            with contextlib.suppress(ValueError):  # half a line
                found.append(json.loads(line))
    return found


def failures(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the agents said whose ranks failed and were not ended by a signal: first what the others follow from."""
    failed = [report for report in reports if 0 < report.get("code", 0) < 128]
    return sorted(failed, key=lambda report: report["kind"] not in LOST)


def lost(reports: list[dict[str, Any]]) -> list[int]:
    """Nodes that have started and have not said how they ended."""
    ended = {report["node"] for report in reports if "code" in report}
    return sorted({report["node"] for report in reports} - ended)


def cause(log: Path, nodes: int, ended: str) -> tuple[str, str]:
    """The kind of the error that ended a run, and its words, on several nodes with the node's name.

    `ended` says how the launcher ended by itself, so that nodes which have not said how they ended will not say it any
    more. It is empty where the launcher was ended because of a failure.
    """
    reports = read_reports(log)
    names = {r["node"]: f"node {r['node']} ({r['name']})" if r["node"] >= 0 else r["name"] for r in reports}
    failed, gone = failures(reports), [names[node] for node in lost(reports)]
    words = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and SAYS not in line][:8]
    if ended and gone and not (failed and failed[0]["kind"] in LOST):
        return "NodeLost", "; ".join([f"{' and '.join(gone)} ended without a word", ended, *words])
    if failed:
        where = f"{names[failed[0]['node']]}: " if nodes > 1 else ""
        return failed[0]["kind"], f"{where}{failed[0]['why']}"
    missing = [f"node {node} never started" for node in range(nodes) if node not in names]
    return "LauncherFailed", "; ".join([ended, *missing, *words])
