"""One rank saves alone, or was given another policy than the others. The checkpoints of all go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.conftest import MakeJob
from tests.ranks.test_odd import Odd

WISHES: dict[str, Any] = {"steps": 30, "every": 4, "pause": 0.03, "keep": 20}


@pytest.fixture
def make(make_job: MakeJob) -> Any:
    return lambda name="job", **env: make_job(name, kind=Odd, **env)


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_saves_alone_changes_nothing_for_the_others(early: bool, make: Any) -> None:
    """`if rank == 0: ckpt.save()`, where the policy is due at this step too and where it is not; and on rank 1."""
    job = make()
    alone = {"5": 0, "8": 0, "11": 1, "16": 1}
    launch = job.go(alone=alone, early=early, **WISHES)
    launch.wait_well(60)
    for step in range(4, 30, 4):
        assert step in job.committed_steps(), job.committed_steps()
    for rank, report in enumerate(job.reports(launch)):
        assert len(report["alone"]) == 2 and all(f"rank {1 - rank} did not" in text for text in report["alone"]), report
    said = {event["step"]: event for event in job.events("saved-alone")}
    assert {step: (event["by"], event["missing"]) for step, event in said.items()} == {
        int(step): (rank, 1 - rank) for step, rank in alone.items()
    }
    assert "rank 1 did not call save() after step 5" in launch.ranks[0].log()
    newest = job.newest()
    assert newest is not None and newest.id.step == 30 and newest.manifest is not None
    job.check_nothing_left()


def test_a_rank_that_saves_alone_at_the_very_end(make: Any) -> None:
    """The others close meanwhile: the last checkpoint is one that all of them take."""
    job = make()
    launch = job.go(alone={"30": 0}, **WISHES)
    launch.wait_well(60)
    assert job.committed_steps()[-2:] == [28, 30]
    assert "rank 1 did not" in job.reports(launch)[0]["alone"][0]
    job.check_nothing_left()


def test_a_rank_that_waits_for_a_save_of_its_own_is_told_who_is_missing(make: Any) -> None:
    """`if rank == 0: ckpt.save().wait()`: the other rank waits in a collective of the next step, for this one.

    It ends before the time that ranks wait for each other is over, and long before torch gives the collective up.
    """
    job = make(STEPWELL_GROUP_SECONDS="60")
    launch = job.go(alone={"5": 0}, wait=True, data=True, **WISHES)
    launch.wait_well(90)
    (told,) = job.reports(launch)[0]["alone"]
    assert told.startswith("rank 1 did not call save() after step 5"), told
    log = launch.ranks[0].log()
    assert "not all ranks have called save() after step 5: rank 1 is in step 6" in log
    assert "Call save() on all ranks, without `if rank == 0`" in log
    assert set(range(8, 30, 4)) <= set(job.committed_steps())
    job.check_nothing_left()


def test_the_automatic_policy_goes_on_too(make: Any) -> None:
    job = make()
    launch = job.go(alone={"3": 0}, auto=True, **{**WISHES, "steps": 40})
    launch.wait_well(60)
    assert [step for step in job.committed_steps() if 3 < step < 40], job.committed_steps()
    job.check_nothing_left()


@pytest.mark.parametrize(("other", "never"), [("Every(steps=7)", False), ("Never()", False), ("Auto()", True)])
def test_policies_that_differ_are_named_and_rank_0_s_holds(other: str, never: bool, make: Any) -> None:
    job = make()
    launch = job.go(other=other, never=never, **WISHES)
    launch.wait_well(60)
    assert job.committed_steps() == ([30] if never else [*range(4, 30, 4), 30])
    (said,) = job.events("policies-differ")
    assert said["of_rank"] == 1 and other.rstrip(")") in said["other"]
    assert f"Rank 1 has policy={other.rstrip(')')}" in launch.ranks[0].log()
    job.check_nothing_left()


def test_the_last_save_is_taken_once_though_the_policy_s_came_to_nothing(make_job: MakeJob) -> None:
    """At the end of `epochs()`, and then `close()` finds that it is there, on all ranks alike."""
    job = make_job("job", "--epochs", 3, "--every", 18, "--sleep", 0.01)
    job.launch(2, "--batch", 8, each={1: {"RANKS_FAIL_COPY": "1"}}).wait_well(60)
    assert [event["step"] for event in job.events("snapshot-void")] == [18]
    assert {event["directory"] for event in job.events("commit")} == {"step-000000000018.l0001.r3000"}
    job.check_nothing_left()
