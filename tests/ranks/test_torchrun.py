"""The same under a real torchrun, which starts all ranks again when one of them dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.harness import _read, wait_for
from tests.ranks.conftest import MakeJob
from tests.ranks.launch import Elastic, Job

WORLD = 4
ARGUMENTS = ("--samples", 96, "--epochs", 30)
Straight = Callable[..., Job]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victims", [[1, 0]], ids=str)
def test_torchrun_starts_the_ranks_again(victims: list[int], make_job: MakeJob, straight: Straight) -> None:
    job = make_job("job", *ARGUMENTS, "--sleep", 0.05, kind=Elastic)
    assert isinstance(job, Elastic)
    runner = job.start_all(WORLD)
    for rank in victims:
        newest = job.newest_step()
        wait_for(lambda: runner.poll() is not None or job.newest_step() > newest, "a commit", 120)  # noqa: B023
        assert runner.poll() is None, job.log.read_text()
        for process in job.agents_of(rank):  # those that inherited the token: the rank and its agent
            if b"trainer.py" in _read(process.pid, "cmdline"):
                process.kill()
            process.close()
    assert runner.wait(300) == 0, job.log.read_text()
    assert job.ledger.problem(96, 30) is None
    assert len(job.ledger.resumed()) == 1 + len(victims) and all(list(job.ledger.resumed().values())[1:])
    assert job.difference(straight(WORLD, *ARGUMENTS)) is None
    job.check_nothing_left()
