"""SIGKILL of trainer, agent, or both, at random moments: every run ends bit-identical.

The soak test prints its seed; `STEPWELL_SOAK_SEED=n make soak` draws the same victims and moments again.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.crash.conftest import MakeRun
from tests.crash.harness import Ending, report
from tests.crash.torment import torment
from tests.ranks.conftest import soak

TEST_PARTS, TEST_KILLS = 10, 4
SOAK_PARTS, SOAK_KILLS = 10, 50


def kill_until(kills: int, first_seed: int, make_run: MakeRun, reference: Ending) -> tuple[int, int]:
    """Torment one run after the other until so many kills have hit. Returns kills and runs.

    Every other run also keeps a snapshot of each step in memory.
    """
    landed, runs = 0, 0
    while landed < kills:
        seed = first_seed + runs
        try:
            env = {"TRAIN_PACE": "0.01", **({"TRAIN_IN_MEMORY": "1"} if runs % 2 else {})}
            landed += torment(make_run(f"run-{seed}", **env), seed, 6, reference)
        except AssertionError as error:
            raise AssertionError(f"the run with seed {seed}: {error}") from error
        runs += 1
    return landed, runs


@pytest.mark.parametrize("part", [0, 1, 2, 3, *(soak(part) for part in range(4, TEST_PARTS))])
def test_random_kills(part: int, make_run: MakeRun, reference: Ending) -> None:
    kill_until(TEST_KILLS, 1000 * part, make_run, reference)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(SOAK_PARTS))
def test_hundreds_of_random_kills(part: int, make_run: MakeRun, reference: Ending) -> None:
    drawn = int(os.environ.get("STEPWELL_SOAK_SEED") or secrets.randbits(20))
    landed, runs = kill_until(SOAK_KILLS, (drawn * SOAK_PARTS + part) * 1000, make_run, reference)
    report(f"random kills, part {part}: {landed} kills in {runs} runs, all identical; STEPWELL_SOAK_SEED={drawn}")
