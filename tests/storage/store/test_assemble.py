"""One commit for all ranks: records, the word that there is none, and how the leader ends it."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.agent.target.shared_target import Persister
from stepwell.agent.target.spill import Spill
from stepwell.errors import FencedError, VoidError
from stepwell.events.journal import EventLog
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.manifest import Void
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import assemble, catalog, commit, files
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner
from tests.requests import request

WORLD = 3


class Scene:
    """A run in its first lineage, and one checkpoint that its ranks are about to write."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.run = open_run(self.paths, seed=1).id
        self.lineage = create_next(self.paths, parent=0, step=0).number
        self.id = CheckpointId(5, 0, self.lineage)
        self.directory = commit.open_checkpoint(self.paths, self.id, Owner(0, WORLD))

    def record(self, rank: int, *, created: float = 1.0, world: int = WORLD, copies: str = "") -> Record:
        owner = Owner(rank, world)
        name = f"{owner.stem}.safetensors"
        (self.directory / name).write_bytes(bytes(4096))
        file = FileEntry(name, "safetensors", 4096, 4096, ("0" * 16,))
        said = {"0,1,2": copies} if copies else {}
        return Record(self.run, self.id, owner, created, (file,), (), {}, copies=said)

    def leave(self, *ranks: int) -> None:
        for rank in ranks:
            assemble.leave_record(self.paths, self.record(rank))

    def void(self, rank: int, reason: str = "no memory") -> Void:
        return Void(self.run, self.id, rank, reason)

    def gather(self) -> list[int]:
        """The ranks that are missing, or those whose records are all there, as negative numbers."""
        found = assemble.gather(self.paths, self.id, WORLD)
        return [item if isinstance(item, int) else -item.owner.rank for item in found]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "run")


def test_the_leader_waits_for_all_records(scene: Scene) -> None:
    assert scene.gather() == [0, 1, 2]
    scene.leave(2, 0)
    assert scene.gather() == [1]
    scene.leave(1)
    assert scene.gather() == [0, -1, -2]


