"""A trainer without torch: everything the agent sees of one, and nothing else.

It opens the run, starts the agent as a real process, fills slots with bytes that follow from (step, salt), and waits
for what the agent says. Starting one takes milliseconds, so faults can be tried one by one at every file operation.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepwell.agent.pending import AgentLayout, Pending
from stepwell.events import journal
from stepwell.handover.client import AgentClient
from stepwell.handover.find_agents import make_whereabouts
from stepwell.handover.memory import FROZEN, Arena, ArenaShape, whole_pages
from stepwell.handover.message import Heard
from stepwell.handover.protocol import Begin, Durable, Hello, NewArena, NewLayout, OfSnapshot, Released, WriteFailed
from stepwell.restore.byte_sources import FileSource
from stepwell.restore.verified_read import read_record_leaves
from stepwell.storage.format.record import LeafEntry, Record
from stepwell.storage.format.shard import LeafSpec, ShardLayout, lay_out
from stepwell.storage.store import catalog
from stepwell.storage.store.lineage import create_next, open_run, read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner, SaveRequest

DEADLINE_SECONDS = 30.0
LEAF_BYTES = 10_000
ROOT = Path(__file__).parents[2]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.001)
    return found


def here(run_dir: Path) -> str:
    """Where the agents of a run are."""
    paths = RunPaths(run_dir)
    return make_whereabouts(paths, read_run(paths).id)


def make_request(step: int, *, tree: Any = None, durable: bool = True, delta: bool = False) -> SaveRequest:
    """What a trainer wants of a snapshot that has nothing special."""
    return SaveRequest(step, 0, 1.0, tree or {}, False, False, None, {}, durable=durable, delta=delta)


def is_about(message: Heard, sequence: int) -> bool:
    """Whether it is said of the snapshot with this number."""
    return isinstance(message, OfSnapshot) and message.sequence == sequence


def content(step: int, nbytes: int) -> bytes:
    """The bytes of a leaf at a step."""
    return hashlib.shake_256(b"%d" % step).digest(nbytes)


class Puppet:
    """One trainer's end. `start` makes the agent appear, `save` does what a snapshot does."""

    def __init__(self, root: Path, *, leaf_bytes: int = LEAF_BYTES, frozen_bytes: int = 0, linger: float = 0.0) -> None:
        self.paths = RunPaths(root)
        self.live = lay_out([LeafSpec("model/w", "uint8", (leaf_bytes,))])
        self.frozen = lay_out([LeafSpec("model/base", "uint8", (frozen_bytes,))]) if frozen_bytes else None
        self.log = journal.EventLog(self.paths.events, who="trainer")
        self.messages: list[Heard] = []
        self.client = AgentClient(self.log)
        self._heard = threading.Condition()
        self._linger = linger
        self._number = 0
        self._complete: dict[int, int] = {}

    def _on_message(self, message: Heard) -> None:
        with self._heard:
            self.messages.append(message)
            self._heard.notify_all()

    def start(self, *, parent: int = 0, step: int = 0) -> None:
        """Open the run, start the agent, give it arena and layout."""
        self.open(parent=parent, step=step)
        self.client.start(self.hello(), self._on_message)
        self.prepare()

    def open(self, *, parent: int = 0, step: int = 0) -> None:
        """Open the run in the next lineage."""
        self.run = open_run(self.paths, seed=1)
        self.lineage = create_next(self.paths, parent=parent, step=step).number
        self._number = self.lineage << 32

    def hello(self) -> Hello:
        return Hello(
            pid=os.getpid(),
            run=self.run.id,
            root=str(self.paths.root),
            lineage=self.lineage,
            rank=0,
            world_size=1,
            agents=make_whereabouts(self.paths, self.run.id),
            keep=Keep(),
            linger=self._linger,
            patience=600.0,
        )

    def prepare(self) -> None:
        """A fresh arena and layout, as after a change of the state."""
        frozen = 0 if self.frozen is None else whole_pages(self.frozen.nbytes)
        self.arena = Arena.allocate(ArenaShape(self.next_number(), 2, whole_pages(self.live.nbytes), frozen))
        self.client.send_arena(NewArena(**vars(self.arena.shape)), self.arena.fd)
        self.layout = self.next_number()
        self.client.send_layout(self.layout_message())
        self.frozen_sequence = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def layout_message(self) -> NewLayout:
        leaves = [_entry("model/w", 0, self.live)]
        if self.frozen is not None:
            leaves.append(_entry("model/base", 1, self.frozen))
        frozen_bytes = 0 if self.frozen is None else self.frozen.nbytes
        return NewLayout(self.layout, self.live.nbytes, frozen_bytes, tuple(map(asdict, leaves)), versions={})

    # -- saving -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, slot: int, *, durable: bool = True) -> int:
        """Announce a snapshot. Returns its sequence number."""
        sequence = self.next_number()
        self.arena.claim(slot)
        self.fill_frozen()
        self.client.begin(self.announcement(step, slot, sequence, durable=durable))
        return sequence

    def fill_frozen(self) -> None:
        """The image of what does not change, once."""
        if self.frozen is not None and not self.frozen_sequence:
            self.frozen_sequence = self.next_number()
            self._fill(FROZEN, self.frozen, 0)
            self.arena.set_sequence(FROZEN, self.frozen_sequence)
            self.arena.set_verdict(FROZEN, self.frozen_sequence, is_good=True)

    def announcement(self, step: int, slot: int, sequence: int, *, durable: bool = True) -> Begin:
        request = self.request(step, durable=durable)
        return Begin(request, sequence, slot, self.arena.shape.generation, self.layout, self.frozen_sequence)

    def request(self, step: int, *, durable: bool = True) -> SaveRequest:
        return make_request(step, tree={"step": step}, durable=durable)

    def complete(self, step: int, slot: int, sequence: int) -> None:
        """Fill the slot and say that it counts."""
        self._fill(slot, self.live, step)
        self.arena.set_sequence(slot, sequence)
        self.arena.set_verdict(slot, sequence, is_good=True)
        self._complete[slot] = sequence

    def fill_half(self, step: int, slot: int, sequence: int) -> None:
        """Half of the image is there, and the agent may know."""
        image, kept = self.arena.image(slot, self.live.nbytes), self.live.nbytes // 2
        self._fill(slot, self.live, step)
        image[kept:] = bytes(self.live.nbytes - kept)
        self.arena.set_filled(slot, sequence, kept)

    def fill_all(self, step: int, slot: int, sequence: int) -> None:
        """All bytes are there, the verdict is not."""
        self._fill(slot, self.live, step)
        self.arena.set_filled(slot, sequence, self.live.nbytes)

    def temporary(self) -> list[Path]:
        """Files of checkpoints that are not there yet."""
        return [*self.paths.root.glob("step-*/*.safetensors.tmp")]

    def _fill(self, slot: int, layout: ShardLayout, step: int) -> None:
        (placed,) = layout.placements
        data = layout.header + content(step, placed.end - placed.start)
        self.arena.image(slot, layout.nbytes)[:] = data

    def save(self, step: int) -> Durable | WriteFailed:
        """A whole snapshot; waits for the first word about it: durable, or failed."""
        sequence = self.begin(step, step % 2)
        self.complete(step, step % 2, sequence)
        said = self.wait(Durable, WriteFailed, sequence=sequence)
        assert isinstance(said, (Durable, WriteFailed))
        return said

    def wait(self, *kinds: type[Heard], sequence: int | None = None) -> Heard:
        """The first message of one of these kinds (about this snapshot)."""

        def find() -> Heard | None:
            fitting = (m for m in self.messages if isinstance(m, kinds))
            return next((m for m in fitting if sequence is None or is_about(m, sequence)), None)

        with self._heard:
            found = self._heard.wait_for(find, DEADLINE_SECONDS)
        assert found is not None, (
            f"no {' or '.join(kind.__name__ for kind in kinds)} within {DEADLINE_SECONDS:.0f} s: {self.messages}"
        )
        return found

    def pending(self, step: int, slot: int) -> Pending:
        """The snapshot in a slot as the agent would see it, for persisting in this process."""
        return Pending(
            run=self.run.id,
            id=CheckpointId(step, 0, self.lineage),
            owner=Owner(),
            arena=self.arena,
            layout=AgentLayout.from_message(self.layout_message()),
            begin=self.announcement(step, slot, self._complete[slot]),
        )

    def close(self, seconds: float = 10.0) -> bool:
        """End the agent; True if it ended in time."""
        if not self.client.pid:
            self.client._ended.set()  # it was only opened
        finished = self.client.close(seconds=seconds)
        self.arena.close()
        self.log.close()
        return finished

    # -- what is there ------------------------------------------------------------------------------------------------

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in journal.read_events(self.paths.events) if event["kind"] == kind]

    def good(self) -> list[catalog.Entry]:
        return [entry for entry in catalog.scan(self.paths) if entry.is_live and entry.is_good]

    def steps(self) -> list[int]:
        return [entry.id.step for entry in self.good()]


