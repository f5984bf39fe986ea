"""Going on from a dataset: which one, where its files are, and what becomes of one that is no good.

Owns:    the order in which datasets are offered, and the table of files while one is read.
Holds:   all ranks are offered the same one. It is offered only after every part lies where its rank is, each byte
         checked, and is protected again. One that the program refuses is marked and the next older one is offered; its
         bytes stay until newer datasets push them out.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepwell.adapters.scr.all_caches import near_records
from stepwell.adapters.scr.application_files import Description, KeptFile, relative_to
from stepwell.adapters.scr.job import ScrJob
from stepwell.adapters.scr.prefix_flush import remove
from stepwell.adapters.scr.prefix_index import CHECKPOINT
from stepwell.errors import ConfigError, DamagedError, StepwellError
from stepwell.events.level_events import Degraded
from stepwell.events.scr_events import Passed, Restarted, Unknown
from stepwell.levels.cached import Level
from stepwell.levels.protect.copies import keep_shard
from stepwell.levels.protect.protection import near_fill
from stepwell.ranks.groups.consent import lead
from stepwell.restore.preference import sort_key
from stepwell.storage.store import catalog, files
from stepwell.storage.store.lineage import read_history, read_lineages
from stepwell.types import CheckpointId


class Restarts:
    """Of one rank; everything but `route` is collective."""

    def __init__(self, job: ScrJob) -> None:
        self._job = job
        self._offered: tuple[CheckpointId, str, int] | None = None
        self._tried: set[CheckpointId] = set()
        self._done_with: int | None = None
        self._table: dict[str, tuple[int, str, KeptFile | None]] = {}

    @property
    def is_offered(self) -> bool:
        """Whether `have` said yes, and nothing came of it yet."""
        return self._offered is not None

    def forget_offer(self) -> None:
        """A new output begins: what was named before is not the newest any more."""
        self._offered = None

    def have(self) -> str | None:
        """The name of the dataset to go on from; None if there is none, or this program went on from one already.

        After a new output there is one again.
        """
        job = self._job
        if self._offered is None and self._done_with != job.last:
            job.nodes.share()
            for directory, name, size, number in lead(job.group, "which dataset", self._candidates):
                id = CheckpointId.parse(directory)
                assert id is not None
                if self._bring(id, name, size, number):
                    self._offered = (id, name, size)
                    break
        return None if self._offered is None else self._offered[1]

    def _candidates(self) -> list[list[Any]]:
        """Rank 0: in the order in which they are tried."""
        job, settings = self._job, self._job.settings
        index, history = job.prefix.index(), read_history(job.prefix.paths)
        listed = {item.id: item for item in job.prefix.datasets()} if settings.is_fetching else {}
        chosen = index.current if index.is_pinned else settings.current
        found: list[tuple[CheckpointId, Description, int]] = []
        for id in sorted({*job.nodes.found, *listed}, key=sort_key):
            is_cached = settings.is_distributing and job.nodes.is_whole(id)
            item = listed.get(id)
            description = item.description if item is not None else job.nodes.known.get(id)
            if description is None or not (is_cached or item is not None) or id in self._tried:
                continue
            size = item.manifest.world_size if item is not None else job.nodes.found[id].world_size
            if not description.flags & CHECKPOINT or not index.is_offered(id) or size is None:
                continue
            if size != job.group.size and not settings.is_global:
                reason = f"{size} ranks wrote it, but this job has {job.group.size}; SCR_GLOBAL_RESTART=1 allows it"
                job.log.emit(Passed(step=id.step, name=description.name, reason=reason))
                continue
            found.append((id, description, size))
        first = next((item for item in found if item[1].name == chosen), None) if chosen else None
        if first is not None and not index.is_pinned and self._was_gone_on_from(first[0]):
            first = None  # SCR_CURRENT is still set from a start before this one
        rest = [item for item in found if history.is_live(item[0]) and (first is None or item[0] < first[0])]
        order = rest if first is None else [first, *rest]
        return [[id.directory, description.name, size, description.number] for id, description, size in order]

    def _was_gone_on_from(self, id: CheckpointId) -> bool:
        lineages, _ = read_lineages(self._job.prefix.paths)
        return any((line.parent, line.step) == (id.lineage, id.step) for line in lineages.values())

    def _bring(self, id: CheckpointId, name: str, size: int, number: int) -> bool:
        job = self._job
        is_there = lead(job.group, "is it in the prefix", lambda: files.exists(job.prefix.paths.manifest(id)))
        may_fetch = is_there and job.settings.is_fetching and not job.settings.is_bypass
        reason = job.nodes.bring(id, size, (lambda rank: self._fetch(id, rank)) if may_fetch else None)
        if reason is not None:
            self._tried.add(id)
            if job.owner.is_leader:
                job.log.emit(Passed(step=id.step, name=name, reason=reason))
            return False
        if size == job.group.size and not job.settings.is_bypass:
            done = job.nodes.protect(id, job.settings.scheme(number))
            degraded = {**done.alone, **done.failed}
            job.settle(id, Level(flush=False, degraded=degraded), is_checkpoint=True)
            if degraded and job.owner.is_leader:
                job.log.emit(Degraded(step=id.step, ranks=sorted(map(int, degraded)), reasons=degraded))
        return True

    def _fetch(self, id: CheckpointId, rank: int) -> None:
        """One rank's part from the prefix. Raises OSError or DamagedError."""
        job = self._job
        manifest = catalog.read_manifest(job.prefix.paths, id)
        if manifest.run != job.run:
            raise DamagedError(f"{id}: belongs to run {manifest.run}")
        record = catalog.read_record(job.prefix.paths, manifest, rank)
        directory = job.prefix.paths.checkpoint(id)
        assert isinstance(directory, Path)
        data = files.get(directory / manifest.records[rank].name)
        keep_shard(job.home, record, data, near_fill(directory), may_link=False)

    def start(self) -> str:
        """Let its files be read. Raises ConfigError if none was offered."""
        if self._offered is None:
            raise ConfigError("start_restart() without a dataset: call it after have_restart() has named one")
        job, (id, name, size) = self._job, self._offered
        mine = {}
        for rank, record in near_records(job.home, id, size).items():
            if rank in job.nodes.parts_of(size):
                about = Description.of(record)
                kept = {file: [one.mode, one.changed] for file, one in about.kept.items()}
                mine.update({path: [rank, file, kept.get(file)] for file, path in about.paths.items()})
        job.work.clear()
        tables = job.group.all_gather(mine, "start_restart")
        self._table = {
            path: (rank, file, None if kept is None else KeptFile(*kept))
            for table in tables
            for path, (rank, file, kept) in table.items()
        }
        return name

    def route(self, path: str) -> str:
        """Where to read a file. Local; one of another rank is copied here. ConfigError, OSError, DamagedError."""
        assert self._offered is not None
        job, (id, name, _) = self._job, self._offered
        relative = self._known_as(path)
        if relative is None:
            raise ConfigError(f"route_file({path!r}): not in {name!r}, which has {len(self._table)} other files")
        rank, file, kept = self._table[relative]
        return str(job.work.show(job.nodes.fetch_file(id, rank) / file, relative, kept))

    def _known_as(self, path: str) -> str | None:
        """The path under which a file is in the dataset. As in SCR the last part of it will do, if only one has it."""
        with contextlib.suppress(ConfigError):  # not below the prefix
            if (relative := relative_to(self._job.settings.prefix, path)) in self._table:
                return relative
        parts = set(self._job.nodes.parts_of(self._job.group.size))
        same = [name for name in self._table if os.path.basename(name) == os.path.basename(path)]
        mine = [name for name in same if self._table[name][0] in parts]
        found = mine or same
        return found[0] if len(found) == 1 else None

    def complete(self, valid: bool) -> bool:
        """Whether all ranks could use it."""
        assert self._offered is not None
        job, (id, name, _) = self._job, self._offered
        told = job.group.all_gather(bool(valid), "complete_restart")
        job.work.clear()
        self._offered, self._table = None, {}
        if not all(told):
            self._tried.add(id)
            reason = f"rank {told.index(False)} rejected it"
            lead(job.group, "a dataset is marked", lambda: self._mark(id, reason))
            if job.owner.is_leader:
                job.log.emit(Passed(step=id.step, name=name, reason=reason))
            return False
        self._go_on_from(id)
        if job.owner.is_leader:
            job.log.emit(Restarted(step=id.step, name=name))
        self._flush(id)
        return True

    def _go_on_from(self, id: CheckpointId) -> None:
        job = self._job
        job.restarted, job.lineage = id, 0
        self._done_with = job.last
        known = job.nodes.known.get(id)
        job.number = known.number if known is not None else job.number

    def _flush(self, id: CheckpointId) -> None:
        job = self._job
        if not job.settings.is_flushing_on_restart or job.settings.is_bypass:
            return
        if not lead(job.group, "is it there", lambda: files.exists(job.prefix.paths.manifest(id))):
            job.want_flush(id)
            if job.settings.is_async:
                job.carrier.add(id)
            else:
                job.flush_now(id)

    def _mark(self, id: CheckpointId, reason: str) -> None:
        with contextlib.suppress(OSError):
            job = self._job
            job.prefix.change_index(lambda index: replace(index, failed={**index.failed, id.directory: reason}))

    # -- by name ------------------------------------------------------------------------------------------------------

    def _find(self, call: str, name: str, flags: int = 0) -> CheckpointId | None:
        """The newest dataset of that name and with these flags, in a cache or in the prefix. Collective.

        None, and an event, if there is none: as in SCR the call succeeds then.
        """
        job = self._job
        job.nodes.share()
        cached = [id for id, known in job.nodes.known.items() if known.name == name and known.flags & flags == flags]

        def find() -> str | None:
            known = [(item.id, item.description) for item in job.prefix.datasets()]
            listed = [id for id, found in known if found and found.name == name and found.flags & flags == flags]
            if not listed and not cached:
                job.log.emit(Unknown(call=call, name=name))
                return None
            return max([*listed, *cached]).directory

        directory = lead(job.group, f"the dataset {name}", find)
        return None if directory is None else CheckpointId.parse(directory)

    def current(self, name: str) -> None:
        """The program loaded that one by itself: it is gone on from, and what is newer becomes another history."""
        job, id = self._job, self._find("current", name, CHECKPOINT)
        if id is None:
            return
        lead(job.group, "the current dataset", lambda: job.prefix.set_current(name, is_pinned=True))
        if job.settings.is_dropping_later:
            later = sorted(other for other in {*job.whole, *job.results} if other > id)

            def drop_later() -> None:
                job.prefix.drop([*(item.id for item in job.prefix.datasets() if item.id > id), *later])

            lead(job.group, "later datasets are dropped", drop_later)
            for other in later:
                self._let_go(other)
        self._offered = None
        self._go_on_from(id)

    def drop(self, name: str) -> None:
        """Not to be offered or listed any more; its files stay."""
        job, id = self._job, self._find("drop", name)
        if id is not None:
            lead(job.group, "a dataset is dropped", lambda: job.prefix.drop([id]))
            self._let_go(id)

    def delete(self, name: str) -> None:
        """Its files and its names go, from caches and prefix."""
        job, id = self._job, self._find("delete", name)
        if id is None:
            return
        job.carrier.cancel(id)
        self._let_go(id)
        job.group.barrier("a dataset is deleted")  # nobody carries it any more

        def delete() -> None:
            item = next((item for item in job.prefix.datasets() if item.id == id), None)
            if item is not None:
                try:
                    remove(job.prefix, item)
                except (OSError, StepwellError) as error:
                    raise ConfigError(f"cannot remove {name!r} from the prefix: {error}") from error

        lead(job.group, "a dataset in the prefix is deleted", delete)
        if job.nodes.is_first_here and not job.settings.is_bypass:
            job.remove_here(id)
        job.group.barrier("a dataset is gone")

    def _let_go(self, id: CheckpointId) -> None:
        job = self._job
        job.whole = [other for other in job.whole if other != id]
        job.results = [other for other in job.results if other != id]
        if self._offered is not None and self._offered[0] == id:
            self._offered = None
