"""SIGKILL of trainer, agent, or both, at every named point: the run ends bit-identical, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from stepwell.faults import OF_CHAINS, OF_LEVELS, OF_MANY, POINTS
from tests.crash.harness import Ending, Run
from tests.crash.scenes import AT_START, Scene, Victim, play

EVERYBODY = get_args(Victim)


def scenes(victims: Sequence[Victim], *numbers: int) -> list[Scene]:
    found = []
    for point in (point for point in POINTS if point not in OF_MANY | OF_LEVELS | OF_CHAINS):
        for victim in victims:
            if victim == "agent" and point in AT_START:
                continue  # there is no agent yet that belongs to this trainer
            found += [Scene(victim, point, nth) for nth in ([1] if point in AT_START else numbers)]
    return found


@pytest.mark.parametrize("scene", scenes(["both"], 2), ids=str)
def test_a_death_at_a_point(scene: Scene, run: Run, tmp_path: Path, reference: Ending) -> None:
    play(scene, run, tmp_path / "mark", reference)


@pytest.mark.soak
@pytest.mark.parametrize("scene", [*scenes(EVERYBODY, 1, 3, 5), *scenes(["trainer", "agent"], 2)], ids=str)
def test_a_death_at_a_point_first_and_later(scene: Scene, run: Run, tmp_path: Path, reference: Ending) -> None:
    play(scene, run, tmp_path / "mark", reference)
