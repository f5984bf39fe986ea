"""Very many steps, restarts and kept checkpoints: memory, descriptors, files and event bytes stay within bounds.

`STEPWELL_SOAK_STEPS` sets the steps of the long runs (1,000,000).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import report
from tests.endurance import tiny_trainer
from tests.training.loop.small import Small
from tests.training.loop.test_retry import held

STEPS = int(os.environ.get("STEPWELL_SOAK_STEPS", "1000000"))
GROWTH_BYTES = 12 << 20
"""How much memory trainer and agent may take from the first look (a fifth of the way) to the last."""
MOST_DESCRIPTORS = 64
MOST_FILES = 40
EVENT_BYTES = 1 << 20
"""When the event file is rotated here: so that it is, also in a short run."""


def train(where: Path, policy: str, steps: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, tiny_trainer.__file__, str(where), policy, str(steps)],
        env={**os.environ, "STEPWELL_EVENT_BYTES": str(EVENT_BYTES), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=6_000,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(policy: str, looks: list[dict[str, Any]]) -> None:
    first, last = looks[0], looks[-1]
    report(f"{policy}: after {first['step']:,} steps {first}; after {last['step']:,} steps {last}")
    for who in ("trainer", "agent"):
        assert last[who] - first[who] < GROWTH_BYTES, f"memory of the {who}"
    for what in ("descriptors", "agent_descriptors"):
        assert max(look[what] for look in looks) < MOST_DESCRIPTORS
    assert max(look["files"] for look in looks) < MOST_FILES
    assert max(look["event_bytes"] for look in looks) < 2.5 * EVENT_BYTES


@pytest.mark.soak
@pytest.mark.timeout(7_000)
@pytest.mark.parametrize("policy", tiny_trainer.POLICIES)
def test_a_million_steps(policy: str, tmp_path: Path) -> None:
    check(policy, train(tmp_path / "run", policy, STEPS))


def test_many_steps(tmp_path: Path) -> None:
    """The same with as many steps as there is time for in every run of the tests."""
    check("memory", train(tmp_path / "run", "memory", 2_000))


@pytest.mark.parametrize("count", [8, pytest.param(1_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(7_000)
def test_many_restarts_of_one_run(count: int, tmp_path: Path) -> None:
    looks = []
    for number in range(count):
        small = Small(tmp_path / "run")
        assert small.ckpt.restore() is (number > 0)
        small.train(epochs=number + 1)
        if number + 1 in (5, count):
            held_now, own = held(), tiny_trainer.own_bytes(os.getpid())
            files = sum(len(names) for _, _, names in os.walk(tmp_path / "run")) - number - 1  # one for each lineage
            ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for the next threads is not what a restart left
            looks.append((held_now, files, own))
    (held_first, files_first, own_first), (held_last, files_last, own_last) = looks
    report(f"after 5 restarts {own_first / 1e6:.1f} MB, {files_first} files; after {count} {own_last / 1e6:.1f} MB, "
           f"{files_last} files, {held_last}")  # fmt: skip
    assert held_last == held_first
    assert files_last <= files_first + 2
    assert own_last - own_first < 2 * GROWTH_BYTES
