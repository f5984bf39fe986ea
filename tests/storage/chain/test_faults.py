"""What a review found: things that change under a chain, threads that meet, disks that fail in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import stepwell
from stepwell.agent.chainer import Chainer, _Open
from stepwell.agent.pending import AgentLayout, Pending, Purpose, Stage
from stepwell.agent.queue import PendingQueue
from stepwell.agent.worker import Worker
from stepwell.events.journal import EventLog, read_events
from stepwell.handover.memory import PAGE, Arena, ArenaShape
from stepwell.handover.protocol import Begin, ChainOver, DeltaAppended, Rebased, WriteFailed
from stepwell.restore.candidates import Candidate, _merge
from stepwell.restore.from_chain import find_chains
from stepwell.restore.open_request import Wish
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.segment import segment_name
from stepwell.storage.codecs.assignment import CodedLeaf
from stepwell.storage.format.record import LeafEntry
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.main import main
from stepwell.types import CheckpointId, Owner
from tests.agent.puppet import make_request
from tests.levels.peer_node import until
from tests.storage.chain.walk import Wide, chained, crashed, train, train_into_another_chain

LEAVES = [CodedLeaf("w", "float32", (16,), "parameter")]
ENTRY = LeafEntry("w", 0, "float32", (16,), 0, 64, "parameter", "cpu", (16,), (0,))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.allocate(ArenaShape(1, 4, PAGE, 0))
    yield arena
    arena.close()


def snapshot(
    arena: Arena, step: int, *, durable: bool = False, delta: bool = True, coded: tuple[int, ...] = ()
) -> Pending:
    begin = Begin(make_request(step, durable=durable, delta=delta), step, step - 1, 1, 1, 0, coded=coded)
    layout = AgentLayout(1, 64, 0, (ENTRY,), {})
    item = Pending("run", CheckpointId(step, 0, 1), Owner(), arena, layout, begin)
    arena.set_sequence(item.slot, step)
    arena.set_verdict(item.slot, step, is_good=True)
    return item


def test_one_that_was_overtaken_is_not_coded_late(arena: Arena, tmp_path: Path) -> None:
    """Both are complete before the main loop comes round to give the older one back."""
    queue, lock, said = PendingQueue(), threading.Condition(), list[Any]()
    log = EventLog(tmp_path / "events.jsonl", who="agent")
    chainer = Chainer(stepwell.Deltas(), RunPaths(tmp_path), log, 1, lock=lock, queue=queue, say=said.append)
    base = CheckpointId(1, 0, 1)
    state = {"w": np.zeros(16, np.float32)}
    writer = ChainWriter.start(tmp_path / "chain", LEAVES, state, step=1, deltas=stepwell.Deltas())
    chainer._next = _Open(base, writer, LEAVES, 1)
    with lock:
        for step in (2, 3):
            queue.add(snapshot(arena, step))
    chainer.start()
    until(lambda: DeltaAppended(3) in said)
    with lock:
        assert queue.next_delta() is None
        chainer.close()
    log.close()
    assert not [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "chain-ended"]


def test_what_came_coded_is_in_its_chain_before_a_successor_is_answered(arena: Arena) -> None:
    worker, item = Worker(), snapshot(arena, 1, durable=False, delta=True)
    item.purpose = Purpose.CODED_DELTA
    worker.queue.add(item)
    worker.chainer = SimpleNamespace(is_busy=False)  # type: ignore[assignment]
    waiting = threading.Thread(target=worker.wait_symbols, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive(), "it is not appended yet"
    item.is_coded = True
    waiting.join(60)
    assert not waiting.is_alive()


def _let_go(pending: Pending) -> None:
    pending.is_held = False


@pytest.mark.parametrize("last", ["room", "base", "failure"])
def test_a_base_that_is_held_makes_room_while_storage_fails(last: str, arena: Arena, tmp_path: Path) -> None:
    """The other slots may all hold what cannot be written, and a save would wait for ever. In any order."""
    worker = Worker()
    item, failing = (snapshot(arena, step, durable=True, delta=False, coded=(0,)) for step in (1, 2))
    log = worker.log = EventLog(tmp_path / "events.jsonl", who="agent")
    chainer = worker.chainer = Chainer(
        stepwell.Deltas(device=True), RunPaths(tmp_path), log, 1, lock=worker.lock, queue=worker.queue, say=worker._say
    )
    for each in (item, failing):
        worker.queue.add(each)
    item.ended, item.is_held = Stage.COMMITTED, True
    events = {
        "room": worker.make_room,
        "base": lambda: chainer.rebase(item),
        "failure": lambda: worker.note_failure(failing, OSError("full"), final=False),
    }
    for name in sorted(events, key=lambda name: name == last):
        assert worker.queue.collect(None) == [], "the trainer is to read it"
        events[name]()
    assert worker.queue.collect(None) == [item]
    said = [message for message in worker.outbox if not isinstance(message, WriteFailed)]
    base = item.id.directory
    assert said == [Rebased(item.sequence, base), ChainOver(base)] and chainer._next is None
    log.close()


def test_a_base_that_came_to_no_record_is_not_asked_for_at_once_again(arena: Arena, tmp_path: Path) -> None:
    """Where no record can be appended, every second step would be a checkpoint."""
    said, queue, lock = list[Any](), PendingQueue(), threading.Condition()
    log = EventLog(tmp_path / "events.jsonl", who="agent")
    chainer = Chainer(stepwell.Deltas(), RunPaths(tmp_path), log, 1, lock=lock, queue=queue, say=said.append)

    def asked_after(step: int, record: int | None = None) -> int:
        chainer.rebase(snapshot(arena, step, durable=True, delta=False))
        if record is not None:
            assert chainer._append(snapshot(arena, record)) == [DeltaAppended(record)]
        chain, chainer._next = chainer._chain or chainer._next, None
        assert chain is not None
        chainer._end(chain, "a failure")
        return len(said)

    assert [asked_after(1), asked_after(2), asked_after(3, record=4)] == [1, 1, 2]
    log.close()


def test_a_successor_without_deltas_gets_the_slot_back(arena: Arena) -> None:
    worker, item = Worker(), snapshot(arena, 1, durable=True, delta=False)
    worker.queue.add(item)
    worker.chainer = SimpleNamespace(rebase=_let_go, is_busy=False)  # type: ignore[assignment]
    worker.persister = SimpleNamespace(persist=lambda pending: True)  # type: ignore[assignment]

    def after_commit(pending: Pending, seconds: float) -> None:
        pending.ended, worker.chainer = Stage.COMMITTED, None  # it said hello while old checkpoints were removed

    worker.after_commit = after_commit  # type: ignore[method-assign]
    worker._persist(item)
    assert worker.queue.collect(None) == [item]


def test_what_a_chain_reads_is_not_given_back_by_the_other_thread(arena: Arena) -> None:
    """The trainer is dead: its newest snapshot is written as a checkpoint while it is being coded."""
    worker, item = Worker(), snapshot(arena, 1)
    worker.queue.add(item)
    worker.queue.want_newest()
    item.is_held = item.is_coded = True
    worker.chainer = SimpleNamespace(rebase=lambda pending: None, is_busy=True)  # type: ignore[assignment]
    worker.persister = SimpleNamespace(persist=lambda pending: True)  # type: ignore[assignment]
    worker.after_commit = lambda pending, seconds: setattr(pending, "ended", Stage.COMMITTED)  # type: ignore[method-assign]
    worker._persist(item)
    assert worker.queue.collect(None) == []


def test_with_one_slot_a_snapshot_in_memory_makes_room() -> None:
    arena = Arena.allocate(ArenaShape(1, 1, PAGE, 0))
    queue, item = PendingQueue(), snapshot(arena, 1)
    queue.add(item)
    assert queue.collect(None) == []
    queue.is_room_wanted = True
    assert queue.collect(None) == [item]
    arena.close()


def test_a_segment_that_cannot_be_made_leaves_no_descriptor(tmp_path: Path) -> None:
    state = {"w": np.zeros(16, np.float32)}
    writer = ChainWriter.start(tmp_path / "chain", LEAVES, state, step=0, deltas=stepwell.Deltas(skip_every=2))
    before = len(os.listdir("/proc/self/fd"))
    for step in (1, 2):
        writer.append(step, {"w": np.full(16, step, np.float32)})
    (tmp_path / "chain" / segment_name(3)).touch()
    with pytest.raises(stepwell.PersistError):
        writer.append(3, {"w": np.ones(16, np.float32)})
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_leaf_that_only_looks_the_same_needs_another_base(what: str, run_dir: Path) -> None:
    """The same name and as many bytes: rows for columns, or other numbers."""
    box = {"t": torch.arange(6).view(2, 3)}
    run = Tracking(run_dir, box)
    train(run, 8)
    box["t"] = (
        torch.arange(6).view(3, 2) if what == "shape" else torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3)
    )
    wanted = box["t"].clone()
    train_into_another_chain(run)
    left = crashed(run, run_dir.parent / "left")
    run.ckpt.close(save=False)
    found: dict[str, Any] = {"t": torch.zeros_like(wanted)}
    again = Tracking(left, found)
    assert again.ckpt.restore(prefer="newest")
    assert found["t"].dtype == wanted.dtype and torch.equal(found["t"], wanted)
    again.ckpt.close(save=False)


class Tracking(Wide):
    """With one more object, a dictionary."""

    def __init__(self, where: Path, box: dict[str, Any]) -> None:
        self.box = box
        super().__init__(where, {"deltas": stepwell.Deltas(small="pool"), "policy": stepwell.Never(), "box": box})


def test_after_going_back_the_run_keeps_its_own_chains(run_dir: Path) -> None:
    """Chains of later steps that were abandoned do not stand for newer ones."""
    run = chained(run_dir, policy=stepwell.Every(steps=6))
    train(run, 40)
    run.ckpt.close(save=False)
    again = chained(run_dir, policy=stepwell.Every(steps=6))
    first = min(entry.base.step for entry in find_chains(RunPaths(run_dir)))
    assert again.ckpt.restore(step=first)
    truth = train(again, 20)
    assert not again.events("chain-ended")
    own = [chain for chain in find_chains(RunPaths(run_dir)) if chain.base.lineage == 2]
    assert own and own[0].base.step > first
    assert {item.step for chain in own for item in chain.records} & set(truth)
    again.ckpt.close(save=False)


def test_a_damaged_best_does_not_hide_what_is_newer_than_the_next(run_dir: Path) -> None:
    """Checkpoints b and a, each with a chain. The shard of b is gone: the chain of a comes before a itself."""
    run = chained(run_dir, policy=stepwell.Every(steps=8))
    train(run, 30)
    left = crashed(run, run_dir.parent / "left")
    run.ckpt.close(save=False)
    newest, older = find_chains(RunPaths(left))[:2]
    (left / newest.base.directory / "rank-00000.safetensors").unlink()
    again = chained(left)
    assert again.ckpt.restore(prefer="newest")
    assert again.ckpt.status().step == older.records[-1].step
    again.ckpt.close(save=False)


def candidate(step: int, *, suspect: bool = False, chain: str = "") -> Candidate:
    return Candidate(CheckpointId(step, 0, 1), suspect, True, not chain, chain=chain)


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        ("newest", [(60, 51), (50, 0), (46, 41), (40, 0), (90, 0)]),
        ("exact", [(50, 0), (40, 0), (90, 0), (60, 0), (46, 0)]),
        (None, [(50, 0), (40, 0), (60, 0), (46, 0), (90, 0)]),
    ],
)
def test_the_order_in_which_states_are_tried(
    prefer: str | None, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Checkpoints 50 and 40, and 90, which is suspect; chains to 60 and 46. With each the least step that is of use."""
    exact = [candidate(50), candidate(40), candidate(90, suspect=True)]
    lossy = [(candidate(step, chain="base"), lambda: 0.0) for step in (60, 46)]
    log = EventLog(Path(os.devnull), who="trainer")
    found = _merge(exact, lossy, Wish(prefer=prefer), RunPaths(tmp_path), log)
    assert [(item.id.step, item.least) for item in found] == expected


