"""What goes from a node's cache, and what stays."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.agent.files.writer import Writer
from stepwell.agent.target.node_target import NodeTarget
from stepwell.agent.target.spill import Spill
from stepwell.errors import VoidError
from stepwell.events import journal
from stepwell.levels.assignments import Orders, Seat, run_cache
from stepwell.levels.cached import Level
from stepwell.levels.level_spec import Pairs, Shared
from stepwell.levels.protect.copies import keep_shard
from stepwell.ranks.wire.secret import draw_secret
from stepwell.storage.store import files
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner
from tests.levels.field import RUN, from_memory, make_record
from tests.requests import request


def make_keeper(place: Path, lineage: int = 2, rank: int = 0) -> NodeTarget:
    """The agent's keeper of one rank of two, on nodes of their own; the other one cannot be reached."""
    seats = (Seat("a", "a", "127.0.0.1", 1), Seat("b", "b", "127.0.0.1", 1))
    orders = Orders(str(place), RUN, 2, Pairs(), Shared(), draw_secret(), seats)
    log = journal.EventLog(Path(os.devnull), who="agent")
    return keeper_of(orders, Owner(rank, 2), log, lineage=lineage, patience=5.0)


def keeper_of(orders: Orders, owner: Owner, log: journal.EventLog, **limits: Any) -> NodeTarget:
    spill = Spill(RunPaths(Path(orders.cache) / "run"), owner, Keep(), log, **limits)
    return NodeTarget(orders, owner, log, Writer(), spill, **limits)


