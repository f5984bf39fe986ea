"""Writing a dataset: from `start_output` to the word that all ranks hold it, protected.

Owns:    the order: all ranks say that their files are there; files and records durable; copies or parity; the manifest
         on every node; only then something older goes, and the way to the prefix begins.
Holds:   all ranks get the same answer. A rank without its part, or one that says so, discards the dataset on all of
         them, and what is older stays. A record is written only where all ranks said that their files are valid, so
         that a dataset of which all records are found after a crash may be used.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Final

from stepwell.adapters.scr.application_files import Description, look, relative_to, take_in
from stepwell.adapters.scr.job import ScrJob
from stepwell.adapters.scr.prefix_flush import conclude
from stepwell.adapters.scr.prefix_index import CHECKPOINT, OUTPUT
from stepwell.errors import ConfigError, GroupError, StepwellError
from stepwell.events.level_events import Degraded
from stepwell.events.level_events import Protected as ProtectedEvent
from stepwell.events.scr_events import Output, OutputDiscarded
from stepwell.faults import crash_point
from stepwell.levels import cached
from stepwell.levels.cached import Level
from stepwell.ranks.groups.consent import each, lead
from stepwell.storage.store import assemble, commit, files
from stepwell.types import CheckpointId

_MOST_WAITING: Final = 2
"""Periodic flushes under way: with more, the next one waits for its turn, so that a slow prefix is not run after."""
_MAX_NAME: Final = 1024


class Outputs:
    """Of one rank; everything but `route` is collective."""

    def __init__(self, job: ScrJob) -> None:
        self._job = job
        self.name, self.flags = "", 0
        self.id = CheckpointId(0, 0, 0)
        self.began = time.monotonic()

    def start(self, name: str, flags: int) -> None:
        """Give a dataset its number, and one without a name SCR's name.

        Raises ConfigError, on all ranks, if they do not mean the same one.
        """
        job = self._job
        name = name or f"scr.dataset.{job.last + 1}"
        with contextlib.suppress(TypeError, ValueError):  # told to all below
            flags = int(flags)
        problem = _problem(name, flags)
        told = job.group.all_gather([name, flags, problem], "start_output")
        for rank, (other, its_flags, its_problem) in enumerate(told):
            if its_problem is not None:
                raise ConfigError(f"start_output on rank {rank}: {its_problem}")
            if [other, its_flags] != told[0][:2]:
                raise ConfigError(f"start_output: rank {rank} started {other!r}, {its_flags}, rank 0 {told[0][:2]!r}")
        self.began = time.monotonic()
        job.begin_lineage()
        id = CheckpointId(job.last + 1, 0, job.lineage)
        # A job that was frozen while another one went on must not write, nor make room, in the other one's caches.
        lead(job.group, "whether the run is still ours", lambda: commit.check_fence(job.prefix.paths, id))
        job.last += 1
        self.name, self.flags, self.id = name, flags, id
        job.work.clear()
        each(job.group, "a place for the dataset", lambda: files.make_directory(job.home.checkpoint(self.id)))

    def route(self, path: str) -> str:
        """Where to write a file. Local. Raises ConfigError."""
        return str(self._job.work.place(relative_to(self._job.settings.prefix, path)))

    def complete(self, valid: bool) -> bool:
        """Whether all ranks hold it. On True it is protected; and in the prefix, if it is to go there and not later."""
        job, id = self._job, self.id
        reason = self._check(valid) or self._take()
        if reason is not None:
            self._discard(reason)
            return False
        is_checkpoint = bool(self.flags & CHECKPOINT)
        job.number += is_checkpoint
        try:
            flush = self._protect(is_checkpoint)
        except GroupError:
            raise
        except (OSError, StepwellError) as error:  # on all ranks: what fails there is told to all
            job.number -= is_checkpoint
            self._discard(str(error))
            return False
        crash_point("manifest.durable")
        if is_checkpoint:
            lead(job.group, "checkpoints left", self._count)
        job.make_room()
        if flush and job.settings.is_async:
            job.carrier.add(id)
        elif flush:
            job.flush_now(id)
        return True

    def _check(self, valid: bool) -> str | None:
        """Before anything counts: whether all files of all ranks are there, and belong to one rank each."""
        work = self._job.work
        problems = [problem for place in work.routed.values() if (problem := look(place)) is not None]
        mine = None if valid else "the program reported that its part is not valid"
        told = self._job.group.all_gather([mine or next(iter(problems), None), sorted(work.routed)], "complete_output")
        for rank, (problem, _) in enumerate(told):
            if problem is not None:
                return f"rank {rank}: {problem}"
        twice = [path for path, count in Counter(path for _, paths in told for path in paths).items() if count > 1]
        return f"{twice[0]}: several ranks wrote it; give each rank its own files" if twice else None

    def _take(self) -> str | None:
        """This rank's files and record, durable in its node's cache."""
        job, problem = self._job, None
        number = job.number + bool(self.flags & CHECKPOINT)
        try:
            about = Description(self.name, self.flags, number)
            keep = job.settings.is_keeping_modes
            record = take_in(job.work, job.home, job.run, self.id, job.owner, about, keep=keep)
            assemble.leave_record(job.home, record)
        except (OSError, StepwellError) as error:
            problem = f"{type(error).__name__}: {error}"
        told = job.group.all_gather(problem, "the parts of all ranks")
        return next((f"rank {rank}: {why}" for rank, why in enumerate(told) if why is not None), None)

    def _protect(self, is_checkpoint: bool) -> bool:
        """Copies or parity, then the word that it is whole. Whether it is to go to the prefix."""
        job, id, settings = self._job, self.id, self._job.settings
        if settings.is_bypass:
            lead(job.group, "a dataset in the prefix", lambda: bool(conclude(job.prefix, id, settings.prefix_size)))
            job.note_whole(id, is_checkpoint=is_checkpoint)
            self._tell(0)
            return False
        done = job.nodes.protect(id, settings.scheme(job.number))
        is_due = is_checkpoint and settings.flush > 0 and job.number % settings.flush == 0

        def decide() -> bool:
            is_wanted = bool(self.flags & OUTPUT) or not is_checkpoint or bool(done.failed and settings.flush)
            return is_wanted or (is_due and len(job.carrier.waiting) < _MOST_WAITING)

        flush: bool = lead(job.group, "whether it goes to the prefix", decide)
        degraded = {**done.alone, **done.failed}
        job.settle(id, Level(flush, degraded), is_checkpoint=is_checkpoint)
        if degraded and job.owner.is_leader:
            job.log.emit(Degraded(step=id.step, ranks=sorted(map(int, degraded)), reasons=degraded))
        self._tell(done.nbytes)
        return flush

    def _tell(self, protected_bytes: int) -> None:
        job, seconds = self._job, time.monotonic() - self.began
        nbytes = sum(facts.nbytes for facts in files.list_facts(job.home.checkpoint(self.id)).values())
        job.log.emit(Output(step=self.id.step, name=self.name, nbytes=nbytes, seconds=seconds))
        if protected_bytes:
            job.log.emit(ProtectedEvent(step=self.id.step, nbytes=protected_bytes, seconds=seconds))

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            self._job.prefix.count_checkpoint()

    def _discard(self, reason: str) -> None:
        """On all ranks: this one's record first, then its files."""
        job, directory = self._job, self._job.home.checkpoint(self.id)
        with contextlib.suppress(OSError, StepwellError):
            for name in sorted(
                cached.owner_files(job.home, self.id, job.owner), key=lambda name: not name.endswith(".json")
            ):
                files.remove(directory / name)
        job.work.clear()
        job.group.barrier("a dataset is discarded")
        if job.nodes.is_first_here:
            job.remove_here(self.id)
        if job.owner.is_leader:
            job.log.emit(OutputDiscarded(step=self.id.step, name=self.name, reason=reason))


def _problem(name: object, flags: object) -> str | None:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > _MAX_NAME:
        return f"{name!r}: give a name of 1 to {_MAX_NAME} printable characters"
    if type(flags) is not int or not 0 <= flags <= CHECKPOINT | OUTPUT:
        return f"flags={flags!r}: give FLAG_NONE, FLAG_CHECKPOINT, FLAG_OUTPUT, or the last two joined by |"
    return None
