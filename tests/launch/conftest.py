"""Clusters of this machine, ended with everything in them, and the log of a job that nothing happened to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import Server
from tests.launch.cluster import HERE, Cluster, Losses, losses_in
from tests.ranks.launch import Job

MakeCluster = Callable[..., Cluster]
Undisturbed = Callable[[int, int], Losses]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Make clusters in this test's directory; whatever is left of them is killed afterwards."""
    made: list[Cluster] = []

    def make(slots: int, most: int, **options: Any) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster{len(made)}", slots, most, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


class Plain(Job):
    """The same script on forked ranks, without torchrun."""

    script = HERE / "train.py"

    def command(self, *arguments: object) -> list[object]:
        return [self.script, *arguments]


@pytest.fixture(scope="session")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The losses of a job that nothing happens to."""
    done: dict[tuple[int, int], Losses] = {}

    def run(slots: int, epochs: int) -> Losses:
        if (slots, epochs) not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            job = Plain(server, folder, epochs, 0.0, LAUNCH_FOLDER=str(folder), LAUNCH_NAME="all")
            try:
                job.launch(slots).wait_well()
                job.wait_gone()
            finally:
                job.end_everything()
            done[slots, epochs] = losses_in(folder)
        return done[slots, epochs]

    return run
