"""Forged run directories are refused with a clear error, in bounded memory, and lead nowhere.

One process restores them all (tests/hostile/victim.py) under a cap on its memory; each test looks at one result.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import ATTACKS

Results = dict[str, dict[str, Any]]


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The attacks are made once, whichever of pytest's processes is the first to ask."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "hostile.jsonl"
    with open(f"{shared}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            shared.write_text(make(tmp_path_factory.mktemp("hostile")))
    found = [json.loads(line) for line in shared.read_text().splitlines()]
    return {result["name"]: result for result in found}


def make(base: Path, *words: str) -> str:
    """Each forgery meets one command of the CLI, in turn; with the word `all` it meets all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.victim", str(base), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    count = len(done.stdout.splitlines())
    assert done.returncode == 0, f"died after {count} attacks: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("name", ATTACKS, ids=lambda name: name.replace(" ", "_"))
def test_forged(results: Results, name: str) -> None:
    found, expected = results[name], ATTACKS[name]
    assert not str(found["error"]).startswith("UNEXPECTED"), found["error"]
    assert found["astray"] == [], "a file outside the run was opened"
    assert found["canary"], "something outside the run was changed"
    assert found["wrong"] is None
    assert found["commands"] == [], "a command of the CLI ended with something else than a sentence"
    if expected.outcome == "error":
        assert found["step"] is None and expected.names in found["error"], found["error"]
    elif expected.outcome == "older":
        assert found["step"] == 1 and found["error"] is None, found["error"]
        assert any(expected.names in reason for reason in found["damage"]) or not expected.names, found["damage"]
    else:
        assert found["step"] == 2 and found["error"] is None, found["error"]
        assert found["damage"] == []


@pytest.mark.soak
def test_all_commands_on_all_forgeries(tmp_path: Path) -> None:
    for result in map(json.loads, make(tmp_path, "all").splitlines()):
        assert result["commands"] == [] or result["name"].startswith("control: "), result["name"]


def test_nothing_named_in_a_checkpoint_was_imported(results: Results) -> None:
    for name in ATTACKS:
        result = results[name]
        assert not {"antigravity", "sched", "torch._dynamo"} & set(result["imported"]), name


def test_control_with_a_safety_off_the_attack_gets_through(results: Results) -> None:
    found = {name.removeprefix("control: "): result for name, result in results.items() if name.startswith("control: ")}
    assert found["record of 100 GB"]["error"].startswith("UNEXPECTED MemoryError")
    assert found["record is a link"]["step"] == 2
    assert not found["events are a link"]["canary"]
    assert found["record name ../"]["astray"]
    assert "sched" in found["named tuple of another length"]["imported"]
    assert found["header with other names"]["step"] == 2
    assert found["a leaf ten thousand times"]["error"].startswith("UNEXPECTED MemoryError")
    assert len(found) == 7


def test_the_attacks_can_be_made_by_hand(tmp_path: Path) -> None:
    """For looking at one: python -m tests.hostile.attacks NAME DIRECTORY."""
    command = [sys.executable, "-m", "tests.hostile.attacks", "unknown tag", str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "run" / "run.json").exists()