def test_what_processes_that_died_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    root = Path(str(run_cache(tmp_path, RUN).root))
    old, new = CheckpointId(3, 0, 1), CheckpointId(6, 0, 2)
    for id in (old, new):
        (root / id.directory).mkdir(parents=True)
    gone = [
        root / new.directory / f"parity-00001.bin.{process.pid}.tmp",
        root / new.directory / f"rank-00001.safetensors.{process.pid}.tmp",
        root / new.directory / f"level.json.12345.{process.pid}.tmp",
        root / new.directory / "rank-00000.safetensors.tmp",  # this rank's own: it has one writer
        root / old.directory / "rank-00001.safetensors.tmp",
        root / "spare.rank-00001.l0001.tmp",
    ]
    kept = [
        root / new.directory / f"rank-00001.safetensors.{os.getpid()}.tmp",
        root / new.directory / "rank-00001.safetensors.tmp",
        root / new.directory / "rank-00001.json",
        root / "spare.rank-00001.l0002.tmp",
        tmp_path / "runs" / "fedcba9876543210" / old.directory / f"rank-00001.json.{process.pid}.tmp",
    ]
    kept[-1].parent.mkdir(parents=True)
    for path in gone + kept:
        path.write_bytes(b"x")
    make_keeper(tmp_path).sweep(2)
    assert [path for path in gone if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []


def test_an_agent_that_comes_later_knows_what_is_whole_and_what_has_to_go_on(tmp_path: Path) -> None:
    """Its predecessor of the same start died; checkpoints of an earlier start are not whole by their manifest alone."""
    keeper, added = make_keeper(tmp_path), []
    keeper.on_whole = added.append
    ids = [CheckpointId(3, 0, 1), *(CheckpointId(step, 0, 2) for step in (6, 9, 12))]
    for id in ids:
        directory = Path(str(keeper.paths.checkpoint(id)))
        directory.mkdir(parents=True)
        (directory / "level.json").write_bytes(Level(flush=id.step in (3, 6, 9)).dump())
        (directory / "manifest.json").write_bytes(b"{}")
    (Path(str(keeper.paths.checkpoint(ids[2]))) / "rank-00000.flushed").touch()
    keeper.sweep(2)
    assert added == [ids[1]] and keeper.has_newer(ids[2]) and not keeper.has_newer(ids[3])
    assert keeper.answers.state(ids[0])["newest"] == ids[3].directory
    keeper.prune(2, Keep())
    left = sorted(path.name for path in Path(str(keeper.paths.root)).iterdir())
    assert left == [id.directory for id in ids[1:]], "what is not carried yet stays"


def test_peers_that_do_not_answer_are_waited_for_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's thread also writes its own part: a node that hangs, with many ranks, must not take all its time."""
    monkeypatch.setattr("stepwell.levels.peers.connections._ASK_SECONDS", 0.5)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        seats = tuple(Seat("b", "b", *sock.getsockname()[:2]) for sock in silent)
        orders = Orders(
            str(tmp_path), RUN, 2, Pairs(), Shared(), draw_secret(), (Seat("a", "a", "127.0.0.1", 1), *seats)
        )
        log = journal.EventLog(Path(os.devnull), who="agent")
        keeper = keeper_of(orders, Owner(0, 7), log, lineage=1, patience=60.0)
        stack.callback(keeper.close)
        pending = SimpleNamespace(id=CheckpointId(3, 0, 1), run=RUN, request=request())
        asked = []
        ask = keeper.peers.peer
        monkeypatch.setattr(keeper.peers, "peer", lambda rank, seconds: asked.append(rank) or ask(rank, seconds))
        for _ in range(3):
            assert not keeper._lead(pending, 1.0)  # type: ignore[arg-type]
        assert asked == [1], "not the others of that node, and not that one again at once"


def test_a_duty_that_cannot_be_done_holds_up_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes do not reach each other, but rank 0 reaches both: degraded, before the disks are full."""
    keeper = make_keeper(tmp_path)
    ids = [CheckpointId(step, 0, 2) for step in (3, 6, 9, 12, 15)]
    held = {"digest": "0" * 32, "nbytes": 1, "data_bytes": 1, "suspect": None, "copies": {}}
    state = {"held": held, "is_ready": False, "failed": None, "unprotected": None, "void": None, "ended": None}
    monkeypatch.setattr(keeper.answers, "state", lambda id: state | {"is_ready": True})
    monkeypatch.setattr(keeper.peers, "state", lambda rank, id: state)
    for count, id in enumerate(ids):
        keeper._undecided.add(id)
        keeper.paths.checkpoint(id).mkdir(parents=True)  # type: ignore[union-attr]
        first = SimpleNamespace(id=ids[0], run=RUN, request=request())
        assert keeper._lead(first, 1.0) == (count == 4)  # type: ignore[arg-type]
    assert keeper.why_degraded(ids[0]) == "rank 1: not done in time"


def test_what_all_went_on_from_is_carried_on_even_if_a_newer_one_is_whole(tmp_path: Path) -> None:
    """Some ranks may have begun to carry it: rank 0 would wait for this one's part until its patience ends."""
    keeper, added = make_keeper(tmp_path), []
    keeper.on_whole = added.append
    old, new = CheckpointId(3, 0, 1), CheckpointId(6, 0, 2)
    Path(str(keeper.paths.root)).mkdir(parents=True)
    record = make_record(old, keeper.owner, {})
    keep_shard(keeper.paths, record, record.dump(), from_memory({}))
    keeper.decisions.keep(old, b"{}", Level(flush=True).dump())
    keeper._whole.append(new)
    assert keeper.rehold(old) and added == [old]


@pytest.mark.parametrize("is_ended", [False, True])
def test_what_is_withdrawn_is_withdrawn_on_rank_0_s_word_alone(
    is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may have called it whole, and cannot be reached: nothing of this node goes, not even what it holds."""
    keeper, id = make_keeper(tmp_path, rank=1), CheckpointId(3, 0, 2)
    for owner in (Owner(0, 2), Owner(1, 2)):  # its own part, and the copy that it holds
        content = {f"{owner.stem}.safetensors": b"bytes"}
        record = make_record(id, owner, content)
        Path(str(keeper.paths.root)).mkdir(parents=True, exist_ok=True)
        keep_shard(keeper.paths, record, record.dump(), from_memory(content))
    before = sorted(path.name for path in Path(str(keeper.paths.checkpoint(id))).iterdir())
    if is_ended:
        word = {"manifest": None, "ended": "rank 0: it came to nothing", "newest": "", "held": None}
        monkeypatch.setattr(keeper.peers, "state", lambda rank, id: word)
    pending = SimpleNamespace(id=id, run=RUN, request=request(), written_at=time.monotonic() - 2 * keeper.patience - 1)
    with pytest.raises(VoidError, match="came to nothing" if is_ended else "rank 0 did not finish"):
        keeper.follow(pending)  # type: ignore[arg-type]
    assert len(before) == 4
    left = sorted(path.name for path in Path(str(keeper.paths.checkpoint(id))).iterdir())
    assert left == ([] if is_ended else before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_takes_no_change_holds_up_no_word(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It turned read-only while a part lay there whose checkpoint came to nothing. The next ones wait for that word."""
    keeper, id = make_keeper(tmp_path, rank=rank), CheckpointId(3, 0, 2)
    content = {f"{keeper.owner.stem}.safetensors": b"bytes"}
    record = make_record(id, keeper.owner, content)
    Path(str(keeper.paths.root)).mkdir(parents=True)
    keep_shard(keeper.paths, record, record.dump(), from_memory(content))
    word = {"manifest": None, "ended": "it came to nothing", "newest": "", "held": None, "void": "it came to nothing"}
    monkeypatch.setattr(keeper.peers, "state", lambda rank, id: word)
    monkeypatch.setattr(keeper.redundancy, "protect", lambda id: None)

    def refuse(op: str, path: object, length: int = 0) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(files, "file_operation", refuse)
    pending = SimpleNamespace(id=id, run=RUN, request=request(), written_at=time.monotonic())
    with pytest.raises(VoidError, match="came to nothing"):
        keeper.follow(pending)  # type: ignore[arg-type]
    assert files.exists(keeper.paths.checkpoint(id) / f"{keeper.owner.stem}.json"), "until newer ones are whole"


def test_what_waits_for_a_rank_0_that_cannot_be_reached_is_bounded(tmp_path: Path) -> None:
    """All but what it may have called whole: it cannot have done so before it asked this rank."""
    keeper = make_keeper(tmp_path, rank=1)
    Path(str(keeper.paths.root)).mkdir(parents=True)
    ids = [CheckpointId(step, 0, 2) for step in range(3, 24, 3)]
    for id in ids:
        record = make_record(id, keeper.owner, {})
        keep_shard(keeper.paths, record, record.dump(), from_memory({}))
        keeper._undecided.add(id)
    assert keeper.answer("state", {"id": ids[1].directory, "by": 0})["held"]
    assert keeper.answer("state", {"id": ids[2].directory, "by": 2})["held"]
    given_up = []
    for id in ids:
        pending = SimpleNamespace(id=id, run=RUN, request=request(), written_at=time.monotonic())
        try:
            assert not keeper.follow(pending)  # type: ignore[arg-type]
        except VoidError:
            given_up.append(id)
    assert given_up == [ids[0], ids[2]]
    assert keeper.answer("state", {"id": ids[0].directory, "by": 0})["void"].startswith("rank 1: cannot reach rank 0")
    records = [Path(str(keeper.paths.checkpoint(id))) / "rank-00001.json" for id in ids]
    assert [path.exists() for path in records] == [id not in given_up for id in ids]


def test_what_came_to_nothing_is_still_told_when_a_newer_one_is_whole(tmp_path: Path) -> None:
    """A rank that looks late would take it for one that was whole, and made room."""
    keeper = make_keeper(tmp_path)
    void, whole = CheckpointId(3, 0, 2), CheckpointId(6, 0, 2)
    keeper.answers.say_void(void, "rank 1: it came to nothing")
    Path(str(keeper.paths.checkpoint(whole))).mkdir(parents=True)
    keeper._add_whole(whole)
    keeper.prune(2, Keep())
    assert keeper.answers.state(void)["ended"] == "rank 1: it came to nothing"
