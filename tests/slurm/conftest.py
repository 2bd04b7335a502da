from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Absent, Cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.__enter__()
    except Absent as e:
        pytest.skip(str(e))
    try:
        yield cluster
    finally:
        cluster.__exit__()
    assert not cluster.left, f"these had to be killed: {cluster.left}"
