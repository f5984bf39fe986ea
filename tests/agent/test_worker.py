"""How the leader's agent ends the checkpoints of many ranks: in order, and none is waited for in vain."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.agent.pending import AgentLayout, Pending
from stepwell.agent.worker import Worker
from stepwell.handover.memory import PAGE, Arena, ArenaShape
from stepwell.handover.protocol import Begin, Released, WriteFailed
from stepwell.storage.format.manifest import Void
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import assemble, commit
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner
from tests.agent.puppet import is_about, make_request

WORLD = 2


class Scene:
    """The leader has written its parts of two checkpoints, and the test is rank 1. No thread: the test says when."""

    def __init__(self, root: Path, patience: float) -> None:
        self.paths = RunPaths(root)
        self.run = open_run(self.paths, seed=1).id
        self.lineage = create_next(self.paths, parent=0, step=0).number
        self.arena = Arena.allocate(ArenaShape(1, 2, PAGE, 0))
        self.worker = Worker()
        self.worker.serve(self.paths, Owner(0, WORLD), self.lineage, Keep(), patience)
        self.older, self.newer = self._written(6, 0), self._written(9, 1)

    def _written(self, step: int, slot: int) -> Pending:
        owner, layout = Owner(0, WORLD), AgentLayout(1, 100, 0, (), {})
        begin = Begin(make_request(step), step, slot, 1, 1, 0)
        pending = Pending(self.run, self._id(step), owner, self.arena, layout, begin)
        commit.open_checkpoint(self.paths, pending.id, owner)
        pending.record = self.leave_record(step, rank=0)
        self.worker.queue.add(pending)
        self.worker.note_written(pending)
        return pending

    def _id(self, step: int) -> CheckpointId:
        return CheckpointId(step, 0, self.lineage)

    def leave_record(self, step: int, rank: int = 1) -> Record:
        owner = Owner(rank, WORLD)
        name = f"{owner.stem}.safetensors"
        (self.paths.checkpoint(self._id(step)) / name).write_bytes(bytes(4096))
        file = FileEntry(name, "safetensors", 4096, 4096, ("0" * 16,))
        return assemble.leave_record(self.paths, Record(self.run, self._id(step), owner, 1.0, (file,), (), {}))

    def leave_void(self, step: int) -> None:
        assemble.leave_void(self.paths, Void(self.run, self._id(step), 1, "no memory"))

    def look(self) -> None:
        self.worker._follow(self.worker.queue.written())

    def is_committed(self, pending: Pending) -> bool:
        return self.paths.manifest(pending.id).exists()

    def said(self, pending: Pending) -> list[tuple[str, str]]:
        """What the leader's trainer is told of it, beside that its slot is free."""
        words = [word for word in self.worker.outbox if is_about(word, pending.sequence)]
        errors = [(word.kind, word.error if isinstance(word, WriteFailed) else "") for word in words]
        return [said for word, said in zip(words, errors, strict=True) if not isinstance(word, Released)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def scene(patience: float = 600.0) -> Scene:
        made.append(Scene(tmp_path / "run", patience))
        return made[-1]

    yield scene
    for item in made:
        item.worker.log.close()
        item.arena.close()


@pytest.mark.parametrize("word", ["void", "record"])
def test_what_a_rank_says_between_two_looks_is_heard(
    word: str, make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader has looked at the older one, then rank 1 ends it and writes the newer one, then the leader looks at
    that: to commit it would remove the older one with all that was said, and the leader would wait for that in vain.
    """
    scene, gather, looked = make(), assemble.gather, []

    def speak_after_the_first(paths: RunPaths, id: CheckpointId, world_size: int) -> Any:
        found = gather(paths, id, world_size)
        if not looked:
            (scene.leave_void if word == "void" else scene.leave_record)(6)
            scene.leave_record(9)
        looked.append(id)
        return found

    monkeypatch.setattr(assemble, "gather", speak_after_the_first)
    scene.look()
    scene.look()
    assert scene.older.is_over and scene.newer.is_over
    assert scene.is_committed(scene.newer)
    assert scene.is_committed(scene.older) == (word == "record")
    assert scene.said(scene.older) == [("durable", "") if word == "record" else ("failed", "rank 1: no memory")]
    assert scene.said(scene.newer) == [("durable", "")]


def test_one_that_somebody_removed_is_not_waited_for(make: Callable[..., Scene]) -> None:
    scene = make()
    shutil.rmtree(scene.paths.checkpoint(scene.older.id))
    scene.leave_record(9)
    scene.look()
    ((kind, error),) = scene.said(scene.older)
    assert kind == "failed" and "was removed while waiting for its parts" in error
    assert scene.is_committed(scene.newer)


@pytest.mark.parametrize("patience", [600.0, 0.0])
def test_one_that_cannot_be_read_holds_the_next_for_a_while_only(patience: float, make: Callable[..., Scene]) -> None:
    scene = make(patience)
    shutil.rmtree(scene.paths.checkpoint(scene.older.id))
    scene.paths.checkpoint(scene.older.id).write_bytes(b"a file in the place of a directory")
    scene.leave_record(9)
    scene.look()
    assert scene.is_committed(scene.newer) == scene.older.is_over == (not patience)


def test_one_of_a_trainer_before_holds_nothing_up(make: Callable[..., Scene]) -> None:
    """Its ranks died a step apart: the other one has written another step, and never writes this one."""
    scene = make()
    successor = create_next(scene.paths, parent=scene.lineage, step=6)
    scene.worker.serve(scene.paths, Owner(0, WORLD), successor.number, Keep(), 600.0)
    scene.lineage = successor.number
    newest = scene._written(12, 0)
    scene.leave_record(12)
    scene.look()
    assert scene.is_committed(newest) and not scene.older.is_over
    assert scene.newer.is_over  # fenced: the successor left history before it
    scene.look()
    ((kind, error),) = scene.said(scene.older)
    assert kind == "failed" and "was removed while waiting for its parts" in error
