"""What all tests share: where a run lives, when GPU tests skip, and that no process outlives its test."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leftovers
from tests.crash.harness import Server

EXIT_GRACE_SECONDS = 2.0


def pytest_configure(config: pytest.Config) -> None:
    # One mark per process, so one per xdist worker: a worker never ends another one's children.
    os.environ[leftovers.MARK] = uuid.uuid4().hex
    # Started in the background of a shell it is ignored, and what tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reason := why_no_cuda()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_no_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return "gpu: torch is not installed"
    return None if torch.cuda.is_available() else "gpu: no CUDA device"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a run would live; not created."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Forks the trainers and ranks of all tests of this process: starting another one takes four seconds."""
    from tests.ranks.launch import PRELOADED

    server = Server(*PRELOADED)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def signals_given_back() -> Iterator[None]:
    """A test that fails leaves its Checkpointer open: the next one's signals are not for that."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_process_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Autouse, so it is set up before and torn down after the test's own fixtures: what they end is not a leftover."""
    mark = os.environ[leftovers.MARK]
    words = ("stepwell", str(tmp_path_factory.getbasetemp()))
    before = leftovers.find(mark, words)  # belongs to a module or session fixture
    yield
    if left := leftovers.end(leftovers.find(mark, words) - before, EXIT_GRACE_SECONDS):
        pytest.fail("left running, now killed:\n" + "\n".join(f"  {p.pid}: {p.command}" for p in left), pytrace=False)