def make_orphan(root: Path, *, linger: float, scene: str = "saved") -> int:
    """A trainer in a process of its own saves step 1, plays a scene and is killed. Returns the pid of its agent."""
    command = [sys.executable, "-m", "tests.agent.puppet", str(root), str(linger), scene]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        agent = int(trainer.stdout.readline())
        trainer.kill()
    paths = RunPaths(root)
    wait_for(lambda: any(e["kind"] == "trainer-death" for e in journal.read_events(paths.events)), "orphaned")
    return agent


def half_a_snapshot(puppet: Puppet) -> None:
    puppet.fill_half(2, 0, puppet.begin(2, 0))
    wait_for(puppet.temporary, "it is being written already")


def all_but_a_verdict(puppet: Puppet) -> None:
    puppet.fill_all(2, 0, puppet.begin(2, 0))
    wait_for(puppet.temporary, "it is being written already")


def newest_in_memory(puppet: Puppet) -> None:
    for step in (2, 3):
        puppet.complete(step, step % 2, puppet.begin(step, step % 2, durable=False))


def newest_in_memory_is_filled_again(puppet: Puppet) -> None:
    puppet.complete(2, 0, puppet.begin(2, 0, durable=False))
    puppet.fill_half(3, 0, puppet.begin(3, 0, durable=False))  # step 1 is still whole in the other slot


