"""Other ways to spread a state over ranks: killed with SIGKILL and started again, they end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import HERE, Job

STOP = 11


class Framework(Job):
    script = HERE / "frameworks.py"

    def ends(self, world: int) -> list[dict[str, Any]]:
        return [json.loads(Path(f"{self.where}.end.{rank}").read_text()) for rank in range(world)]

    def kill_at(self, step: int, world: int, *arguments: object) -> None:
        """Run to a step, wait until one before it is committed, and kill all ranks."""
        launch = self.launch(world, "--stop-at", step, *arguments)
        for rank in range(world):
            sign = Path(f"{self.where}.stopped.{launch.number}.{rank}")
            self.wait_while_alive(launch, sign.exists, f"rank {rank} stopped")
        self.wait_committed(1, launch)
        launch.kill()
        launch.end_store()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        soak("zero", 3),
        ("pipeline", 2),
        soak("fsdp1", 2),
        ("fsdp2", 3),
        soak("hsdp", 4),
        ("mesh", 4),
        soak("pipeline", 4),
        soak("fsdp1", 3),
        soak("zero", 4),
    ],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(kind: str, world: int, make_job: MakeJob) -> None:
    straight = make_job("straight", "--kind", kind, kind=Framework)
    job = make_job("job", "--kind", kind, kind=Framework)
    assert isinstance(straight, Framework) and isinstance(job, Framework)
    straight.launch(world).wait_well()
    job.kill_at(STOP, world)
    job.launch(world).wait_well()
    found, expected = job.ends(world), straight.ends(world)
    (resumed,) = {end["resumed"] for end in found}
    assert resumed > 0 and not job.events("mismatch")
    assert [end["digests"] for end in found] == [end["digests"] for end in expected]
    assert all(end["digests"] for end in expected)
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("kind", "world", "text"),
    [("zero", 3, "ZeRO's state was saved by 2 ranks, these are 3"), ("fsdp1", 1, "restart on 2 ranks")],
)
def test_what_cannot_be_cut_anew_is_refused_on_another_number_of_ranks(
    kind: str, world: int, text: str, make_job: MakeJob
) -> None:
    job = make_job("job", "--kind", kind, kind=Framework)
    assert isinstance(job, Framework)
    job.kill_at(STOP, 2)
    job.kill_agents()
    launch = job.launch(world)
    assert launch.wait() == [1] * world, launch.logs()
    assert text in launch.logs()


def test_what_was_the_same_and_drifts_apart_becomes_each_rank_s_own(make_job: MakeJob) -> None:
    """Parts of it would not fit together: that checkpoint is void, the ranks look again, and later ones hold all."""
    straight, job = (make_job(name, "--kind", "drift", "--steps", 30, kind=Framework) for name in ("straight", "job"))
    assert isinstance(straight, Framework) and isinstance(job, Framework)
    straight.launch(3, "--sleep", 0.05).wait_well()
    job.kill_at(24, 3, "--sleep", 0.05)
    assert any("were the same" in event["error"] for event in job.events("persist-failed"))
    job.launch(3).wait_well()
    found, expected = job.ends(3), straight.ends(3)
    assert min(end["resumed"] for end in found) > 4
    assert [end["digests"] for end in found] == [end["digests"] for end in expected]
    assert len({end["digests"]["beside"] for end in found}) == 3


def test_generators_on_another_number_of_ranks_are_derived_and_that_is_said(make_job: MakeJob) -> None:
    job = make_job("job", "--kind", "fsdp2", kind=Framework)
    assert isinstance(job, Framework)
    job.kill_at(STOP, 2)
    job.launch(3).wait_well()
    said = [event for event in job.events("mismatch") if "derived from the run's seed" in event["problems"][0]]
    assert sorted(event.get("rank", 0) for event in said) == [0, 1, 2]
