"""Hosts for a test, and a job on them; all of them are gone after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Server
from tests.hosts.job import DISK, HostJob
from tests.hosts.lab import Lab, why_not
from tests.levels.conftest import straight

__all__ = ["straight"]

MakeHosts = Callable[..., HostJob]


@pytest.fixture(scope="session")
def able() -> None:
    """Skips with the reason where there can be no hosts."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def make_hosts(able: None, server: Server, tmp_path: Path) -> Iterator[MakeHosts]:
    """So many hosts that are up, and a job for them."""
    made: list[tuple[Lab, HostJob]] = []

    def make(count: int, *arguments: object, clocks: bool = False, **env: str) -> HostJob:
        folder = tmp_path / f"job{len(made)}"
        lab = Lab(folder / "lab", count, folder / DISK)
        made.append((lab, HostJob(server, folder, *arguments, lab=lab, **env)))
        lab.boot(clocks=clocks)
        return made[-1][1]

    yield make
    for lab, job in made:
        job.end_everything()
        lab.close()
