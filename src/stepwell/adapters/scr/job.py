"""One start of an SCR program: what all its calls share.

Owns:    opening (group, run in the prefix, caches, what a flush left open) and closing, the line of history that new
         datasets belong to, and what may go from this node's cache.
Not:     the order of calls (scr), outputs (output), restarts (restart).
Holds:   every decision that ranks must share is made by rank 0, or from what all of them told.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from stepwell import faults
from stepwell.adapters.scr.all_caches import Nodes
from stepwell.adapters.scr.application_files import Work, clear_work
from stepwell.adapters.scr.parameters import Settings
from stepwell.adapters.scr.prefix_flush import Carrier, finish_open
from stepwell.adapters.scr.prefix_index import CHECKPOINT, FINALIZED, Prefix, now, release_pin
from stepwell.errors import ConfigError, DamagedError, StepwellError
from stepwell.events import run_events
from stepwell.events.journal import EventLog, speak_to_terminal
from stepwell.events.level_events import FlushFailed
from stepwell.events.run_events import logger
from stepwell.events.scr_events import ParameterIgnored
from stepwell.levels import cache_retention, cached
from stepwell.levels.assignments import run_cache
from stepwell.levels.cached import Level
from stepwell.levels.level_verdict import summaries
from stepwell.ranks.groups.consent import each, lead
from stepwell.ranks.groups.detect import find_group
from stepwell.ranks.groups.group import Group, default_seconds
from stepwell.storage.store import assemble, commit, files, retention
from stepwell.storage.store.lineage import create_next, newest_number, open_run, read_history, read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.training.loop.preemption import Leave
from stepwell.types import CheckpointId, Owner

_CLOSE_SECONDS: Final = "STEPWELL_CLOSE_SECONDS"
_GRACE: Final = "STEPWELL_GRACE"
_GRACE_SECONDS: Final = 25.0


class ScrJob:
    """Constructing only assigns; `open` and `close` are collective."""

    def __init__(self, settings: Settings, group: Group, run: str) -> None:
        self.settings, self.group, self.run = settings, group, run
        self.owner = Owner(group.rank, group.size)
        self.prefix = Prefix(settings.prefix)
        shared = RunPaths(self.prefix.folder, group.rank)
        self.home = shared if settings.is_bypass else run_cache(settings.cache, run, group.rank)
        self.log = EventLog(shared.events, who="scr", rank=group.rank, background=True)
        grace = float(os.environ.get(_GRACE) or _GRACE_SECONDS)
        self.leave = Leave(self.log, lambda: self.last, lambda: None, grace, None)
        self.nodes = Nodes(settings, run, self.home, shared, group, self.log.emit)
        self.work = Work(self.home, self.owner)
        self.carrier = Carrier(
            self.home,
            self.prefix,
            self.owner,
            self.log.emit,
            bytes_per_second=settings.bytes_per_second / group.size,
            keep=settings.prefix_size,
        )
        self.whole: list[CheckpointId] = []  # checkpoints
        self.results: list[CheckpointId] = []  # what is output only
        self.last = 0
        self.number = 0
        self.restarted: CheckpointId | None = None
        self.lineage = 0

    # -- beginning and end --------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, settings: Settings) -> ScrJob:
        """Meet the others, and look at what there is. Raises ConfigError, GroupError."""
        group = find_group()
        faults.set_rank(group.rank)
        _check_same(group, settings)
        prefix = RunPaths(Prefix(settings.prefix).folder)
        run: str = lead(group, "the run in the prefix", lambda: open_run(prefix, seed=None).id)
        each(group, "the prefix on each rank", lambda: _check_seen(prefix, run))
        job = cls(settings, group, run)
        if group.is_leader:
            job._show()
            for name, reason in settings.ignored.items():
                job.log.emit(ParameterIgnored(name=name, reason=reason))
        try:
            job.nodes.meet()
            each(group, "tidying up", job._tidy)
            job.nodes.share()
            job._look()
            job._resume()
            if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("STEPWELL_NOTICE"):
                job.leave.listen()  # torchrun's SIGTERM says that another rank died: there is nothing to wait for
        except BaseException:
            job._let_go()
            raise
        return job

    def _show(self) -> None:
        """SCR_DEBUG: what every parameter came to, and all events."""
        if self.settings.debug:
            speak_to_terminal("stepwell scr", logging.DEBUG)
            logger.setLevel(logging.DEBUG)
            for name, value in self.settings.values.items():
                logger.debug("%s=%s", name, value)

    def _tidy(self) -> None:
        """What processes that died left in this node's cache under temporary names; all of it, if that is asked for."""
        assert isinstance(self.home.root, Path)
        if self.nodes.is_first_here:
            clear_work(self.home.root)  # of ranks that are not there this time, too
        if self.settings.is_bypass:
            return
        for id in cached.steps(self.home):
            commit.sweep(self.home.checkpoint(id), self.owner)
            if self.settings.is_purging and self.nodes.is_first_here:
                self.remove_here(id)

    def _look(self) -> None:
        """Which datasets are there, and the highest number that was ever given."""
        told = sorted(self.nodes.found)
        live = self.live(told)
        whole = [id for id in live if self.nodes.is_whole(id)]
        kinds = {id: known.flags for id, known in self.nodes.known.items()}
        self.whole = [id for id in whole if kinds.get(id, 0) & CHECKPOINT]
        self.results = [id for id in whole if id not in self.whole]

        def highest() -> int:
            names = files.list_names(self.prefix.paths.root)
            return max((id.step for name in names if (id := CheckpointId.parse(name)) is not None), default=0)

        in_prefix: int = lead(self.group, "the highest number in the prefix", highest)
        self.last = max([in_prefix, *(id.step for id in told)])

        def begin() -> None:
            self.prefix.change_halt(lambda halt: replace(halt, reason="") if halt.is_of_one_job else halt)

        lead(self.group, "the halt file", begin)

    def _resume(self) -> None:
        """Flushes that were broken off go on; those that lack only their end get it."""
        nodes, size = self.nodes, self.group.size
        open_here = [
            id
            for id in sorted([*self.whole, *self.results])
            if id in nodes.unflushed and nodes.found[id].world_size == size
        ]

        def not_there() -> list[str]:
            return [id.directory for id in open_here if not files.exists(self.prefix.paths.manifest(id))]

        wanted = [CheckpointId.parse(name) for name in lead(self.group, "flushes to go on with", not_there)]
        resumed = [id for id in wanted if id is not None and nodes.bring(id, size, None) is None]

        def finish() -> None:
            try:
                finish_open(self.prefix, set(resumed), self.log.emit)
            except (OSError, StepwellError) as error:
                self.log.emit(FlushFailed(step=0, error=str(error), action="checked again at the next start"))

        lead(self.group, "flushes to end", finish)
        for id in resumed:
            self.settle(id, Level(flush=True), is_checkpoint=id in self.whole)
            self.carrier.add(id)

    def close(self) -> None:
        """Carry what is under way, and leave. What the prefix does not take in time stays in the caches."""
        seconds = min(float(os.environ.get(_CLOSE_SECONDS) or 120), default_seconds() / 2)  # the others wait for rank 0
        if not self.carrier.wait(seconds):
            for id in self.carrier.waiting:
                error = f"not in the prefix within {seconds:g} s"
                self.log.emit(FlushFailed(step=id.step, error=error, action="continues at the next start"))
        self.carrier.close()

        def end() -> None:
            with contextlib.suppress(OSError):
                self.prefix.change_halt(lambda halt: halt if halt.reason else replace(halt, reason=FINALIZED))

        try:
            lead(self.group, "the halt file at the end", end)
        finally:
            self.work.clear()
            self._let_go()

    def _let_go(self) -> None:
        self.leave.stop()
        self.nodes.close()
        self.log.close()
        self.group.close()

    # -- history ------------------------------------------------------------------------------------------------------

    def live(self, ids: Iterable[CheckpointId]) -> list[CheckpointId]:
        """Those on the path of the run, as rank 0 sees it. Collective."""
        told = sorted(ids)

        def ask() -> list[bool]:
            history = read_history(self.prefix.paths)
            return [history.is_live(id) for id in told]

        return [id for id, is_live in zip(told, lead(self.group, "the history", ask), strict=True) if is_live]

    def begin_lineage(self) -> None:
        """Before the first output: from here on, what was not gone on from is another history. Collective."""
        if self.lineage:
            return

        def begin() -> int:
            paths = self.prefix.paths
            parent, step = newest_number(paths), self.last
            if self.restarted is not None:
                parent, step = self.restarted.lineage, self.restarted.step
            number = create_next(paths, parent=parent, step=step).number
            self.prefix.change_index(release_pin)
            return number

        self.lineage = lead(self.group, "the next line of history", begin)
        self.log.lineage = self.lineage
        known = sorted({*self.nodes.found, *self.whole, *self.results})
        live = self.live(known)
        self.whole = [id for id in self.whole if id in live]
        self.results = [id for id in self.results if id in live]
        self.nodes.forget_dead([id for id in known if id not in live])

    # -- this node ----------------------------------------------------------------------------------------------------

    def settle(self, id: CheckpointId, level: Level, *, is_checkpoint: bool) -> None:
        """All ranks hold their parts: let every node's cache say so. Collective."""
        states = self.nodes.states(id)
        if any(state["held"] is None for state in states):
            raise DamagedError(f"{id}: a rank can no longer read its own record")
        created = lead(self.group, "when it was whole", now)
        held = summaries(self.run, id, created, dict(enumerate(states)))
        manifest = assemble.make_manifest(held)

        def keep() -> None:
            files.put_new(self.home.checkpoint(id) / "level.json", level.dump(), point="level")
            files.put_new(self.home.manifest(id), manifest.dump(), point="manifest")

        each(self.group, "the word that a dataset is whole", keep)
        self.note_whole(id, is_checkpoint=is_checkpoint)

    def note_whole(self, id: CheckpointId, *, is_checkpoint: bool) -> None:
        """It counts from now on. Local."""
        if is_checkpoint:
            self.whole = sorted({*self.whole, id})
        else:
            self.results = sorted({*self.results, id})

    def make_room(self) -> None:
        """Remove from this node's cache what newer datasets make needless. Local."""
        if self.settings.is_bypass or not self.nodes.is_first_here:
            return
        orders, rank = self.nodes.orders, self.group.rank
        gone = cache_retention.surplus(self.home, orders, rank, self.whole)
        # Output is of use until it is in the prefix; it must not push a checkpoint out.
        gone += [id for id in self.results if id not in gone and cached.is_flushed(self.home, id, orders.here(rank))]
        for id in gone:
            self.remove_here(id)
        self.results = [id for id in self.results if id not in gone]

    def remove_here(self, id: CheckpointId) -> None:
        """A dataset, from this node's cache. A failure is an event."""
        if not files.is_directory(self.home.checkpoint(id)):
            return
        try:
            retention.remove_checkpoint(id, self.home.checkpoint(id))
        except (OSError, StepwellError) as error:
            self.log.emit(run_events.PruneFailed(directory=id.directory, error=str(error)))

    def want_flush(self, id: CheckpointId) -> None:
        """Let this node's cache say that it is to go to the prefix, so that a start after this one goes on with it."""
        level = cached.read_level(self.home, id)
        if level is not None and not level.flush and self.nodes.is_first_here:
            with contextlib.suppress(OSError):
                files.put(self.home.checkpoint(id) / "level.json", replace(level, flush=True).dump(), point="level")

    def flush_now(self, id: CheckpointId) -> bool:
        """Carry it to the prefix while the program waits. Collective; what fails is tried again by the thread."""
        if self.settings.is_bypass:
            return True
        error: Exception | None = None
        is_final = False
        try:
            self.carrier.attempt(id)
        except (OSError, StepwellError) as raised:
            error, is_final = raised, self.carrier.fail(id, raised, is_first=True)
        votes = self.group.all_gather(None if error is None else str(error), "carrying a dataset to the prefix")
        if any(votes):
            if not is_final:
                self.carrier.add(id)
            return False

        def end() -> str | None:
            try:
                self.carrier.attempt(id)
                return None
            except (OSError, StepwellError) as raised:
                if not self.carrier.fail(id, raised, is_first=True):
                    self.carrier.add(id)
                return str(raised)

        return lead(self.group, "a dataset in the prefix", end) is None


def _check_same(group: Group, settings: Settings) -> None:
    everywhere = group.all_gather(settings.shared_facts(), "the parameters of all ranks")
    for rank, facts in enumerate(everywhere):
        for name, value in facts.items():
            if value != everywhere[0][name]:
                raise ConfigError(f"{name} is {value!r} on rank {rank} and {everywhere[0][name]!r} on rank 0")


def _check_seen(prefix: RunPaths, run: str) -> None:
    assert isinstance(prefix.root, Path)
    try:
        found = read_run(prefix).id
    except StepwellError as error:
        raise ConfigError(
            f"{prefix.root}: not the directory that rank 0 sees: {error}; SCR_PREFIX must be shared"
        ) from error
    if found != run:
        raise ConfigError(f"{prefix.root}: not the same directory as on rank 0; SCR_PREFIX must be shared")
