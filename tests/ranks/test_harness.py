"""Launcher, ledger, digests and kills are what the other tests here take them for. Most of it without stepwell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crash.harness import wait_for
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.hooks import STALLED
from tests.ranks.launch import Job, StandIn
from tests.ranks.torment import torment

SAMPLES, EPOCHS = 96, 6
LONG = ("--samples", SAMPLES, "--epochs", EPOCHS)


@pytest.fixture
def plain(straight: Straight) -> Job:
    """What four ranks do when nothing is saved and nothing happens."""
    return straight(4, "--plain", *LONG)


def test_a_run_of_four_ranks_is_the_same_each_time(make_job: MakeJob, plain: Job) -> None:
    again = make_job("again", "--plain", *LONG)
    again.launch(4).wait_well()
    assert again.difference(plain) is None
    assert again.ledger.problem(SAMPLES, EPOCHS) is None
    digests = again.endings()
    assert len({digest["weights/module.0.weight"] for digest in digests}) == 1
    assert len({digest["generators/torch"] for digest in digests}) == 4
    again.check_nothing_left()


@pytest.mark.parametrize("victim", ["rank", soak("ranks"), soak("everything")])
def test_simple_checkpoints_survive_kills(victim: str, make_job: MakeJob, plain: Job) -> None:
    job = make_job("job", "--stand-in", "--sleep", 0.01, *LONG, kind=StandIn)
    torment(job, 4, [victim], 6, 1)
    assert job.difference(plain) is None
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("forgotten", "found"),
    [
        ("generators", "other used in step"),
        ("position", "missed: "),
        soak("optimizer", "other weights "),
        soak("buffers", "buffers/module.1."),
    ],
)
def test_control_what_is_forgotten_is_noticed(forgotten: str, found: str, make_job: MakeJob, plain: Job) -> None:
    job = make_job("job", "--stand-in", "--sleep", 0.01, "--forget", forgotten, *LONG, kind=StandIn)
    torment(job, 4, ["everything"], 6, 2)
    problem = job.ledger.problem(SAMPLES, EPOCHS) or job.ledger.difference(plain.ledger) or job.difference(plain)
    assert problem is not None and problem.startswith(found), problem


def test_control_buckets_that_are_laid_out_anew_change_the_bits(make_job: MakeJob, straight: Straight) -> None:
    """Why the trainer says find_unused_parameters: a restart begins with DDP's first layout again."""
    job = make_job("job", "--stand-in", "--rebuild", "--sleep", 0.01, *LONG, kind=StandIn)
    torment(job, 4, ["everything"], 6, 3)
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    assert job.difference(straight(4, "--plain", "--rebuild", *LONG)) is not None


@pytest.mark.parametrize("loader", ["carry", soak("sampler")])
def test_one_rank_of_stepwell_is_tormented(loader: str, make_job: MakeJob, straight: Straight) -> None:
    arguments = ("--samples", 101 if loader == "carry" else SAMPLES, "--epochs", 3, "--loader", loader)
    reference = straight(1, *arguments)
    job = make_job("job", "--sleep", 0.02, *arguments)
    torment(job, 1, ["rank", "agent", "everything"], 6, 4)
    assert job.difference(reference) is None
    assert job.ledger.problem(int(str(arguments[1])), 3) is None
    job.check_nothing_left()


def test_a_shifted_clock_and_a_stalled_disk(make_job: MakeJob, tmp_path: Path) -> None:
    """The hooks reach trainer and agent."""
    stall = tmp_path / "stall"
    stall.touch()
    job = make_job("job", "--stop", f"8:{tmp_path / 'barrier'}")
    launch = job.launch(1, each={0: {"RANKS_CLOCK_SHIFT": "-3600", "RANKS_STALL": str(stall)}})
    job.wait_at(tmp_path / "barrier", launch)
    wait_for(Path(f"{stall}{STALLED}").exists, "the agent waits for its disk")
    assert job.newest_step() == 0
    stall.unlink()
    job.wait_committed(1, launch)  # which step, depends on when memory was ready
    (tmp_path / "barrier").touch()
    launch.wait_well()
    assert {event["who"] for event in job.events()} == {"trainer", "agent"}
    assert all(event["time"] < time.time() - 3000 for event in job.events())
    job.check_nothing_left()


def test_ranks_that_hang_are_shown_with_their_logs(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("job", "--plain", "--stop", f"2:{tmp_path / 'never'}")
    launch = job.launch(2)
    job.wait_at(tmp_path / "never", launch)
    with pytest.raises(AssertionError, match="rank 0 still runs after 0 s\n-- rank 0\n"):
        launch.wait(0.01)
    # Two ranks and their store.
    with pytest.raises(AssertionError, match=r"\[\d+, \d+, \d+\]"):
        job.check_nothing_left()
