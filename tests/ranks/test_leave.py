"""One rank is told that its machine goes away: all ranks save the same last step, and leave to be started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.training.loop.preemption import REQUEUE
from tests.ranks.conftest import MakeJob, soak
from tests.ranks.test_frameworks import Framework


@pytest.mark.parametrize("rank", [1, soak(0)])
def test_a_notice_on_one_rank_takes_all_to_one_last_checkpoint(rank: int, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("job", "--grace", 20, "--every", 1000, "--steps", 100_000, "--sleep", 0.01, kind=Framework)
    assert isinstance(job, Framework)
    notice = tmp_path / "notice"
    launch = job.launch(3, each={rank: {"STEPWELL_NOTICE": str(notice)}})
    started = job.paths.root / "lineage" / "0001.json"
    job.wait_while_alive(launch, started.exists, "training began")
    notice.touch()
    assert launch.wait() == [REQUEUE] * 3, launch.logs()
    left = list(job.events("left"))
    assert sorted(event.get("rank", 0) for event in left) == [0, 1, 2]
    (step,) = {event["step"] for event in left}
    newest = job.newest()
    assert newest is not None and newest.id.step == step > 0
    assert all(event["durable"] for event in left)
    job.verify(newest)
    job.launch(3, "--steps", step + 2).wait_well()
    assert {end["resumed"] for end in job.ends(3)} == {step}
