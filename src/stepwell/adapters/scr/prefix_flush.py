"""Carrying datasets from the nodes' caches to the prefix: in a thread, or while the program waits.

Owns:    the thread, its tries, and how a dataset in the prefix begins to exist: parts, records, manifest, then the
         application's own names.
Before:  all ranks hold the dataset.   After: it outlives all nodes.
Holds:   the order is that of every checkpoint (`store.assemble`); every block is checked on the way. What is broken off
         goes on where it was; what lacks only its manifest gets it, by whoever looks next. A prefix that fails is an
         event and another try, never the end of the program.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from stepwell.adapters.scr.application_files import PUBLISHED, Description, publish, withdraw
from stepwell.adapters.scr.prefix_index import CHECKPOINT, OUTPUT, ListedDataset, Prefix
from stepwell.errors import DamagedError, FencedError, StepwellError, VoidError
from stepwell.events.level_events import Flush, FlushFailed
from stepwell.events.run_events import Event, logger
from stepwell.faults import crash_point
from stepwell.levels import cached
from stepwell.levels.protect.copies import keep_shard
from stepwell.levels.protect.protection import near_shard
from stepwell.storage.format.manifest import Manifest, Void
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import assemble, catalog, commit, files, retention
from stepwell.storage.store.background import lower_priority, retry_seconds
from stepwell.storage.store.blocks import Fill
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

_POLL_SECONDS: Final = 0.05
_IDLE_SECONDS: Final = 60.0
_FINAL: Final = (FencedError, VoidError, DamagedError)
LEAST_KEPT: Final = 2


def carry_part(home: RunPaths, prefix: Prefix, id: CheckpointId, rank: int, bytes_per_second: float = 0.0) -> int:
    """One rank's part, to the prefix; on return it is durable there. Returns its bytes. OSError, StepwellError."""
    crash_point("flush.begin")
    commit.check_fence(prefix.paths, id)
    data, record, fill = near_shard(home, id, rank)
    keep_shard(prefix.paths, record, data, _slowed(fill, bytes_per_second), may_link=False)
    crash_point("flush.carried")
    return record.nbytes


def _slowed(fill: Fill, bytes_per_second: float) -> Fill:
    started, done = time.monotonic(), 0

    def slowly(file: FileEntry, start: int, buffer: memoryview) -> None:
        nonlocal done
        fill(file, start, buffer)
        done += len(buffer)
        time.sleep(max(0.0, done / bytes_per_second - (time.monotonic() - started)))

    return slowly if bytes_per_second else fill


def conclude(prefix: Prefix, id: CheckpointId, keep: int = 0) -> Manifest | None:
    """Let a dataset exist whose parts are all in the prefix, and its files appear at their places. May be called again.

    None: parts are missing. By one process. Raises OSError; FencedError or VoidError if it never will exist.
    """
    first = assemble.find_record(prefix.paths, id, Owner())
    if first is None:
        return None
    found = assemble.gather(prefix.paths, id, first.owner.world_size)
    summaries = [item for item in found if not isinstance(item, int)]
    if not summaries:
        return None
    crash_point("records.gathered")
    manifest = assemble.make_manifest(summaries)
    records = [catalog.read_record(prefix.paths, manifest, rank) for rank in range(manifest.world_size)]
    commit.publish_manifest(prefix.paths, manifest)
    description = Description.of(first)
    if not prefix.is_published(id):
        _publish(prefix, id, records)
    if description.flags & CHECKPOINT and not _is_overtaken(prefix, id):
        prefix.set_current(description.name, is_pinned=False)
    if keep:
        thin_out(prefix, keep)
    return manifest


def _publish(prefix: Prefix, id: CheckpointId, records: list[Record]) -> None:
    """The dataset is whole without them: names that cannot be given are told, and tried again at the next start."""
    try:
        if not _is_overtaken(prefix, id):
            publish(prefix.root, prefix.paths, records)
        files.put(prefix.paths.checkpoint(id) / PUBLISHED, b"", point="published")
    except OSError as error:
        logger.warning("%s is in %s, but its files cannot be placed under their names: %s", id, prefix.folder, error)


def _is_overtaken(prefix: Prefix, id: CheckpointId) -> bool:
    """Whether a newer one has put its files in place: an older one must not put its own over them."""
    return any(item.id > id and item.is_live and prefix.is_published(item.id) for item in prefix.datasets())


def thin_out(prefix: Prefix, keep: int) -> None:
    """SCR_PREFIX_SIZE: of the checkpoints in the prefix the newest stay; all that are output stay too. OSError."""
    checkpoints = [
        item
        for item in prefix.datasets()
        if item.description is not None and item.description.flags & CHECKPOINT and item.is_live
    ]
    index = prefix.index()
    for item in checkpoints[max(LEAST_KEPT, keep) :]:
        is_output = item.description is not None and item.description.flags & OUTPUT
        if not is_output and item.name != index.current:
            remove(prefix, item)


def remove(prefix: Prefix, item: ListedDataset) -> None:
    """A dataset, and the application's names of its files. Raises OSError."""
    with contextlib.suppress(DamagedError):
        withdraw(prefix.root, prefix.paths, prefix.records(item.manifest))
    retention.remove_checkpoint(item.id, prefix.paths.checkpoint(item.id))


