"""A wrong set-up on one of the ranks is refused at the start, and the rank is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ranks.conftest import MakeJob
from tests.ranks.launch import Launch
from tests.ranks.test_odd import Odd


@pytest.fixture
def job(make_job: MakeJob) -> Odd:
    made = make_job("job", kind=Odd)
    assert isinstance(made, Odd)
    return made


def errors(job: Odd, launch: Launch) -> list[list[str]]:
    assert launch.wait(60) == [3, 3], launch.logs()
    return [report["error"] for report in job.reports(launch)]


@pytest.mark.parametrize("how", ["empty", "another run", "a copy", "only="])
def test_a_run_directory_that_is_not_shared(how: str, job: Odd, tmp_path: Path) -> None:
    """It exists on each machine, and each machine has its own."""
    own, restore = tmp_path / "own", {}
    if how == "empty":
        own.mkdir()
    else:
        job.end(steps=3)
        shutil.copytree(job.where, own)
    if how in ("another run", "only="):
        shutil.rmtree(own)
        job.go(world=1, steps=3, each={0: {"STEPWELL_WHERE": str(own)}}).wait_well()
        restore = {"only": "model"} if how == "only=" else {}
    launch = job.go(steps=3, restore=restore, each={1: {"STEPWELL_WHERE": str(own)}})
    (kind, mine), (_, other) = reversed(errors(job, launch))
    assert kind == "ConfigError" and mine in other
    assert f"{own} is not the same directory on rank 1 as on rank 0" in mine and other.startswith("rank 1: ")


def test_caches_on_some_nodes_only(job: Odd, tmp_path: Path) -> None:
    launch = job.go(steps=3, each={1: {"STEPWELL_CACHE": str(tmp_path / "cache")}})
    for kind, text in errors(job, launch):
        assert kind == "ConfigError" and "rank 0 has none" in text and "rank 1 has Node(" in text
