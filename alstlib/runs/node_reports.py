"""What the agents of several nodes say to the head: lines in their launcher's output (`alstlib.train.agent`)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alstlib.runs.torchrun import SAYS

LOST = ("RankKilled", "NodeLost", "NodeFailed")
"""Kinds of errors that end the ranks of other nodes too, and that their errors do not tell."""
Reports = Sequence[Mapping[str, Any]]


def read_reports(log: Path) -> list[dict[str, Any]]:
    """All that was said so far, in this order. Launchers may put words of their own before and between the lines."""
    found = []
    with contextlib.suppress(OSError):
        for line in re.findall(rf"{SAYS}(\{{.*\}})", log.read_text(errors="replace")):
            with contextlib.suppress(ValueError):  # half a line
                found.append(json.loads(line))
    return found


def name_of(report: Mapping[str, Any]) -> str:
    """Words for the node that a report is of."""
    return f"node {report['node']} ({report['name']})" if report["node"] >= 0 else f"a node ({report['name']})"


def differing(reports: Reports) -> str:
    """Which node differs from the head in what must be the same on all of them; empty where none does."""
    starts = {report["node"]: report for report in reports if "agree" in report}
    head = starts[0]["agree"] if 0 in starts else {}
    for report in starts.values():
        if other := [name for name in head if report["agree"][name] != head[name]]:
            what = ", ".join(f"{name} {report['agree'][name]} (the head: {head[name]})" for name in other)
            return f"{name_of(report)} differs from the head in {what}: all nodes of a run must agree"
    return ""


def least(reports: Reports, count: int) -> dict[str, int] | None:
    """The least bytes that one of the nodes has free, on the host and on a GPU; None until all have started."""
    starts = [report for report in reports if "agree" in report]
    if len(starts) < count:
        return None
    return {name: min(free) for name in ("host", "gpu") if (free := [s[name] for s in starts if s[name] is not None])}


def failed(reports: Reports) -> bool:
    """Whether a node is gone, or an agent ended because something failed, rather than by a signal."""
    return any(0 < report.get("code", 0) < 128 or report.get("silent") for report in reports)


def cause(reports: Reports, over: bool) -> tuple[str, str]:
    """The kind of the error that ended a run first, and its words with the node's name; empty where no node failed. A
    node that is lost comes first, then a rank that was killed. `over` says that the launcher ended by itself, so that
    nodes which have not said how they ended will not say it any more."""
    ended = [report for report in reports if "code" in report]
    starts = {report["node"]: report for report in reports if "agree" in report}
    lost = {node for report in reports for node in report.get("silent", ())} | (set(starts) if over else set())
    for node in sorted(lost - {report["node"] for report in ended}):
        return (
            "NodeLost",
            f"{name_of(starts[node]) if node in starts else f'node {node}'} is gone: its agent ended "
            + ("without a word, or it cannot be reached"),
        )
    own = sorted((r for r in ended if 0 < r["code"] < 128), key=lambda report: report["kind"] not in LOST)
    return (own[0]["kind"], f"{name_of(own[0])}: {own[0]['why']}") if own else ("", "")


def silence(log: Path, reports: Reports, count: int) -> str:
    """What a launcher that ended without a reason from any node has said itself, and which nodes it never started."""
    text = log.read_text(errors="replace") if log.exists() else ""
    words = [line for line in text.splitlines() if line.strip() and SAYS not in line]
    missing = sorted(set(range(count)) - {report["node"] for report in reports})
    never = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} never started" if missing else ""
    return "; ".join([*([never] if never else []), *words[-5:]])
