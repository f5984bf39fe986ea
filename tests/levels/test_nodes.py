"""Ranks on several nodes, which are killed and lost: the run goes on from what the others hold, to the same bits."""

from __future__ import annotations

import pytest

from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight, soak

SAMPLES = 96
ARGUMENTS = ("--samples", SAMPLES, "--epochs", 6)


def check(job: Cluster, reference: Cluster) -> None:
    assert job.ledger.problem(SAMPLES, 6) is None
    assert job.difference(reference) is None
    assert all(step > 0 for step in list(job.ledger.resumed().values())[1:]), "every restart resumed"
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("protect", ["Pairs()", soak("Partner()"), soak("Xor(4)"), "ReedSolomon(4, 2)"])
def test_a_node_is_lost_and_a_spare_takes_its_place(protect: str, make_job: MakeJob, straight: Straight) -> None:
    job = make_job("job", "--sleep", 0.02, "--protect", protect, *ARGUMENTS, kind=Cluster)
    launch = job.start("abcd")
    job.wait_committed(12, launch)
    launch.kill()
    launch.wait()
    job.lose("b")
    step = job.newest_step()
    launch = job.start("axcd")  # an empty cache in the place of a full one
    launch.wait_well()
    assert job.ledger.resumed()[1] >= step
    assert {event["source"] for event in job.events("restore")} == {"node"}
    check(job, straight(4, *ARGUMENTS))
