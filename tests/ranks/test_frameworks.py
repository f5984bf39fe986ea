"""Other ways to spread a state over ranks: killed with SIGKILL and started again, they end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import HERE, Job

STOP = 5


class Framework(Job):
    script = HERE / "frameworks.py"

    def ends(self, world: int) -> list[dict[str, Any]]:
        return [json.loads(Path(f"{self.where}.end.{rank}").read_text()) for rank in range(world)]

    def kill_at(self, step: int, world: int) -> None:
        """Run to a step, wait until the checkpoint before it is committed, and kill all ranks."""
        launch = self.launch(world, "--stop-at", step)
        for rank in range(world):
            sign = Path(f"{self.where}.stopped.{launch.number}.{rank}")
            self.wait_while_alive(launch, sign.exists, f"rank {rank} stopped")
        self.wait_committed(step - 1, launch)
        launch.kill()
        launch.end_store()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world"),
    [("zero", 3), ("pipeline", 2), ("fsdp1", 2), ("hsdp", 4), soak("pipeline", 4), soak("fsdp1", 3), soak("zero", 4)],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(kind: str, world: int, make_job: MakeJob) -> None:
    straight = make_job("straight", "--kind", kind, kind=Framework)
    job = make_job("job", "--kind", kind, kind=Framework)
    assert isinstance(straight, Framework) and isinstance(job, Framework)
    straight.launch(world).wait_well()
    job.kill_at(STOP, world)
    job.launch(world).wait_well()
    found, expected = job.ends(world), straight.ends(world)
    assert {end["resumed"] for end in found} == {STOP - 1}
    assert [end["digests"] for end in found] == [end["digests"] for end in expected]
    assert all(end["digests"] for end in expected)
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("kind", "world", "text"),
    [("zero", 3, "ZeRO's state was saved by 2 ranks, these are 3"), ("fsdp1", 1, "saved by 2 ranks, these are 1")],
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
