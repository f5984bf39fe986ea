"""The check that no process outlives its test sees one that does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leftovers

ROOT = Path(__file__).parents[1]
WAITS = "import signal; signal.pause()  # {word}"


def start_orphan(word: str) -> int:
    """A process in its own session whose parent is gone."""
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WAITS.format(word=word)!r}], start_new_session=True,\n"
        "    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid)"
    )
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_a_child_is_found_and_ended() -> None:
    # The environment is emptied: found as a descendant.
    with subprocess.Popen([sys.executable, "-c", WAITS.format(word="stepwell-child")], env={}) as child:
        found = leftovers.find("no such mark", ["stepwell-child"])
        assert [process.pid for process in found] == [child.pid]
        assert [process.pid for process in leftovers.end(found, 0.0)] == [child.pid]
        assert child.wait() == -9


def test_an_orphan_is_found_by_its_mark_and_ended() -> None:
    pid = start_orphan("stepwell-orphan")
    assert leftovers.find("no such mark", ["stepwell-orphan"]) == set()
    found = leftovers.find(os.environ[leftovers.MARK], ["stepwell-orphan"])
    assert [process.pid for process in leftovers.end(found, 0.0)] == [pid]
    assert leftovers.find(os.environ[leftovers.MARK], ["stepwell-orphan"]) == set()


def test_a_process_that_is_leaving_is_no_leftover() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()  # stepwell"], stdin=subprocess.PIPE) as child:
        found = {process for process in leftovers.find("no such mark", ["stepwell"]) if process.pid == child.pid}
        assert len(found) == 1 and child.stdin is not None
        child.stdin.close()
        assert leftovers.end(found, 10.0) == []


def test_a_pid_that_was_reused_is_not_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert leftovers.end([leftovers.Process(child.pid, started=1, command="")], 0.0) == []
        assert child.poll() is None


@pytest.mark.parametrize(("ending", "closing"), [("", "1 passed, 1 error in"), ("; p.kill(); p.wait()", "1 passed in")])
def test_the_fixture_fails_a_test_that_leaves_one(ending: str, closing: str, tmp_path: Path) -> None:
    start = f"p = subprocess.Popen([sys.executable, '-c', {WAITS.format(word='stepwell')!r}])"
    (tmp_path / "test_it.py").write_text(f"import subprocess, sys\ndef test_it():\n    {start}{ending}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert closing in done.stdout, done.stdout
