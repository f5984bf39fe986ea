"""Many ranks over one bucket: one commit through the store alone, killed and resumed, on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.storage.store import catalog
from stepwell.storage.store.lineage import read_history
from tests.crash.harness import Server
from tests.ranks.launch import Job
from tests.ranks.torment import kill, torment

SAMPLES, EPOCHS = 96, 6
MakeJob = Callable[..., Job]


@pytest.mark.slow
def test_kills_on_four_ranks(make_job: MakeJob, server: Server, tmp_path: Path) -> None:
    """A rank, an agent, everything: the same bits as in a directory without any kill, each sample once."""
    arguments = ("--samples", SAMPLES, "--epochs", EPOCHS)
    reference = Job(server, tmp_path / "straight", *arguments)
    try:
        reference.launch(4).wait_well()
        reference.wait_gone()
    finally:
        reference.end_everything()
    job = make_job("--sleep", 0.15, *arguments)  # or a busy machine is at the end before it has committed anything
    torment(job, 4, ["rank", "agent", "everything"], 8, 3)
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    assert job.difference(reference) is None
    assert all(step > 0 for step in list(job.ledger.resumed().values())[1:])
    assert read_history(job.paths).newest == len(job.launches)
    for entry in catalog.scan(job.paths):
        assert entry.is_good or entry.void is not None, entry
        if entry.is_good:
            job.verify(entry)
    job.check_nothing_left()


@pytest.mark.soak
def test_another_number_of_ranks(make_job: MakeJob) -> None:
    """Four, then two, then three: boxes are read from the bucket range by range."""
    arguments = ("--loader", "carry", "--keyed", "--samples", 101, "--epochs", 4, "--batch", 3)
    job = make_job(*arguments, "--every", 2, "--sleep", 0.05, STEPWELL_LINGER="0.1")
    for world in (4, 2):
        launch = job.launch(world)
        job.wait_committed(job.newest_step() + 4, launch)
        kill(job, launch, "everything", 0)
    job.launch(3).wait_well()
    resumed = list(job.ledger.resumed().values())
    assert len(resumed) == 3 and 0 < resumed[1] < resumed[2]
    assert job.ledger.problem(101, 4) is None
    job.check_nothing_left()