def newer_than_in_memory(puppet: Puppet) -> None:
    puppet.complete(2, 0, puppet.begin(2, 0, durable=False))
    puppet.wait(Durable, sequence=_complete(puppet, 3))


def older_still_to_be_written(puppet: Puppet) -> None:
    """For an agent that stops before it writes step 2."""
    _complete(puppet, 2)
    puppet.complete(3, 1, puppet.begin(3, 1, durable=False))


def _complete(puppet: Puppet, step: int) -> int:
    sequence = puppet.begin(step, step % 2)
    puppet.complete(step, step % 2, sequence)
    return sequence


SCENES: dict[str, Callable[[Puppet], None]] = {"saved": lambda _: None} | {
    scene.__name__: scene
    for scene in (
        half_a_snapshot,
        all_but_a_verdict,
        newest_in_memory,
        newest_in_memory_is_filled_again,
        newer_than_in_memory,
        older_still_to_be_written,
    )
}


def main() -> None:
    puppet = Puppet(Path(sys.argv[1]), linger=float(sys.argv[2]))
    puppet.start()
    puppet.wait(Released, sequence=puppet.save(1).sequence)
    SCENES[sys.argv[3]](puppet)
    print(puppet.client.pid, flush=True)
    signal.pause()


def _entry(name: str, file: int, layout: ShardLayout) -> LeafEntry:
    (placed,) = layout.placements
    shape = placed.spec.shape
    return LeafEntry(name, file, "uint8", shape, placed.start, placed.end, "parameter", "cpu", shape, (0,))


def verify(paths: RunPaths, entry: catalog.Entry) -> Record:
    """Every byte of a checkpoint is checked, and is what the puppet wrote at that step."""
    assert entry.manifest is not None, f"{entry.id}: {entry.damage}"
    record = catalog.read_record(paths, entry.manifest)
    found = {leaf.name: bytearray(leaf.end - leaf.start) for leaf in record.leaves}

    def deliver(leaf: LeafEntry, offset: int, data: memoryview) -> None:
        found[leaf.name][offset : offset + len(data)] = data

    read_record_leaves(record, lambda file: FileSource(entry.path / file.name), None, deliver)
    for leaf in record.leaves:
        step = 0 if leaf.file else entry.id.step
        assert found[leaf.name] == content(step, leaf.end - leaf.start), f"{entry.id}: {leaf.name}"
    return record


def listing(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Names, inode numbers, sizes and digests of everything in a directory: equal means untouched."""
    found = {}
    for path in sorted(directory.iterdir()):
        found[path.name] = (path.stat().st_ino, path.stat().st_size, hashlib.sha256(path.read_bytes()).digest())
    return found


if __name__ == "__main__":
    main()
