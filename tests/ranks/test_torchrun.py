"""The same under a real torchrun, which starts all ranks again when one of them dies."""

from __future__ import annotations

import subprocess

import pytest

from tests.crash.harness import _read, wait_for
from tests.ranks.conftest import MakeJob, Straight
from tests.ranks.launch import Elastic, StandIn

WORLD = 4
SAMPLES, EPOCHS = 96, 15
ARGUMENTS = ("--samples", SAMPLES, "--epochs", EPOCHS)


class SimpleElastic(StandIn, Elastic):
    """Under torchrun, with the checkpoints of `stand_in`: proves the test itself."""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [SimpleElastic, Elastic], ids=["stand-in", "stepwell"])
def test_torchrun_starts_the_ranks_again(kind: type[Elastic], make_job: MakeJob, straight: Straight) -> None:
    simple = ("--stand-in",) if kind is SimpleElastic else ()
    job = make_job("job", *ARGUMENTS, *simple, "--sleep", 0.05, kind=kind)
    assert isinstance(job, Elastic)
    runner = job.start_all(WORLD)
    for rank in (1, 0):
        wait_for_commit(job, runner)
        for process in job.agents_of(rank):  # those that inherited the token: the rank and its agent
            if b"trainer.py" in _read(process.pid, "cmdline"):
                process.kill()
            process.close()
    assert runner.wait(300) == 0, job.log.read_text()[-10_000:]
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    resumed = job.ledger.resumed()
    assert len(resumed) == 3 and resumed[1] > 0 and resumed[2] > 0, resumed
    assert job.difference(straight(WORLD, *ARGUMENTS, *simple)) is None
    job.check_nothing_left()


def wait_for_commit(job: Elastic, runner: subprocess.Popen[bytes]) -> None:
    newest = job.newest_step()
    wait_for(lambda: runner.poll() is not None or job.newest_step() > newest, "a commit", 120)
    assert runner.poll() is None, job.log.read_text()[-10_000:]
