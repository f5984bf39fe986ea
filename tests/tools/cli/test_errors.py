"""What cannot be done is said in a sentence or two on stderr, with what to do next, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.cli.commands import flip, good, stepwell

READING = ("ls", "show", "verify", "why", "prune", "clean")


@pytest.mark.parametrize("command", READING)
def test_a_missing_directory(command: str, tmp_path: Path) -> None:
    answer = stepwell(command, tmp_path / "nowhere")
    assert (answer.code, answer.out) == (2, "")
    assert "no such directory; give the directory that was passed to Checkpointer" in answer.err


@pytest.mark.parametrize("command", READING)
def test_a_directory_that_is_no_run(command: str, tmp_path: Path) -> None:
    answer = stepwell(command, tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert "not a run" in answer.err


def test_the_directory_above_runs_names_them(run: Path) -> None:
    answer = stepwell("ls", run.parent)
    assert answer.code == 2
    assert f"it contains these runs: {run}" in answer.err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_step_that_is_not_there(command: str, made_run: Path) -> None:
    answer = stepwell(command, made_run, "--step", 5)
    assert (answer.code, answer.out) == (2, "")
    assert "step 5" in answer.err


def test_the_steps_that_are_there_are_named(made_run: Path) -> None:
    assert "there are: 2, 4, 6, 8, 9" in stepwell("show", f"{made_run}@5").err


def test_two_ways_to_name_a_step_must_agree(made_run: Path) -> None:
    assert "name two steps" in stepwell("show", f"{made_run}@4", "--step", 6).err
    assert good("show", f"{made_run}@4", "--step", 4, "--json").json["step"] == 4


def test_a_damaged_checkpoint_that_was_named(run: Path) -> None:
    flip(run / "step-000000000004.l0001" / "rank-00000.json", 100)
    answer = stepwell("show", f"{run}@4")
    assert (answer.code, answer.out) == (2, "")
    assert "rank-00000.json: digest" in answer.err


def test_an_uncommitted_directory_that_was_named(crashed: Path) -> None:
    answer = stepwell("show", crashed / "step-000000000010.l0003")
    assert answer.code == 2
    assert "not committed" in answer.err
    answer = stepwell("show", f"{crashed}@10")
    assert answer.code == 2
    assert "not committed" in answer.err


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert "no checkpoint yet" in stepwell("show", tmp_path).err
    assert good("ls", tmp_path).out.splitlines()[0] == f"no checkpoints in {tmp_path} yet"


def test_no_traceback_from_a_real_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepwell.tools.cli.main", "show", str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_refusal_of_the_system_is_a_sentence(made_run: Path, tmp_path: Path) -> None:
    target = tmp_path / ("x" * 300)  # longer than a file name may be
    answer = stepwell("export", made_run, target)
    assert answer.code == 2
    assert os.strerror(36) in answer.err


def test_a_reader_that_leaves_early_is_no_error(made_run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "stepwell.tools.cli.main", "show", str(made_run)], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert done.stderr == b""


def test_names_in_a_file_cannot_steer_the_terminal(run: Path) -> None:
    answer = stepwell("show", f"{run}@4\033[2Jx")
    assert answer.code == 2
    assert "\033" not in answer.err
    assert "\\x1b[2J" in answer.err
