"""What the tests of many ranks share: the fork server, jobs with all their processes, undisturbed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import Server
from tests.ranks.launch import Job

MakeJob = Callable[..., Job]
Straight = Callable[..., Job]


def soak(*values: object) -> Any:
    """A case that is left to `make soak`; the cases beside it are the ones that differ most."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture
def make_job(server: Server, tmp_path: Path) -> Iterator[MakeJob]:
    """Make jobs in this test's directory; whatever is left of them is killed afterwards."""
    made: list[Job] = []

    def make(name: str, *arguments: object, kind: type[Job] = Job, **env: str) -> Job:
        made.append(kind(server, tmp_path / name, *arguments, **env))
        return made[-1]

    yield make
    for job in made:
        job.end_everything()


@pytest.fixture(scope="session")
def straight(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """A job that ran to its end with nothing happening to it; one for each world size and list of arguments."""
    done: dict[tuple[object, ...], Job] = {}

    def run(world: int, *arguments: object) -> Job:
        key = (world, *map(str, arguments))
        if key not in done:
            job = Job(server, tmp_path_factory.mktemp("straight") / "job", *arguments)
            try:
                job.launch(world).wait_well()
                job.wait_gone()
            finally:
                job.end_everything()
            done[key] = job
        return done[key]

    return run
