"""Only processes of the trial are killed, all of them, and the one that is spared lives."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.tools.prove.command import Command

# A wrapper that starts its trainer again, and an agent in a session of its own.
TREE = """
setsid sleep 81 & echo $! > agent
while true; do sleep 82 & echo $! > trainer.new; mv trainer.new trainer; wait $!; done
"""


def comes_true(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def make(words: list[str], tmp_path: Path) -> Command:
    return Command(words, where=tmp_path / "run", output=tmp_path / "output")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Command, int, int]]:
    """The command, its trainer and its agent."""
    monkeypatch.chdir(tmp_path)
    with make(["bash", "-c", TREE], tmp_path) as command:
        command.start()
        assert comes_true(lambda: (tmp_path / "trainer").exists() and (tmp_path / "agent").read_text().strip())
        trainer, agent = (int((tmp_path / name).read_text()) for name in ("trainer", "agent"))
        # Their numbers are known at the fork; between that and the program itself a process shows no environment.
        assert comes_true(lambda: {trainer, agent} <= set(command._pids()))
        yield command, trainer, agent


def test_the_trainer_alone_goes_with_its_wrapper_and_the_agent_stays(tree: tuple[Command, int, int]) -> None:
    command, trainer, agent = tree
    assert command.poll() is None
    assert command.kill([trainer], spare=[agent])
    assert not is_alive(trainer)
    assert is_alive(agent)
    assert command.poll() == -9  # the wrapper too: it would have started a trainer of its own
    command.end_all()
    assert not is_alive(agent)


def test_trainer_and_agent_go_together(tree: tuple[Command, int, int]) -> None:
    command, trainer, agent = tree
    assert command.kill([agent, trainer], spare=[])
    assert not is_alive(trainer) and not is_alive(agent)
    assert not command.kill([agent, trainer], spare=[])  # nobody left: no kill


def test_a_process_without_the_mark_is_never_touched(tree: tuple[Command, int, int]) -> None:
    command, trainer, _ = tree
    with subprocess.Popen(["sleep", "83"]) as stranger:
        try:
            assert not command.kill([stranger.pid], spare=[])
            assert not command.kill([trainer, stranger.pid], spare=[])
            assert is_alive(trainer)
            command.end_all()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_both_runs_get_the_same_settings_and_the_users_own_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    monkeypatch.setenv("STEPWELL_WHERE", "elsewhere")
    names = ["PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "STEPWELL_VERIFY", "STEPWELL_WHERE"]
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    with make([sys.executable, "-c", code], tmp_path) as command:
        command.start()
        assert comes_true(lambda: command.poll() is not None)
        assert command.last_lines() == [f"77 :4096:8 1 {tmp_path / 'run'}"]


def test_the_last_lines_are_those_of_the_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "number").write_text("0")
    code = 'n=$(($(cat number)+1)); echo $n > number; seq 40 | sed "s/^/$n-/"'
    monkeypatch.chdir(tmp_path)
    with make(["bash", "-c", code], tmp_path) as command:
        for attempt in (1, 2):
            command.start()
            assert comes_true(lambda: command.poll() is not None)
            assert command.last_lines() == [f"{attempt}-{n}" for n in range(16, 41)]


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with make([str(tmp_path / "nothing")], tmp_path) as command, pytest.raises(ConfigError, match="cannot start it"):
        command.start()
