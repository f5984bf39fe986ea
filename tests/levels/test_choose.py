"""Where checkpoints go first if nobody says: to the faster place, measured by all ranks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.events.journal import read_events
from stepwell.levels import first_level
from stepwell.levels.level_spec import (
    Levels,
    Node,
    Pairs,
    Partner,
    Protection,
    ReedSolomon,
    Shared,
    Single,
    Xor,
    read_levels,
)
from stepwell.storage.store.paths import RunPaths
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, soak
from tests.training.loop.small import Small


@pytest.mark.parametrize(
    ("node", "shared", "protect", "expected"),
    [
        (1.0, 2.1, Pairs(), True),
        (1.0, 1.9, Pairs(), False),  # everything is written twice
        (1.0, 1.9, Partner(), False),
        (1.0, 1.1, Single(), True),
        (1.0, 1.3, Xor(5), True),
        (1.0, 1.2, Xor(5), False),
        (1.0, 1.4, ReedSolomon(8, 2), True),
        (1.0, 1.3, ReedSolomon(8, 2), False),
        (None, 9.0, Single(), False),
        (9.0, None, Pairs(), True),
        (None, None, Pairs(), True),
    ],
)
def test_the_faster_one_counting_what_protection_costs(
    node: float | None, shared: float | None, protect: Protection, expected: bool
) -> None:
    assert first_level.is_worth_it(node, shared, protect) is expected


def test_what_is_written_to_measure_is_little_and_gone(tmp_path: Path) -> None:
    assert (
        first_level.probe_bytes(1) == 32 << 20
        and first_level.probe_bytes(64) == 4 << 20
        and first_level.probe_bytes(4096) == 2 << 20
    )
    seconds = first_level.write_seconds(tmp_path, 3, 2 << 20)
    assert seconds is not None and seconds > 0 and not list(tmp_path.iterdir())
    assert first_level.write_seconds(tmp_path / "not there", 3, 2 << 20) is None


def test_what_was_not_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEPWELL_CACHE", raising=False)
    assert read_levels(None) is None
    monkeypatch.setenv("STEPWELL_CACHE", str(tmp_path))
    assert read_levels(None) == Levels(Node(tmp_path), Shared(), is_default=True)
    assert read_levels([]) is None
    assert read_levels([Node()]) == Levels(Node(tmp_path), Shared())


def chosen(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "levels-chosen"]


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_run_goes_where_it_is_faster_and_finds_what_lies_in_either(
    is_slow: bool, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start chooses differently, and goes on from what the first one left."""
    monkeypatch.setenv("STEPWELL_CACHE", str(tmp_path / "cache"))
    steps = []
    for number in range(2):
        shared_seconds = 9.0 if is_slow == (number == 0) else 0.001
        monkeypatch.setattr(
            first_level,
            "write_seconds",
            lambda place, *_: shared_seconds if place == run_dir else 1.0,  # noqa: B023
        )
        run = Small(run_dir, {"policy": stepwell.Never()})
        assert run.ckpt.restore() == bool(number)
        steps.append(run.ckpt.status().step)
        run.train(stop_after=3)
        run.ckpt.save().upload_completion.result(60)  # a policy's first ones may be put off: memory is made ready
        on_node = list((tmp_path / "cache").glob("runs/*/step-*/manifest.json"))
        assert bool(on_node) == (is_slow or number == 1)
        run.ckpt.close(save=False)
    assert steps == [0, 3]
    first, second = chosen(run_dir)
    assert [first["first"], second["first"]] == ["the nodes", "the shared place"][:: 1 if is_slow else -1]
    assert (first["node_seconds"], first["shared_seconds"]) == (1.0, 9.0 if is_slow else 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, soak(2)])
def test_all_ranks_choose_alike(world: int, make_job: MakeJob) -> None:
    """Caches in memory, the run on the disk: whatever is chosen, by all, and it ends well."""
    job = make_job("job", "--samples", 48, "--epochs", 4, kind=Cluster)
    assert isinstance(job, Cluster)
    each = {
        rank: {"STEPWELL_NODE": f"n{rank}", "STEPWELL_CACHE": str(job.folder / f"node.n{rank}")}
        for rank in range(world)
    }
    job.nodes = [f"n{rank}" for rank in range(world)]
    job.launch(world, each=each).wait_well()
    found = [
        event["first"]
        for rank in range(world)
        for event in read_events(RunPaths(job.where, rank).events)
        if event["kind"] == "levels-chosen"
    ]
    assert len(found) == world and len(set(found)) == 1
    job.check_nothing_left()
