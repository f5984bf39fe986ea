"""The chain beside a base: of snapshots that lie in memory, what changed is coded and appended, one after the other.

Owns:    the thread, the chain that is being written, and when a new base is asked for.
Not:     codes and records (codecs); bases, which are checkpoints as any other (persist).
Holds:   a slot is not given back while it is being read. A snapshot that a newer one overtook is left out. A chain goes
         on until the next base is committed. A failure costs the chain, never a checkpoint, and asks for a base.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from stepwell.agent.pending import AgentLayout, Pending
from stepwell.agent.queue import PendingQueue
from stepwell.errors import StateError
from stepwell.events import chain_events, journal
from stepwell.faults import crash_point
from stepwell.handover.message import ToTrainer
from stepwell.handover.protocol import BaseWanted, ChainOver, DeltaAppended, Rebased
from stepwell.storage.chain import chain_files
from stepwell.storage.chain.chain_writer import Appended, ChainWriter
from stepwell.storage.chain.section_coder import Given
from stepwell.storage.codecs import precoded
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, State
from stepwell.storage.store import files
from stepwell.storage.store.background import lower_priority
from stepwell.storage.store.lineage import newest_number
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_KEPT_CHAINS: Final = 2
_ASK_SECONDS: Final = 30.0
_LIVE: Final = 0
"""Number of the file of live leaves in a record; what is frozen does not change and is in the base."""


@dataclass(frozen=True)
class _Open:
    """A chain that is being written: its base, and the leaves it is of, in the layout with this number. coded: parts
    that the trainer codes.
    """

    base: CheckpointId
    writer: ChainWriter
    leaves: list[CodedLeaf]
    layout: int
    coded: frozenset[int] = frozenset()

    def takes(self, pending: Pending) -> bool:
        """Whether it is made for such records: whole ones, or those that were coded against this very base."""
        if pending.begin.symbols is not None:
            return pending.begin.symbols.base == self.base.directory
        return not self.coded

    def append(self, pending: Pending) -> Appended:
        """Make a record of a snapshot. Raises StateError if these are not the same leaves."""
        if pending.is_symbols:  # the trainer looked at the leaves
            return self.writer.append(pending.id.step, _state(pending), _note(pending), self._given(pending))
        layout = pending.layout  # names and sizes alone do not tell
        if layout.number != self.layout and _leaves(layout) != self.leaves:
            raise StateError("the leaves, their types or their shapes have changed")
        return self.writer.append(pending.id.step, _state(pending), _note(pending))

    def _given(self, pending: Pending) -> dict[int, Given]:
        about = pending.begin.symbols
        assert about is not None
        image = np.frombuffer(pending.arena.image(pending.slot, pending.arena.shape.slot_bytes), np.uint8)
        symbols = image[about.start : about.start + about.nbytes]
        found = precoded.load(self.writer.parts[about.part], image[about.facts :], symbols)
        if found.coded.facts.exact:
            raise StateError(f"{found.coded.facts.exact} tensors contain values that cannot be coded")
        return {about.part: found}


class Chainer:
    """Writes one chain after the other. Constructing only assigns; `start` makes the thread appear.

    lock, queue: the worker's; say: puts a message into its outbox, under the lock
    """

    def __init__(self, deltas: Deltas, paths: RunPaths, log: journal.EventLog, lineage: int, *,
                 lock: threading.Condition, queue: PendingQueue, say: Callable[[ToTrainer], None]) -> None:  # fmt: skip
        self._deltas, self._paths, self._log, self._lineage = deltas, paths, log, lineage
        self._lock, self._queue, self._say = lock, queue, say
        self._chain: _Open | None = None
        self._next: _Open | None = None
        self._held: Pending | None = None
        """A base whose slot the trainer has yet to read."""
        self._asked_at = self._based_at = -_ASK_SECONDS
        self._is_closed = self.is_busy = False

    def start(self) -> None:
        """Begin to work."""
        threading.Thread(target=self._work, daemon=True, name="stepwell-chain").start()

    def close(self) -> None:
        """Another trainer is served from here on. Under the lock."""
        self._is_closed = True
        self.let_go()
        self._lock.notify_all()

    def let_go(self, sequence: int | None = None) -> None:
        """The slot of the base with this number, or of any, is not needed any more. Under the lock."""
        if self._held is not None and sequence in (None, self._held.sequence):
            self._held.is_held, self._held = False, None

    def make_room(self) -> None:
        """A newer snapshot, which will be a base itself, may wait for a slot that only the held one can give it. Under
        the lock.
        """
        if self._held is None or not self._queue.is_stuck():
            return
        base, chain = self._held.id, self._next
        if chain is not None and chain.base == base:
            chain.writer.close()
            self._next = None
        reason = "storage fails, and a newer snapshot needs its slot"
        self._log.emit(chain_events.ChainEnded(base=base.directory, reason=reason))
        self._say(ChainOver(base.directory))  # before the slot is given back
        self.let_go()

    def rebase(self, pending: Pending) -> None:
        """A checkpoint is committed and its slot still holds it: records against it follow. The worker's thread.

        The slot is held further if the trainer codes: it says when it has read the base.
        """
        chain = self._make(pending)
        with self._lock:
            pending.is_held = False
            if chain is not None:
                self._next, self._based_at = chain, time.monotonic()
                self.let_go()
            if chain is not None and chain.coded and not self._is_closed:
                self._held, pending.is_held = pending, True
                self._say(Rebased(pending.sequence, pending.id.directory))
                self.make_room()
            self._lock.notify_all()

    def _make(self, pending: Pending) -> _Open | None:
        """The chain of a new base, if it can be one."""
        if pending.is_delta or pending.suspect() is not None or pending.id.lineage != self._lineage:
            return None
        started = time.monotonic()
        try:
            crash_point("chain.base")
            if newest_number(self._paths) == self._lineage:  # not by the other thread: it might meet the new one
                used = [chain.base for chain in (self._chain, self._next) if chain is not None]
                chain_files.remove_chains(self._paths, used, _KEPT_CHAINS)
            leaves = _leaves(pending.layout)
            coded = frozenset(pending.begin.coded)
            writer = self._begin(pending, leaves, coded)
            chain = _Open(pending.id, writer, leaves, pending.layout.number, coded)
        except Exception as error:  # whatever it is: the checkpoint is there, and so will the next ones be
            self._log.emit(chain_events.ChainEnded(base=pending.id.directory, reason=f"cannot start a chain: {error}"))
            return None
        seconds = time.monotonic() - started
        self._log.emit(
            chain_events.ChainBegun(base=pending.id.directory, codec=self._deltas.parameters.text, seconds=seconds)
        )
        return chain

    def _begin(self, pending: Pending, leaves: list[CodedLeaf], coded: frozenset[int]) -> ChainWriter:
        path = chain_files.chain_path(self._paths, pending.id)
        files.make_directory(path.parent)
        shard = self._paths.checkpoint(pending.id) / f"{pending.owner.stem}.safetensors"
        assert isinstance(shard, Path)
        layout, deltas = pending.layout, replace(self._deltas, skip_every=0) if coded else self._deltas
        return ChainWriter.start(
            path, leaves, _state(pending), step=pending.id.step, deltas=deltas, elsewhere=coded,
            base=lambda: _cut(layout, np.memmap(shard, np.uint8, "r")),
        )  # fmt: skip

    def _work(self) -> None:
        lower_priority()
        try:
            while (pending := self._take()) is not None:
                said = self._append(pending)
                with self._lock:
                    self.is_busy = pending.is_held = False
                    for message in said:
                        self._say(message)
            for chain in filter(None, (self._chain, self._next)):
                chain.writer.close()
        except BaseException:  # a thread that ends quietly would leave a chain that never grows again
            traceback.print_exc()
            os._exit(1)  # the trainer starts another agent

    def _take(self) -> Pending | None:
        """Wait for the next snapshot; None: closed."""
        with self._lock:
            while not self._is_closed:
                pending, has_chain = self._queue.next_delta(), self._chain is not None or self._next is not None
                if not has_chain and (self._deltas.device or pending is not None):
                    self._ask("there is no base yet")  # until there is one it stays what is coded next
                if pending is not None and (has_chain or pending.is_symbols):
                    pending.is_coded = self.is_busy = pending.is_held = True
                    return pending
                self._lock.wait(0.2)
            return None

    def _append(self, pending: Pending) -> list[ToTrainer]:
        """Make a record of a snapshot. Returns what the trainer is to be told."""
        chain, step = self._switch(pending), pending.id.step
        if chain is None:
            self._log.emit(
                chain_events.DeltaSkipped(step=step, reason="its chain has ended, and the next one has not begun")
            )
            return []
        if (suspect := pending.suspect()) is not None:
            self._log.emit(chain_events.DeltaSkipped(step=step, reason=suspect))
            return self._end(chain, suspect) if pending.is_symbols else []  # the next ones go on from this one
        if step <= chain.base.step or pending.id.lineage != self._lineage:  # of a trainer before: another history
            return []
        started = time.monotonic()
        try:
            crash_point("chain.begin")
            done = chain.append(pending)
            crash_point("chain.appended")
            why = chain.writer.refresh()
        except Exception as error:  # whatever it is, it costs this chain and nothing else
            return self._end(chain, str(error))
        self._log.emit(
            chain_events.Delta(
                step=step,
                base=chain.base.directory,
                number=done.number,
                sort=done.kind,
                nbytes=done.nbytes,
                kept=done.kept,
                error=done.error,
                seconds=time.monotonic() - started,
                write_seconds=done.write_seconds,
            )
        )
        self._asked_at = -_ASK_SECONDS
        if why is not None:
            self._ask(why, is_urgent=False)
        return [DeltaAppended(step)]

    def _end(self, chain: _Open, reason: str) -> list[ToTrainer]:
        """No more records go to it. Returns what the trainer is to be told."""
        self._log.emit(chain_events.ChainEnded(base=chain.base.directory, reason=reason))
        chain.writer.close()
        self._chain = None
        self._ask(reason)
        return [ChainOver(chain.base.directory)] if chain.coded else []

    def _switch(self, pending: Pending) -> _Open | None:
        """The chain to append to: of the newest base, unless this was coded against another one."""
        with self._lock:
            if self._next is not None and self._next.takes(pending):
                if self._chain is not None:
                    self._chain.writer.close()
                self._chain, self._next = self._next, None
            return self._chain if self._chain is not None and self._chain.takes(pending) else None

    def _ask(self, reason: str, *, is_urgent: bool = True) -> None:
        """For a base: once, until one has a record or that takes too long, since it may have come to nothing.

        Not urgent: the chain only gets long. Then not soon after the last one, since each costs a whole checkpoint.
        """
        now = time.monotonic()
        with self._lock:
            if self._next is not None or (not is_urgent and now < self._based_at + _ASK_SECONDS):
                return
            if now > self._asked_at + _ASK_SECONDS and not self._queue.is_waiting():
                self._asked_at = now
                self._log.emit(chain_events.BaseDue(reason=reason))
                self._say(BaseWanted(reason))


def _leaves(layout: AgentLayout) -> list[CodedLeaf]:
    return [CodedLeaf(leaf.name, leaf.dtype, leaf.shape, leaf.role) for leaf in layout.leaves if leaf.file == _LIVE]


def _state(pending: Pending) -> State:
    """The leaves of a snapshot as they lie in the arena."""
    image = pending.arena.image(pending.slot, pending.layout.nbytes)
    return _cut(pending.layout, np.frombuffer(image, np.uint8))


def _cut(layout: AgentLayout, image: np.ndarray[Any, np.dtype[np.uint8]]) -> State:
    found = {leaf.name: image[leaf.start : leaf.end] for leaf in layout.leaves if leaf.file == _LIVE}
    floats = {leaf.name for leaf in layout.leaves if leaf.dtype == "float32"}
    return {name: part.view(np.float32) if name in floats else part for name, part in found.items()}


def _note(pending: Pending) -> bytes:
    return json.dumps({"created": pending.request.created, "tree": pending.request.tree}).encode()
