"""The harness itself: a whole run ends as the reference does, and a wrong resume is noticed."""

from __future__ import annotations

from tests.crash.conftest import MakeRun
from tests.crash.harness import Ending, Run


def test_an_uninterrupted_run_ends_as_the_reference(run: Run, reference: Ending) -> None:
    assert run.start().wait() == 0, run.trainers[0].log()
    run.check_identical(reference)
    run.check_nothing_left()


def test_running_a_finished_run_again_changes_nothing(run: Run, reference: Ending) -> None:
    assert run.start().wait() == 0
    assert run.start().wait() == 0
    assert [event["again"] for event in run.events("finished")] == [False, True]
    run.check_identical(reference)
    run.check_nothing_left()


def test_a_killed_run_ends_as_the_reference(run: Run, reference: Ending) -> None:
    assert run.start(STEPWELL_CRASH="trainer!gate.passed:0:4").wait() == -9
    run.finish()
    run.check_identical(reference)
    run.check_nothing_left()


def test_control_a_resume_that_forgets_something_is_noticed(make_run: MakeRun, reference: Ending) -> None:
    run = make_run(TRAIN_FORGET="1")
    assert run.start(STEPWELL_CRASH="trainer!gate.passed:0:4").wait() == -9
    run.finish()
    assert run.ending().difference(reference) == "bytes of rank-00000.safetensors"
