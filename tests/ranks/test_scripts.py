"""The example and CheckFreq's interface on two ranks: one is killed, both begin again and end with the same bits.

On 8 ranks under torchrun: `tests/examples/test_ranks.py`, `tests/adapters/test_checkfreq_ranks.py` (`make soak`).
"""

from __future__ import annotations

import pytest

from tests.adapters.test_checkfreq_ranks import SCRIPT, check_histories, weights
from tests.examples.test_image_classification import EXAMPLE
from tests.examples.test_ranks import TINY, check_same_end
from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import Job

WORLD = 2


class CheckFreq(Job):
    script = SCRIPT


class Example(Job):
    script = EXAMPLE

    def command(self, *arguments: object) -> list[object]:
        fixed = ["--resume", "--deterministic", "--chk-freq", "3", "--samples", "35", "--chk-prefix", self.where]
        return [self.script, *TINY, *fixed, *arguments]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "step"), [soak("MANUAL", 30), ("AUTO", 31)])
def test_the_five_steps_of_checkfreq(mode: str, step: int, make_job: MakeJob) -> None:
    """In MANUAL mode rank 1 dies where the other one waits for their checkpoint: it must not wait for ever."""
    settings = {"CF_MODE": mode, "CF_FREQ": "2", "CF_SLEEP": "0.01"}
    straight, job = make_job("straight", kind=CheckFreq), make_job("job", kind=CheckFreq)
    whole = straight.launch(WORLD, **settings)
    whole.wait_well()
    killed = job.launch(WORLD, **settings, CF_KILL=f"{step}:1")
    assert 0 not in killed.wait(), killed.logs()
    done = job.launch(WORLD, **settings)
    done.wait_well()
    assert len(weights(whole.logs())) == WORLD and weights(done.logs()) == weights(whole.logs())
    check_histories(job.where, straight.where, WORLD)
    job.check_nothing_left()


@pytest.mark.slow
def test_the_image_classification_example(make_job: MakeJob) -> None:
    straight, job = make_job("straight", kind=Example), make_job("job", kind=Example)
    straight.launch(WORLD, STEPWELL_SEED="5").wait_well()
    crash = {1: {"STEPWELL_CRASH": "trainer!copy.complete:1:3"}}  # SIGKILL of rank 1, its third snapshot being complete
    killed = job.launch(WORLD, each=crash, STEPWELL_SEED="5")
    assert 0 not in killed.wait(), killed.logs()
    done = job.launch(WORLD, STEPWELL_SEED="5")
    done.wait_well()
    assert "of the pictures in val" in done.logs() and done.logs().count("done: step") == 1
    check_same_end(job.where, straight.where, WORLD)
    job.check_nothing_left()
