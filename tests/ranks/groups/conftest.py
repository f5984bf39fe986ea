"""The backends, and a stage on which their ranks play a scene."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ranks.groups.launch import Backend, Launched, Nursery, Stage, Torch


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param in ("mpi", "horovod"):
        launched = Launched(request.param)
        if reason := launched.why_not():
            pytest.skip(reason)
        return launched
    return Torch(request.getfixturevalue("nursery"), request.param)


@pytest.fixture
def torch_backend(nursery: Nursery) -> Backend:
    return Torch(nursery, "tcp")


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Backend, str, int], Stage]]:
    """Start the ranks of a scene; they are ended after the test."""
    with ExitStack() as stack:

        def start(backend: Backend, scene: str, size: int) -> Stage:
            backend.start(scene, size, tmp_path)
            stack.callback(backend.end)
            return Stage(backend, tmp_path, size)

        yield start


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Undone after the test, last things first."""
    with ExitStack() as stack:
        yield stack
