"""A state of which each rank has a part goes from world to world, from kind to kind: every full tensor stays the same.

Each launch restores what the one before it saved, digests every full tensor, trains on, saves, digests again, and ends.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import HERE, Job, Launch

Hop = tuple[str, int]
FSDP: list[Hop] = [("fsdp", 4), ("fsdp", 2), ("fsdp", 3), ("fsdp", 1), ("ddp", 2)]
MESH: list[Hop] = [("tp", 4), ("tp", 1)]
ROUND: list[Hop] = [("ddp", 2), ("tp", 4), ("fsdp", 3), ("plain", 1), ("tp", 2), ("fsdp", 4)]


class Sharded(Job):
    script = HERE / "sharded.py"

    def result(self, launch: Launch) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(f"{self.where}.{launch.number}.json").read_text())
        return found

    def own(self, launch: Launch) -> list[dict[str, int]]:
        """Of each rank: the bytes it holds, and its process."""
        return [json.loads(Path(f"{self.where}.{launch.number}.{rank}").read_text()) for rank in range(launch.world)]

    def hop(self, kind: str, world: int, *arguments: object) -> Launch:
        launch = self.launch(world, "--kind", kind, *arguments)
        launch.wait_well(300)
        return launch


def read_bytes(job: Sharded, launch: Launch) -> list[int]:
    """What each rank read in its restore."""
    by_process = {event["process"]: event["nbytes"] for event in job.events("restore")}
    return [by_process[own["pid"]] for own in job.own(launch)]


def slack_bytes(job: Sharded) -> int:
    """Blocks are verified whole: at each end of a piece of a tensor up to one block more is read."""
    newest = job.newest()
    assert newest is not None
    records = job.records(newest)
    block = max(file.block_bytes for record in records for file in record.files)
    return 2 * block * max(len(record.leaves) for record in records)


def check_hops(job: Sharded, hops: list[Hop], *arguments: object, is_large: bool = False) -> None:
    saved, step, slack = None, 0, 0
    for kind, world in hops:
        launch = job.hop(kind, world, *arguments)
        result = job.result(launch)
        assert result["restored"] == saved, f"{kind} on {world}: {first_difference(result['restored'], saved)}"
        if saved is not None:
            for own, read in zip(job.own(launch), read_bytes(job, launch), strict=True):
                least = own["local_bytes"]
                limit = 1.1 * least + (0 if is_large else slack)
                assert read <= limit, f"{kind} on {world}: {read} bytes read, {least} are needed"
        assert result["step"] == step + len(result["losses"]) and all(map(math.isfinite, result["losses"]))
        saved, step, slack = result["saved"], result["step"], slack_bytes(job)
        newest = job.newest()
        assert newest is not None and newest.manifest is not None
        assert (newest.id.step, newest.manifest.world_size) == (step, world)
        job.verify(newest)
    job.check_nothing_left()


def first_difference(found: dict[str, str] | None, expected: dict[str, str] | None) -> str:
    found, expected = found or {}, expected or {}
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return f"{len(names)} tensors differ, the first is {names[0]}" if names else "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("hops", [FSDP, MESH, soak(ROUND)], ids=["fsdp", "mesh", "round"])
def test_every_full_tensor_survives_every_hop(hops: list[Hop], make_job: MakeJob) -> None:
    job = make_job("job", *(["--foreach"] if hops is FSDP else []), kind=Sharded)  # no version tells of its steps
    assert isinstance(job, Sharded)
    check_hops(job, hops)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hops", [FSDP, MESH], ids=["fsdp", "mesh"])
def test_each_rank_reads_little_more_than_its_part(hops: list[Hop], make_job: MakeJob) -> None:
    """2.4 GB of state in two tensors and their moments, so that blocks at the ends of pieces do not count."""
    job = make_job("job", "--width", 8192, "--hidden", 12288, "--depth", 1, "--steps", 1, "--large", kind=Sharded)
    assert isinstance(job, Sharded)
    check_hops(job, [hop for hop in hops if hop[0] != "ddp"], is_large=True)


# -- the script without stepwell: kinds and worlds train alike --------------------------------------------------------


@pytest.mark.parametrize(("kind", "world"), [("tp", 4), soak("ddp", 2), soak("fsdp", 3), soak("fsdp", 4)])
def test_kinds_and_worlds_train_alike(kind: str, world: int, make_job: MakeJob) -> None:
    job, reference = make_job("job", kind=Sharded), make_job("reference", kind=Sharded)
    assert isinstance(job, Sharded) and isinstance(reference, Sharded)
    expected = reference.result(reference.hop("plain", 1, "--without-stepwell"))
    found = job.result(job.hop(kind, world, "--without-stepwell"))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["saved"].keys() == expected["saved"].keys()
    shapes = {name: text.rpartition(" ")[0] for name, text in found["saved"].items()}
    assert shapes == {name: text.rpartition(" ")[0] for name, text in expected["saved"].items()}


def test_one_rank_of_stepwell(make_job: MakeJob) -> None:
    job = make_job("job", kind=Sharded)
    assert isinstance(job, Sharded)
    check_hops(job, [("plain", 1), ("plain", 1)])