def test_a_named_step_is_that_step_or_none(run_dir: Path) -> None:
    run = chained(run_dir)
    train(run, 14)
    left = crashed(run, run_dir.parent / "left")
    run.ckpt.close(save=False)
    chain = find_chains(RunPaths(left))[0]
    item = chain.records[-1]
    data = bytearray(item.path.read_bytes())
    data[item.start + 3] ^= 1
    item.path.write_bytes(data)
    again = chained(left)
    with pytest.raises(stepwell.RestoreError):
        again.ckpt.restore(step=item.step)
    again.ckpt.close(save=False)


def test_a_chain_asks_for_few_bases(run_dir: Path) -> None:
    """Records as large as the state: a base would be due every few steps."""
    run = chained(run_dir, deltas=stepwell.Deltas(small="exact", small_below=1 << 30))
    train(run, 60)
    run.ckpt.close(save=False)
    assert len(run.events("delta")) > 30 and len(run.events("commit")) <= 3


def test_nothing_is_said_of_a_chain_that_went_while_it_was_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = chained(run_dir)
    train(run, 10)
    run.ckpt.close(save=False)
    chain = find_chains(RunPaths(run_dir))[0]

    def gone(path: Path) -> None:
        if chain.base.directory in str(path):  # there may be another one, which stays
            (run_dir / chain.base.directory / "manifest.json").unlink()
            raise stepwell.DamagedError("No such file")

    monkeypatch.setattr("stepwell.restore.from_chain.check_records", gone)
    found = CliRunner().invoke(main, ["verify", str(run_dir)])
    assert not (run_dir / chain.base.directory / "manifest.json").exists(), "it was looked at"
    assert found.exit_code == 0 and "No such file" not in found.output, found.output


def test_a_run_without_deltas_needs_no_numpy() -> None:
    program = "import sys; sys.modules['numpy'] = None; import stepwell; stepwell.Checkpointer"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=False).returncode == 0


def test_a_chain_without_its_base_goes_in_a_run_without_deltas(run_dir: Path) -> None:
    """A process died between the two, and the next one has no use for chains."""
    run = chained(run_dir)
    train(run, 10)
    run.ckpt.close()
    left = run_dir / "chains" / CheckpointId(1, 0, 1).directory
    left.mkdir(exist_ok=True)
    (left / "00000001.seg").write_bytes(b"what is left")
    for manifest in run_dir.glob(f"{left.name}/manifest.json"):
        manifest.unlink()
    again = Wide(run_dir, {"policy": stepwell.Every(steps=2)})
    assert again.ckpt.restore()
    again.ckpt.close()
    assert not left.exists() and find_chains(RunPaths(run_dir)), "another one stays"
