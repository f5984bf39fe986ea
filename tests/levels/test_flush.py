"""Carrying on to the shared place: what is broken off is not given up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepwell.agent.target.flush import Flusher
from stepwell.agent.target.shared_target import Persister
from stepwell.events import journal
from stepwell.levels import cached
from stepwell.levels.assignments import run_cache
from stepwell.levels.level_spec import Pairs
from stepwell.storage.store import catalog, files
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import Keep, Owner
from tests.levels.field import NEW, RUN, Field
from tests.levels.peer_node import until


def two_nodes(folder: Path) -> tuple[Field, RunPaths]:
    """Which hold a whole checkpoint, and a shared place without it."""
    field, shared = Field(folder / "nodes", "ab", Pairs()), RunPaths(folder / "run")
    open_run(shared, seed=1)
    create_next(shared, parent=0, step=0)
    field.build()
    field.decide(NEW)
    return field, shared


def make_flusher(field: Field, shared: RunPaths, rank: int) -> Flusher:
    log = journal.EventLog(Path(os.devnull), who="agent")
    paths = RunPaths(shared.root, rank)
    persister = Persister(paths, log, lineage=1, patience=60.0)
    owner = Owner(rank, len(field.domains))
    place = run_cache(field.place(field.domains[rank]), RUN, rank)
    made = Flusher(persister, place, owner, Keep(), None, 1)
    made.start()
    made.add(NEW)
    return made


def test_a_leader_that_is_replaced_while_it_waits_does_not_give_up(tmp_path: Path) -> None:
    field, shared = two_nodes(tmp_path)
    first = make_flusher(field, shared, 0)
    until(lambda: files.exists(shared.checkpoint(NEW) / "rank-00000.json"))  # it waits for the other rank
    first.close()  # a new trainer took this agent over
    until(lambda: first.is_idle)
    assert not cached.is_flushed(run_cache(field.place("a"), RUN), NEW, [0])
    leader, other = make_flusher(field, shared, 0), make_flusher(field, shared, 1)
    until(lambda: leader.is_idle and other.is_idle)
    manifest = catalog.read_manifest(shared, NEW)
    for rank in (0, 1):
        record = catalog.read_record(shared, manifest, rank)
        for file in record.files:
            assert files.get(shared.checkpoint(NEW) / file.name) == field.contents[NEW][rank][file.name]
    assert cached.is_flushed(run_cache(field.place("a"), RUN), NEW, [0])
    leader.close()
    other.close()


def test_a_leader_that_waits_for_nothing_any_more_does_not_get_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of the other rank was killed at the end of the run. Nothing is called void, and who comes next ends it.

    Bytes that arrive are a sign of life: then it goes on waiting.
    """
    monkeypatch.setattr("stepwell.agent.target.flush._STILL_SECONDS", 0.5)
    field, shared = two_nodes(tmp_path)
    leader = make_flusher(field, shared, 0)
    until(lambda: files.exists(shared.checkpoint(NEW) / "rank-00000.json"))
    until(lambda: not leader.is_moving)
    assert not leader.is_idle and not files.exists(shared.void(NEW))
    with (Path(str(shared.checkpoint(NEW))) / "rank-00001.safetensors.tmp").open("wb") as file:
        file.write(b"more")
    until(lambda: leader.is_moving)
    other = make_flusher(field, shared, 1)
    until(lambda: leader.is_idle and other.is_idle)
    assert catalog.read_manifest(shared, NEW).world_size == 2
    leader.close()
    other.close()
