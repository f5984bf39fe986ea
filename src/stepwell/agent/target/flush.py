"""Carrying whole checkpoints from the nodes' caches to the shared place, beside everything else.

Owns:    the thread that does it, its order and its tries.
Before:  `keeper` said that a checkpoint is whole, and is to go on.   After: it exists in the run's own directory.
Holds:   a shared place that fails, fills up or hangs holds up this thread and nothing else. Commit order as everywhere:
         files, record, manifest, by the same code. What is there already is not carried again, so that one broken off
         goes on where it was; one that lacked only its manifest gets it. Every block is checked on the way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stepwell.agent.target.marker import Marker
from stepwell.agent.target.shared_target import Persister
from stepwell.errors import DamagedError, FencedError, StepwellError, VoidError
from stepwell.events.level_events import Flush, FlushFailed
from stepwell.faults import crash_part, crash_point
from stepwell.levels import cached
from stepwell.storage.format.manifest import Manifest, Void
from stepwell.storage.format.record import FileEntry
from stepwell.storage.store import assemble, catalog, commit, files
from stepwell.storage.store.background import lower_priority, retry_seconds
from stepwell.storage.store.blocks import fill_from, verified_blocks
from stepwell.storage.store.objects import Location, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner

_STILL_SECONDS: Final = 30.0
"""Without a block carried, a system call hangs."""
_MOST: Final = 2
"""Periodic ones that wait or are under way: more wait for the next turn, so that a slow place is not run after."""


class Flusher:
    """Constructing only assigns; `start` makes the thread appear.

    persister:  of the shared place; writes the manifest there and removes what is old
    marker:     of rank 0: told what is whole on the nodes
    """

    def __init__(
        self,
        persister: Persister,
        paths: RunPaths,
        owner: Owner,
        keep: Keep,
        rate: float | None,
        lineage: int,
        marker: Marker | None = None,
    ) -> None:
        self._marker = marker
        self._persister, self._cache, self._owner, self._keep = persister, paths, owner, keep
        self._lineage = lineage
        self._shared = persister.paths
        self._log = persister.log
        self._rate = None if rate is None else rate / owner.world_size
        self._changed = threading.Condition()
        self._waiting: list[CheckpointId] = []
        self._is_closed = False
        self.on_flushed: Callable[[CheckpointId], None] = lambda id: None
        self.read_manifest: Callable[[CheckpointId], Manifest] = lambda id: catalog.read_manifest(self._cache, id)
        self._frozen: tuple[FileEntry, Location] | None = None
        self._is_failing = False
        self._moved_at = 0.0

    def start(self) -> None:
        """Begin to work."""
        threading.Thread(target=self._work, daemon=True, name="stepwell-flush").start()
        if self._marker is not None:
            self._marker.start()

    def note_whole(self, id: CheckpointId) -> None:
        """A checkpoint is whole on the nodes, whether it is to go on or not. Any thread."""
        if self._marker is not None:
            self._marker.note(id)

    def hurry(self) -> None:
        """The run ends."""
        if self._marker is not None:
            self._marker.hurry()

    def add(self, id: CheckpointId) -> None:
        """One more is to go. Any thread."""
        with self._changed:
            if id not in self._waiting:
                self._waiting.append(id)
                self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        """Whether a periodic one may be added."""
        return len(self._waiting) < _MOST

    @property
    def is_idle(self) -> bool:
        """Whether all is carried, and the shared place knows how far the nodes are."""
        return not self._waiting and (self._marker is None or self._marker.is_idle)

    @property
    def is_moving(self) -> bool:
        """Whether one is on its way, and gets on."""
        is_still = time.monotonic() - self._moved_at > _STILL_SECONDS
        return not self.is_idle and not self._is_failing and not is_still

    def close(self) -> None:
        """No more, once the running one is done."""
        if self._marker is not None:
            self._marker.close()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                id = self._waiting[0]
            self._carry_surely(id)
            with self._changed:
                self._waiting.remove(id)

    def _carry_surely(self, id: CheckpointId) -> None:
        """Until it is there, or can never be."""
        failures, started = 0, time.monotonic()
        self._is_failing = False
        while not self._is_closed:
            self._moved_at = time.monotonic()
            try:
                nbytes = self._carry(id)
                self._log.emit(Flush(step=id.step, nbytes=nbytes, seconds=time.monotonic() - started))
                self.on_flushed(id)
                break
            except (OSError, StepwellError) as error:
                if self._was_closed():
                    return  # whoever comes next goes on with it
                is_final = isinstance(error, FencedError | VoidError | DamagedError)
                if is_final or not failures:
                    action = "given up" if is_final else "stepwell retries until it works"
                    self._log.emit(FlushFailed(step=id.step, error=str(error), action=action))
                if is_final:
                    self._say_void(id, error)
                    break
                self._is_failing = True  # until it has worked: a try that hangs is no better
                with self._changed:
                    self._changed.wait(retry_seconds(failures))
                failures += 1
        else:
            return
        with contextlib.suppress(OSError, StepwellError):
            cached.mark_flushed(self._cache, id, self._owner)

    def _was_closed(self) -> bool:
        """Meanwhile, by another thread."""
        return self._is_closed

    def _say_void(self, id: CheckpointId, error: Exception) -> None:
        """The others need not wait for this rank's part."""
        if isinstance(error, DamagedError):
            with contextlib.suppress(OSError, StepwellError):
                assemble.leave_void(self._shared, Void(self._run(id), id, self._owner.rank, str(error)))

    def _run(self, id: CheckpointId) -> str:
        return self.read_manifest(id).run

    def _carry(self, id: CheckpointId) -> int:
        """This rank's part; rank 0 then waits for the others' and writes the manifest. Returns the bytes carried."""
        crash_point("flush.begin")
        if commit.was_committed(self._shared, id, self._owner):
            return 0
        directory = commit.open_checkpoint(self._shared, id, self._owner)
        assemble.check_void(self._shared, id)
        record, nbytes = assemble.resume_record(self._shared, id, self._owner), 0
        if record is None:
            record = catalog.read_record(self._cache, self.read_manifest(id), self._owner.rank)
            for file in record.files:
                nbytes += self._carry_file(self._cache.checkpoint(id), directory, file)
            crash_point("flush.carried")
            record = assemble.leave_record(self._shared, record)
        if self._owner.is_leader:
            self._wait_for_all(id)
            crash_point("flush.gathered")
            commit.publish_manifest(self._shared, self.read_manifest(id))
            self._persister.prune(self._lineage, self._keep)
        return nbytes

    def _wait_for_all(self, id: CheckpointId) -> None:
        """Until the parts of all ranks are in the shared place. Raises VoidError.

        While nothing more arrives there, this does not get on: at the end of a run, an agent that waits for one that
        was killed leaves, and the next start goes on with it.
        """
        started, pause, there = time.monotonic(), 0.02, -1
        while isinstance((found := assemble.gather(self._shared, id, self._owner.world_size))[0], int):
            waited = time.monotonic() - started
            if waited > self._persister.patience:
                void = Void(self._run(id), id, int(str(found[0])), f"not copied within {waited:.0f} s")
                assemble.end_void(self._shared, void)
                raise VoidError(f"rank {found[0]}: {void.reason}")
            if self._is_closed:
                raise VoidError("the run ends")
            if (now_there := self._bytes_there(id)) != there:
                self._moved_at, there = time.monotonic(), now_there
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)

    def _bytes_there(self, id: CheckpointId) -> int:
        """What all ranks have carried so far; of a bucket, which shows nothing before it is whole, how many files."""
        directory = self._shared.checkpoint(id)
        names = files.list_names(directory)
        if isinstance(directory, ObjectPath):
            return len(names)
        found = [files.facts(directory / name) for name in names]
        return sum(facts.nbytes for facts in found if facts is not None)

    def _carry_file(self, source: Location, directory: Location, file: FileEntry) -> int:
        final, facts = directory / file.name, files.facts(directory / file.name)
        if facts is not None and facts.nbytes == file.nbytes:
            return 0  # a name means whole bytes
        if self._frozen is not None and self._frozen[0] == file and commit.share_file(self._frozen[1], final):
            self._frozen = (file, final)
            return 0
        stream = self._persister.shelf.open_stream(final, file.nbytes, file.block_bytes)
        place = source / file.name
        assert isinstance(place, Path)
        try:
            with open(files.open_regular(place), "rb", buffering=0) as bytes_of:
                started = time.monotonic()
                for start, block in verified_blocks(file, fill_from(bytes_of, str(place)), str(place)):
                    stream.write(block)
                    self._moved_at = time.monotonic()
                    self._slow_down(started, start + len(block))
                    crash_part("flush", start, len(block), file.nbytes)
        except BaseException:
            stream.abort()
            raise
        stream.finish()
        if file.name.endswith(".frozen.safetensors"):
            self._frozen = (file, final)
        return file.nbytes

    def _slow_down(self, started: float, done: int) -> None:
        if self._rate is not None:
            time.sleep(max(0.0, done / self._rate - (time.monotonic() - started)))
