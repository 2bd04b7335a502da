"""What the tests' own Slurm says where it cannot be installed or does not start."""

from __future__ import annotations

import os
from pathlib import Path

import cluster
import pytest


def apt(folder: Path, script: str) -> None:
    (folder / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "apt-get").chmod(0o755)


@pytest.mark.parametrize(
    "script, user, message",
    [
        (None, 0, "no munged, .* here: Debian's packages slurm-wlm and munge have them, and there is no apt-get"),
        ("", 1000, "only root may install them: apt-get install slurm-wlm munge"),
        ("echo no network >&2; exit 100", 0, "and `apt-get update` failed: no network"),
        ('[ "$2" = update ] || { echo no package >&2; exit 100; }', 0, "and `apt-get install` failed: no package"),
        ("", 0, "are installed, and yet there is no munged, slurmctld"),
    ],
    ids=["no apt", "no root", "no network", "no package", "nothing came of it"],
)
def test_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, user: int, message: str
) -> None:
    monkeypatch.setattr(cluster, "PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if script is not None:
        apt(tmp_path, script)
    with pytest.raises(cluster.Absent, match=message):
        cluster.install()


@pytest.mark.usefixtures("slurm")
def test_a_daemon_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONFIGURATION", f"{cluster.CONFIGURATION}Nonsense=1\n")
    broken = cluster.Cluster()
    with pytest.raises(cluster.Broken, match=r"(?s)slurmctld ended: 1; the end of its log:.*Nonsense"):
        broken.__enter__()
    assert not broken.left
    assert not broken.folder.exists()
