"""Clusters of this machine, ended with everything in them, and the log of a job that nothing happened to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import Cluster

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    made: list[Cluster] = []

    def make(slots: int, most: int, **options: object) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster{len(made)}", slots, most, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
