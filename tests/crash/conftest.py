"""What the crash tests share: a run directory with its processes, the uninterrupted reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Ending, Namespace, Run, Server, undisturbed

MakeRun = Callable[..., Run]


@pytest.fixture(scope="session")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """How the run ends when nothing happens to it."""
    return undisturbed(server, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def make_run(server: Server, tmp_path: Path) -> Iterator[MakeRun]:
    """Make runs in this test's directory; whatever is left of them is killed afterwards."""
    made: list[Run] = []

    def make(name: str = "run", *, where: Path | None = None, namespace: Namespace | None = None, **env: str) -> Run:
        run = Run(server, where or tmp_path / name, tmp_path / f"{name}.log", namespace, **env)
        made.append(run)
        return run

    yield make
    for run in made:
        run.end_everything()


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    return make_run()