class Carrier:
    """Of one rank. Constructing only assigns; the thread appears with the first dataset that is to go."""

    def __init__(
        self,
        home: RunPaths,
        prefix: Prefix,
        owner: Owner,
        emit: Callable[[Event], None],
        *,
        bytes_per_second: float,
        keep: int,
    ) -> None:
        self._home, self._prefix, self._owner, self._emit = home, prefix, owner, emit
        self._rate, self._keep = bytes_per_second, keep
        self._changed = threading.Condition()
        self._busy = threading.Lock()
        self._waiting: dict[CheckpointId, float] = {}
        self._carried: set[CheckpointId] = set()
        self._failures: dict[CheckpointId, int] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> list[CheckpointId]:
        """Those that are under way, or are to be tried again."""
        with self._changed:
            return sorted(self._waiting)

    def add(self, id: CheckpointId) -> None:
        """One more is to go; returns at once."""
        with self._changed:
            self._waiting.setdefault(id, 0.0)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="stepwell-scr-flush")
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, id: CheckpointId) -> None:
        """Not any more; returns when nothing of it is being carried."""
        with self._changed:
            self._waiting.pop(id, None)
        with self._busy:
            pass

    def wait(self, seconds: float) -> bool:
        """Until nothing is under way; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """No more; waits for the try that is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(30.0)

    def attempt(self, id: CheckpointId) -> bool:
        """Once, on this thread: this rank's part; rank 0 also ends it if all parts are there. False: not all are.

        Raises OSError, StepwellError.
        """
        started, nbytes = time.monotonic(), 0
        with self._busy:
            if id not in self._carried:
                nbytes = carry_part(self._home, self._prefix, id, self._owner.rank, self._rate)
                self._carried.add(id)
            if cached.is_flushed(self._home, id, [self._owner.rank]):
                return True
            manifest = conclude(self._prefix, id, self._keep) if self._owner.is_leader else None
            if self._owner.is_leader and manifest is None:
                return False
            cached.mark_flushed(self._home, id, self._owner)
        seconds = time.monotonic() - started
        self._emit(Flush(step=id.step, nbytes=nbytes if manifest is None else manifest.nbytes, seconds=seconds))
        return True

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                while not self._is_closed and not self._due():
                    self._changed.wait(self._pause())
                if self._is_closed:
                    return
                due = self._due()
            for id in due:
                is_over = self._try(id)
                with self._changed:
                    if is_over:
                        self._waiting.pop(id, None)
                    self._changed.notify_all()

    def _due(self) -> list[CheckpointId]:
        return sorted(id for id, when in self._waiting.items() if when <= time.monotonic())

    def _pause(self) -> float:
        when = min(self._waiting.values(), default=None)
        return _IDLE_SECONDS if when is None else max(0.0, when - time.monotonic())

    def _try(self, id: CheckpointId) -> bool:
        """Whether it is over: there, or never."""
        try:
            if self.attempt(id):
                return True
            pause = _POLL_SECONDS
        except (OSError, StepwellError) as error:
            count = self._failures.get(id, 0)
            if self.fail(id, error, is_first=not count):
                return True
            pause, self._failures[id] = retry_seconds(count, is_quick=True), count + 1
        with self._changed:
            if id in self._waiting:
                self._waiting[id] = time.monotonic() + pause
        return False

    def fail(self, id: CheckpointId, error: Exception, *, is_first: bool) -> bool:
        """Tell of a try that failed. Whether there will be no other."""
        is_final = isinstance(error, _FINAL)
        if is_final or is_first:
            action = "given up" if is_final else "stepwell retries until it works"
            self._emit(FlushFailed(step=id.step, error=str(error), action=action))
        if is_final:
            if isinstance(error, DamagedError):
                self._say_void(id, error)
            with contextlib.suppress(OSError, StepwellError):
                cached.mark_flushed(self._home, id, self._owner)
        return is_final

    def _say_void(self, id: CheckpointId, error: Exception) -> None:
        """The others need not wait for this rank's part."""
        with contextlib.suppress(OSError, StepwellError):
            run = near_shard(self._home, id, self._owner.rank)[1].run
            assemble.leave_void(self._prefix.paths, Void(run, id, self._owner.rank, str(error)))


def open_ones(prefix: Prefix) -> list[CheckpointId]:
    """Datasets in the prefix without a manifest, the oldest first: broken off, or still being carried."""
    names = files.list_names(prefix.paths.root)
    found = [id for name in names if (id := CheckpointId.parse(name)) is not None]
    return sorted(id for id in found if not files.exists(prefix.paths.manifest(id)))


def finish_open(prefix: Prefix, resumed: set[CheckpointId], emit: Callable[[Event], None]) -> None:
    """At a start: end what lacks only its manifest or its names, remove what nobody will go on with. Raises OSError.

    Parts that no newer dataset has made needless stay: a node that is not there now may bring the others.
    """
    for id in open_ones(prefix):
        try:
            is_wanted = conclude(prefix, id) is not None or id in resumed or not _is_overtaken(prefix, id)
        except StepwellError as error:
            is_wanted = False  # a word that it is void would hold up another try too
            emit(FlushFailed(step=id.step, error=str(error), action="removed"))
        if not is_wanted:
            retention.remove_directory(prefix.paths.checkpoint(id))
    for item in reversed(prefix.datasets()):
        if item.is_live and not prefix.is_published(item.id):
            conclude(prefix, item.id)
