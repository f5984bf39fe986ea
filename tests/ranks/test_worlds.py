"""The number of ranks changes in the middle of an epoch, by real kills: each sample of each epoch comes once.

The bytes of a sample are keyed by (seed, epoch, sample), so that the surviving stream of samples has to be the one of a
single rank that nothing happened to, byte by byte.
"""

from __future__ import annotations

import pytest

from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Job
from tests.ranks.torment import kill

SAMPLES, EPOCHS = 101, 4
COMMON = ("--samples", SAMPLES, "--epochs", EPOCHS, "--loader", "carry", "--keyed")


def position(job: Job, step: int) -> int:
    """How many samples the surviving history had used up to a step."""
    survived = job.ledger.survived()
    return sum(len(used[1]) for at in range(1, step + 1) for line in survived[at].values() for used in line["used"])


def hop(job: Job, worlds: dict[int, tuple[int, int, str]]) -> None:
    """Through all world sizes: batch size of a rank, steps to be committed before the kill, and who is killed."""
    *hops, (last, (last_batch, _, _)) = worlds.items()
    for world, (batch, steps, victim) in hops:
        launch = job.launch(world, "--batch", batch)
        job.wait_committed(job.newest_step() + steps, launch)
        kill(job, launch, victim, world - 1)
    job.launch(last, "--batch", last_batch).wait_well()


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["of a rank", soak("of all ranks")])
def test_four_two_eight_one(batches: str, make_job: MakeJob, straight: Straight) -> None:
    """The batch of a rank stays the same, and that of all ranks changes; or the other way round."""
    whole = batches == "of all ranks"
    job = make_job("job", *COMMON, "--every", 2, "--sleep", 0.02, STEPWELL_LINGER="2")
    hop(
        job,
        {
            4: (4 if whole else 3, 4, "ranks"),
            2: (8 if whole else 3, 4 if whole else 8, "rank"),
            8: (2 if whole else 3, 4, "everything"),
            1: (16 if whole else 3, 0, ""),
        },
    )
    resumed = list(job.ledger.resumed().values())
    assert len(resumed) == 4 and sorted(set(resumed)) == resumed, resumed
    at = [position(job, step) for step in resumed[1:]]
    assert all(place % SAMPLES for place in at), f"a kill hit the edge of an epoch: {at}"
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    reference = straight(1, *COMMON, "--batch", 16)
    whole_run = SAMPLES * EPOCHS
    assert job.ledger.stream()[:whole_run] == reference.ledger.stream()[:whole_run]
    if whole:  # the members of each global batch are the same too, so the steps count the same
        assert job.endings()[0]["step"] == reference.endings()[0]["step"]
    job.check_nothing_left()
