"""The number of ranks changes in the middle of an epoch, by real kills: each sample of each epoch comes once.

The bytes of a sample are keyed by (seed, epoch, sample), so that the surviving stream of samples has to be the one of a
single rank that nothing happened to, byte by byte.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Job
from tests.ranks.torment import kill

EPOCHS = 4
VICTIMS = {4: "ranks", 2: "rank", 8: "everything"}
"""Who is killed in which world; the last one runs to the end."""


class How(NamedTuple):
    """How batches are made: the loader, and of each world the batch of a rank and the steps before the kill."""

    loader: tuple[object, ...]
    samples: int
    every: int
    batches: dict[int, int]
    steps: dict[int, int]

    def arguments(self) -> tuple[object, ...]:
        return ("--samples", self.samples, "--epochs", EPOCHS, *self.loader)


CARRY, WORKERS = ("--loader", "carry", "--keyed"), ("--loader", "sampler", "--workers", 1)
SAME, WHOLE = {4: 3, 2: 3, 8: 3, 1: 3}, {4: 4, 2: 8, 8: 2, 1: 16}
HOWS = {
    "same batch of a rank": How(CARRY, 101, 2, SAME, {4: 4, 2: 8, 8: 4}),
    "same batch of all ranks": How(CARRY, 101, 2, WHOLE, {4: 4, 2: 4, 8: 4}),
    "torch's sampler": How(WORKERS, 96, 5, WHOLE, {4: 1, 2: 1, 8: 1}),  # six steps an epoch: never saved at its edge
}


def position(job: Job, step: int) -> int:
    """How many samples the surviving history had used up to a step."""
    survived = job.ledger.survived()
    return sum(len(used[1]) for at in range(1, step + 1) for line in survived[at].values() for used in line["used"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["same batch of a rank", soak("same batch of all ranks"), soak("torch's sampler")])
def test_four_two_eight_one(how: str, make_job: MakeJob, straight: Straight) -> None:
    """Each world is killed in the middle of an epoch, the last one runs to the end."""
    chosen = HOWS[how]
    job = make_job("job", *chosen.arguments(), "--every", chosen.every, "--sleep", 0.02, STEPWELL_LINGER="2")
    for world, victim in VICTIMS.items():
        launch = job.launch(world, "--batch", chosen.batches[world])
        job.wait_committed(job.newest_step() + chosen.steps[world], launch)
        kill(job, launch, victim, world - 1)
    job.launch(1, "--batch", chosen.batches[1]).wait_well()
    resumed = list(job.ledger.resumed().values())
    assert len(resumed) == 4 and sorted(set(resumed)) == resumed, resumed
    at = [position(job, step) for step in resumed[1:]]
    assert all(place % chosen.samples for place in at), f"a kill hit the edge of an epoch: {at}"
    assert job.ledger.problem(chosen.samples, EPOCHS) is None
    reference = straight(1, *chosen.arguments(), "--batch", 16)
    whole_run = chosen.samples * EPOCHS
    assert job.ledger.stream()[:whole_run] == reference.ledger.stream()[:whole_run]
    if chosen.batches is WHOLE:  # the members of each global batch are the same too, so the steps count the same
        assert job.endings()[0]["step"] == reference.endings()[0]["step"]
    job.check_nothing_left()
