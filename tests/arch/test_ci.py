"""`.ci/run` tells broken from busy: a test that fails once is named, one that fails twice fails the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = "def test_good(): pass\n"
ONCE = """
from pathlib import Path
def test_once():
    mark = Path(__file__).with_name("mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""
ALWAYS = "def test_always(): assert False\n"
STOPPED = "import os\ndef test_ends_all(): os._exit(3)\n"


def run(where: Path, tests: str, rule: str = "@.venv/bin/python -m pytest -q test_some.py") -> tuple[int, list[str]]:
    (where / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", where / ".ci" / "run")
    (where / ".venv").symlink_to(sys.prefix)
    (where / "Makefile").write_text(f"test:\n\t{rule}\n")
    (where / "pytest.ini").write_text("[pytest]\n")
    (where / "test_some.py").write_text(tests)
    # As CI starts it: not as a part of a `make test` that runs this very test.
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST_"))}
    done = subprocess.run(["bash", where / ".ci" / "run"], capture_output=True, text=True, timeout=60, env=outer)
    return done.returncode, done.stdout.splitlines()


def test_what_passes_runs_once(tmp_path: Path) -> None:
    code, lines = run(tmp_path, PASSES)
    assert code == 0 and lines[-1].startswith("1 passed") and not any("once more" in line for line in lines)


def test_an_unstable_test_is_named_and_passes(tmp_path: Path) -> None:
    code, lines = run(tmp_path, PASSES + ONCE)
    assert code == 0
    assert lines[-2:-1] == ["unstable (failed, then passed alone): test_some.py::test_once"]
    assert lines[-1].startswith("1 failed, 1 passed")


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    code, lines = run(tmp_path, PASSES + ONCE + ALWAYS)
    assert code == 1
    assert lines[-3:-1] == [
        "unstable (failed, then passed alone): test_some.py::test_once",
        "failed twice: test_some.py::test_always",
    ]


@pytest.mark.parametrize(
    ("tests", "rule"),
    [
        (PASSES, "@echo lint failed; false"),
        (ONCE, "@.venv/bin/python -m pytest -q test_some.py; exit 2"),  # broken off after a failure
        (STOPPED, "@.venv/bin/python -m pytest -q test_some.py"),
        ("".join(ALWAYS.replace("always", f"always_{n}") for n in range(21)), "@.venv/bin/python -m pytest -q"),
    ],
    ids=["lint", "interrupted", "killed", "too many"],
)
def test_what_is_no_instability_is_not_run_again(tests: str, rule: str, tmp_path: Path) -> None:
    code, lines = run(tmp_path, tests, rule)
    assert code != 0 and not any("once more" in line or "unstable" in line for line in lines)