def test_the_leader_reads_summaries_and_no_record(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record grows with the leaves. Control: where a summary is lost, or damaged, the record says the same."""
    scene.leave(0, 1, 2)
    loaded: list[str] = []
    load = Record.load
    monkeypatch.setattr(Record, "load", lambda data, *, path: loaded.append(path) or load(data, path=path))
    expected = assemble.gather(scene.paths, scene.id, WORLD)
    assert not loaded
    (scene.directory / "rank-00001.summary").unlink()
    summary = scene.directory / "rank-00002.summary"
    summary.write_bytes(summary.read_bytes().replace(b'"rank":2', b'"rank":1'))
    assert assemble.gather(scene.paths, scene.id, WORLD) == expected
    assert sorted(Path(path).name for path in loaded) == ["rank-00001.json", "rank-00002.json"]


def test_a_summary_is_that_of_the_record_that_is_there(scene: Scene) -> None:
    """An agent died between the two, and the next one comes with another record."""
    scene.leave(0, 1, 2)
    (scene.directory / "rank-00001.summary").unlink()
    assemble.leave_record(scene.paths, scene.record(1, created=2.0))
    (scene.directory / "rank-00002.summary").unlink()
    assert assemble.resume_record(scene.paths, scene.id, Owner(2, WORLD)) == scene.record(2)
    for rank, summary in enumerate(assemble.gather(scene.paths, scene.id, WORLD)):
        data = (scene.directory / f"rank-{rank:05d}.json").read_bytes()
        assert not isinstance(summary, int)
        assert (summary.nbytes, summary.digest, summary.created) == (len(data), document_digest(data), 1.0)
        assert (scene.directory / f"rank-{rank:05d}.summary").exists()


def test_a_manifest_of_summaries_names_the_records(scene: Scene) -> None:
    scene.leave(0, 1, 2)
    summaries = [item for item in assemble.gather(scene.paths, scene.id, WORLD) if not isinstance(item, int)]
    manifest = assemble.make_manifest(summaries, epoch_end=True)
    commit.publish_manifest(scene.paths, manifest)
    found = catalog.read_manifest(scene.paths, scene.id)
    assert found == manifest and found.epoch_end and found.nbytes == 3 * 4096
    assert [catalog.read_record(scene.paths, found, rank) for rank in range(3)] == [
        scene.record(rank) for rank in range(3)
    ]


def test_the_directory_is_durable_before_the_manifest(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 syncs it for all. A part that lies there while rank 0 has none is synced by its own rank."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    log = EventLog(scene.paths.events, who="agent")
    how: Any = {"lineage": scene.lineage, "patience": 1.0}
    for rank, expected in ((0, True), (1, False)):
        persister = Persister(RunPaths(scene.paths.root, rank), log, **how)
        pending: Any = SimpleNamespace(id=scene.id, owner=Owner(rank, WORLD), failures=0)
        persister.open(pending)
        assert (scene.paths.root in synced) is expected
        synced.clear()
    Spill(RunPaths(scene.paths.root, 1), Owner(1, WORLD), Keep(), log, **how).open(pending)
    assert scene.paths.root in synced


def test_a_disk_without_room_for_a_summary_takes_the_record(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "put_hint", full)
    scene.leave(0, 1, 2)
    assert scene.gather() == [0, -1, -2] and not list(scene.directory.glob("*.summary*"))


def test_a_record_is_never_replaced(scene: Scene) -> None:
    first = assemble.leave_record(scene.paths, scene.record(1, created=1.0))
    again = assemble.leave_record(scene.paths, scene.record(1, created=2.0))
    assert first.created == again.created == 1.0
    assert assemble.find_record(scene.paths, scene.id, Owner(1, WORLD)) == first
    assert assemble.find_record(scene.paths, scene.id, Owner(2, WORLD)) is None


def test_a_word_that_there_is_none_wins_over_records(scene: Scene) -> None:
    scene.leave(0, 1)
    assemble.leave_void(scene.paths, scene.void(2))
    with pytest.raises(VoidError, match="rank 2: no memory") as raised:
        scene.gather()
    assert raised.value.fields["rank"] == 2
    assemble.check_void(scene.paths, scene.id)  # the leader has not ended it yet


def test_the_end_that_was_said_once_stays(scene: Scene) -> None:
    """Its next agent finds all records: the others have heard, and let go."""
    assemble.end_void(scene.paths, scene.void(1, "no part of rank 1 within 600 s"))
    scene.leave(0, 1, 2)
    with pytest.raises(VoidError, match="within 600 s"):
        scene.gather()
    with pytest.raises(VoidError, match="within 600 s"):
        assemble.check_void(scene.paths, scene.id)


def test_the_leader_s_own_word_ends_it(scene: Scene) -> None:
    """It has no part it would look after, so nobody else would."""
    scene.leave(1, 2)
    assemble.leave_void(scene.paths, scene.void(0, "its snapshot is void"))
    with pytest.raises(VoidError, match="rank 0: its snapshot is void"):
        assemble.check_void(scene.paths, scene.id)


def test_a_word_before_anything_else_is_there(scene: Scene) -> None:
    other = Void(scene.run, CheckpointId(9, 0, scene.lineage), 1, "refused")
    assemble.leave_void(scene.paths, other)
    assemble.leave_void(scene.paths, other)  # said again by the next agent
    with pytest.raises(VoidError, match="rank 1: refused"):
        assemble.gather(scene.paths, other.id, WORLD)


@pytest.mark.parametrize("how", ["another world", "another checkpoint", "cut off", "no record"])
def test_a_record_that_is_not_ours_makes_it_void(scene: Scene, how: str) -> None:
    """Nothing would ever replace it, so nobody waits for another one."""
    scene.leave(0, 2)
    path = scene.directory / "rank-00001.json"
    if how == "another world":
        path.write_bytes(scene.record(1, world=2).dump())
    elif how == "another checkpoint":
        record = scene.record(1)
        path.write_bytes(Record(**{**vars(record), "id": CheckpointId(4, 0, scene.lineage)}).dump())
    else:
        path.write_bytes(scene.record(1).dump()[:50] if how == "cut off" else b"[]\n")
    with pytest.raises(VoidError) as raised:
        scene.gather()
    assert raised.value.fields["rank"] == 1


def test_stray_names_do_not_count(scene: Scene) -> None:
    scene.leave(0, 1)
    for name in ("rank-00002.json.77.tmp", "rank-2.json", "rank-00003.json", "void.json.5.tmp", "notes"):
        (scene.directory / name).write_bytes(b"?")
    assert scene.gather() == [2]


def test_copies_that_differ_make_it_void_and_say_that_they_drifted(scene: Scene) -> None:
    for rank, copies in enumerate(("a", "a", "b")):
        assemble.leave_record(scene.paths, scene.record(rank, copies=copies * 16))
    with pytest.raises(VoidError, match="rank 2: tensors that were the same on ranks 0,1,2") as raised:
        scene.gather()
    assert raised.value.fields["is_drift"]


def test_a_leader_whose_run_went_on_ends_nothing(scene: Scene) -> None:
    scene.leave(0, 1, 2)
    create_next(scene.paths, parent=scene.lineage, step=2)
    for word in (assemble.end_void, assemble.leave_void):
        with pytest.raises(FencedError):
            word(scene.paths, scene.void(0))
    with pytest.raises(FencedError):
        commit.open_checkpoint(scene.paths, scene.id, Owner(1, WORLD))
    assert not (scene.directory / "void.json").exists()


def test_what_is_gone_was_given_up_or_is_not_needed_any_more(scene: Scene) -> None:
    gone = CheckpointId(3, 0, scene.lineage)
    with pytest.raises(VoidError, match="given up and removed"):
        assemble.check_waiting(scene.paths, gone)
    assert not assemble.is_outdated(scene.paths, gone), "nothing newer is committed"
    newer = CheckpointId(scene.id.step + 1, 0, scene.lineage)
    for id, is_outdated in ((scene.id, False), (newer, True)):  # the newest two are never removed, so it was not whole
        files.make_directory(scene.paths.checkpoint(id))
        (scene.paths.checkpoint(id) / "manifest.json").write_bytes(b"committed, as far as a look tells")
        assert assemble.is_outdated(scene.paths, gone) == is_outdated
    assert not assemble.is_outdated(scene.paths, CheckpointId(7, 0, scene.lineage)), "it is the newer one"
    assert not assemble.is_outdated(scene.paths, scene.id)


def test_a_void_one_takes_no_room(scene: Scene) -> None:
    """Only what this rank wrote goes: the others may still be at work."""
    scene.leave(0, 1)
    for name in ("rank-00001.file.notes", "rank-00001.frozen.safetensors", "rank-00010.safetensors"):
        (scene.directory / name).write_bytes(b"?")
    assemble.leave_void(scene.paths, scene.void(1))
    assemble.withdraw(scene.paths, scene.id, Owner(1, WORLD), None)
    left = [name for name in files.list_names(scene.directory) if not name.startswith("rank-00000")]
    assert left == ["rank-00001.frozen.safetensors", "rank-00001.void", "rank-00010.safetensors"]
    assemble.withdraw(scene.paths, CheckpointId(99, 0, 1), Owner(1, WORLD), None)  # nothing is there


def test_a_reason_that_cannot_be_read_is_a_reason(scene: Scene) -> None:
    (scene.directory / "rank-00002.void").write_bytes(b"?")
    with pytest.raises(VoidError, match="the reason cannot be read"):
        scene.gather()


def test_a_rank_that_loses_patience_leaves_its_part_to_the_leader(scene: Scene) -> None:
    """Which may have gathered the records and be about to name them. Control: after its word the part goes."""
    scene.leave(0, 1, 2)
    log = EventLog(scene.paths.events, who="agent")
    persister = Persister(RunPaths(scene.paths.root, 1), log, lineage=scene.lineage, patience=0.0)
    pending: Any = SimpleNamespace(
        id=scene.id, owner=Owner(1, WORLD), written_at=0.0, record=scene.record(1), request=request()
    )
    with pytest.raises(VoidError, match="the leader did not finish"):
        persister.follow(pending)
    assert sorted(scene.gather()) == [-2, -1, 0], "the records are whole: the leader may commit"
    assemble.end_void(scene.paths, scene.void(2))
    with pytest.raises(VoidError, match="no memory"):
        persister.follow(pending)
    assert [name for name in files.list_names(scene.directory) if name.startswith("rank-00001")] == []
