"""The example and CheckFreq's interface on two ranks: one is killed, both begin again and end with the same bits.

On 8 ranks under torchrun: `tests/examples/test_ranks.py`, `tests/adapters/test_checkfreq_ranks.py` (`make soak`).
"""

from __future__ import annotations

import re

import pytest

from tests.adapters.test_checkfreq_example import SCRIPT as AS_THE_ORIGINALS
from tests.adapters.test_checkfreq_ranks import SCRIPT, check_histories, history, weights
from tests.adapters.test_dali_reader import make_pictures, needs_dali
from tests.examples.test_image_classification import EXAMPLE
from tests.examples.test_ranks import TINY, check_same_end
from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import Job

WORLD = 2


class CheckFreq(Job):
    script = SCRIPT


class AsTheOriginals(Job):
    script = AS_THE_ORIGINALS


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
@pytest.mark.parametrize(("world", "kill"), [(WORLD, "1:9"), soak(8, "1:3"), soak(8, "2:0")])
def test_a_script_as_the_originals_example(world: int, kill: str, make_job: MakeJob) -> None:
    """Every rank reads its shard of the patched DALI; what follows the loop changes the state."""
    settings = {"CF_MODE": "MANUAL", "CF_FREQ": "4", "CF_TAIL": "1"}
    straight, job = make_job("straight", kind=AsTheOriginals), make_job("job", kind=AsTheOriginals)
    whole = straight.launch(world, **settings)
    whole.wait_well()
    killed = job.launch(world, **settings, CF_KILL=kill)
    assert 0 not in killed.wait(), killed.logs()
    done = job.launch(world, **settings)
    done.wait_well()
    ends = [sorted(re.findall("weights [0-9a-f]{64}", run.logs())) for run in (whole, done)]
    assert len(ends[0]) == world and ends[0] == ends[1]
    for mine, expected in zip(history(job.where, world), history(straight.where, world), strict=True):
        assert list(dict.fromkeys(mine)) == expected
    job.check_nothing_left()


@pytest.mark.slow
def test_the_image_classification_example(make_job: MakeJob) -> None:
    straight, job = make_job("straight", kind=Example), make_job("job", kind=Example)
    straight.launch(WORLD).wait_well()
    crash = {
        1: {"STEPWELL_CRASH": "trainer!copy.complete:1:2"}
    }  # SIGKILL of rank 1, its second snapshot being complete
    killed = job.launch(WORLD, each=crash)
    assert 0 not in killed.wait(), killed.logs()
    done = job.launch(WORLD)
    done.wait_well()
    assert "of the pictures in val" in done.logs() and done.logs().count("done: step") == 1
    check_same_end(job.where, straight.where, WORLD)
    job.check_nothing_left()


class DaliExample(Job):
    """With the flags of the original's README that say nothing here, and with those of its launcher."""

    script = EXAMPLE

    def command(self, *arguments: object) -> list[object]:
        flags = "--dali -a small -b 4 -j 1 --epochs 3 --deterministic --noeval --barrier --checkfreq --cf_iterator"
        more = "--device cpu --image-size 8 -p 1 --resume --chk-freq 2 --local-rank=0"
        data = ["--data", self.where.with_name("pictures"), "--chk-prefix", self.where]
        return [self.script, *flags.split(), *more.split(), *data, *arguments]


@needs_dali
@pytest.mark.slow
def test_the_example_reads_its_part_with_dali_on_every_rank(make_job: MakeJob) -> None:
    straight, job = make_job("straight", kind=DaliExample), make_job("job", kind=DaliExample)
    for one in (straight, job):
        make_pictures(one.where.with_name("pictures") / "train", 2 * 4 * 5 + 1)  # five steps; one part has one more
    straight.launch(WORLD, STEPWELL_SEED="5").wait_well()
    crash = {1: {"STEPWELL_CRASH": "trainer!copy.complete:1:2"}}
    killed = job.launch(WORLD, each=crash, STEPWELL_SEED="5")
    assert 0 not in killed.wait(), killed.logs()
    job.launch(WORLD, STEPWELL_SEED="5").wait_well()
    check_same_end(job.where, straight.where, WORLD)
    job.check_nothing_left()
