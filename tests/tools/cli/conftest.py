"""Runs made once by the real script, and copies of them that a test may spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Server
from tests.tools.cli.commands import Training, train


@pytest.fixture(scope="session")
def made_run(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tests of the command line look at; not to be changed.

    lineage 1: steps 2, 4, 6 (named best), 8.  lineage 2 left it at 4: steps 6, 8 (with a file), 9 (not finite).
    So 6.l0001 and 8.l0001 are an abandoned branch, and a restart uses 8.l0002.
    """
    # Each xdist worker makes its own: copies share the run's id, and so would see each other's agents.
    where = tmp_path_factory.mktemp("made") / "run"
    train(server, where, "--until", 8, "--save", "2,4,6,8", "--name", "6:best")
    train(server, where, "--until", 9, "--save", "6,8,9", "--attach", 8, "--nan-at", 9, "--restore-step", 4)
    return where


@pytest.fixture(scope="session")
def crashed_run(server: Server, made_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and a third process whose agent died just before it committed step 10, every time it tried."""
    where = tmp_path_factory.mktemp("crashed") / "run"
    shutil.copytree(made_run, where)
    crash = {"STEPWELL_CRASH": "agent!manifest.written:0:1"}
    train(server, where, "--until", 10, "--save", 10, "--restore-step", 8, code=1, **crash)
    return where


@pytest.fixture
def run(made_run: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(made_run, tmp_path / "run"))


@pytest.fixture
def crashed(crashed_run: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(crashed_run, tmp_path / "crashed"))


@pytest.fixture
def start(server: Server) -> Iterator[Callable[..., Training]]:
    """Start the script as a process; it and its agent are ended afterwards."""
    running: list[Training] = []

    def begin(*arguments: object, **env: str) -> Training:
        running.append(Training(server, *arguments, **env))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for training in running:
        training.end()
