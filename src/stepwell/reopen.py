"""Opening a run directory: inventory, plan, verified read, load; then the next lineage.

Owns:    the order of these for one process, and what is said to the person.
Before:  nothing is running.   After: `checkpointer` starts the agent in the new lineage.
Holds:   a damaged candidate is reported and the next older one is tried; never silently from zero; the lineage is
         created only after the state is back.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepwell import events, journal
from stepwell.agent.client import AgentClient, find_orphan
from stepwell.arena.channel import Message, place
from stepwell.arena.memory import Arena, ArenaShape
from stepwell.errors import ConfigError, DamagedError, RestoreError, listing
from stepwell.faults import crash_point
from stepwell.format.manifest import Lineage, Run
from stepwell.format.record import FileEntry, Record
from stepwell.options import seconds_from
from stepwell.restore.load import load_record
from stepwell.restore.plan import Choice, choose
from stepwell.restore.read import FileSource, MemorySource, Source
from stepwell.state.tracked import Tracked
from stepwell.store import catalog
from stepwell.store.lineage import create_next, open_run, read_history
from stepwell.store.paths import RunPaths
from stepwell.store.progress import read_progress
from stepwell.types import CheckpointId, Keep


@dataclass
class Reopened:
    """An opened run. `restored` is None after a fresh start; `own` is the run's own state, if it came back."""

    run: Run
    lineage: Lineage
    restored: CheckpointId | None
    own: dict[str, Any] | None
    frozen: set[str] = field(default_factory=set)

    def start(self, *, step: int, agent_pid: int, data: str | None) -> events.Start:
        """The event that says who opened the run."""
        host = os.uname().nodename
        return events.Start(run=self.run.id, step=step, pid=os.getpid(), agent_pid=agent_pid, host=host, data=data)

    def hello(self, paths: RunPaths, keep: Keep) -> Message:
        """What an agent has to know of the run."""
        return {
            "type": "hello",
            "pid": os.getpid(),
            "run": self.run.id,
            "root": str(paths.root),
            "lineage": self.lineage.number,
            "rank": 0,
            "world_size": 1,
            "keep": asdict(keep),
            "linger": seconds_from("STEPWELL_LINGER", 60),
            "patience": seconds_from("STEPWELL_GROUP_SECONDS", 600),
        }


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that may be restored, and how to get at its bytes."""

    id: CheckpointId
    source: str
    record: Callable[[], Record]
    open_source: Callable[[FileEntry], Source]
    is_suspect: bool
    is_live: bool = True


def reopen(
    paths: RunPaths,
    tracked: Sequence[Tracked],
    *,
    seed: int | None,
    log: journal.EventLog,
    client: AgentClient,
    attach: Callable[[int], None],
    check: Callable[[dict[str, Any]], None],
    step: int | None = None,
    before: int | None = None,
    strict: bool = True,
    fresh: bool = False,
    may_abandon: bool = False,
) -> Reopened:
    """Open or create the run and restore what is asked for.

    attach:       told the run's seed, before anything is read
    check:        told the run's own state, if `strict`, before anything is changed; may refuse it
    fresh:        restore nothing: refused where there are checkpoints, unless
    may_abandon:  the user took single objects out of them and goes on from step 0
    """
    journal.speak_to_terminal()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this version checkpoints one process; WORLD_SIZE is above 1")
    run = open_run(paths, seed=_seed(seed))
    attach(run.seed)
    entries = catalog.scan(paths)
    if fresh:
        if not may_abandon:
            _refuse_overwriting(paths, entries)
        return Reopened(run, create_next(paths, parent=0, step=0), None, None)
    memory = _Memory.find(run.id, paths.root, client)
    client.launch()
    with contextlib.closing(memory):
        choices = choose(entries, step=step, before=before)
        candidates = memory.candidates(paths, step, before) + _from_disk(paths, choices, log)
        candidates.sort(key=_preference)
        restored, own, frozen = _try_all(candidates, tracked, log, paths, None, strict, check if strict else None)
        if restored is None:
            _check_nothing(paths, choices, log)
            return Reopened(run, create_next(paths, parent=0, step=0), None, None)
        lineage = create_next(paths, parent=restored.lineage, step=restored.step)
    return Reopened(run, lineage, restored, own, frozen)


def load_only(
    paths: RunPaths,
    tracked: Sequence[Tracked],
    *,
    log: journal.EventLog,
    step: int | None,
    before: int | None,
    only: str | set[str],
    strict: bool,
) -> bool:
    """Take single objects out of a run and leave the run as it is: no lineage, no agent. False: nothing was there."""
    only = {only} if isinstance(only, str) else only
    journal.speak_to_terminal()
    choices = choose(catalog.scan(paths), step=step, before=before, any_branch=True)
    restored, _, _ = _try_all(_from_disk(paths, choices, log), tracked, log, paths, only, strict)
    if restored is None:
        _check_nothing(paths, choices, log)
    return restored is not None


def _preference(candidate: _Candidate) -> tuple[bool, bool, int, int, int, bool]:
    """As `choose` ranks them, with memory before disk: not suspect, live, newest."""
    id = candidate.id
    return (
        candidate.is_suspect,
        not candidate.is_live,
        -id.step,
        -id.lineage,
        -id.repeat,
        candidate.source != "memory",
    )


def _seed(seed: int | None) -> int | None:
    override = os.environ.get("STEPWELL_SEED")
    return int(override) if override is not None and seed is None else seed


def _refuse_overwriting(paths: RunPaths, entries: Sequence[catalog.Entry]) -> None:
    committed = [entry for entry in entries if entry.is_committed]
    if committed:
        raise ConfigError(
            f"{paths.root} holds checkpoints up to step {committed[0].id.step}: call ckpt.restore() before the loop, "
            "or use another directory for a new run",
            path=str(paths.root),
        )


def _check_nothing(paths: RunPaths, choices: Sequence[Choice], log: journal.EventLog) -> None:
    """No candidate at all: fine for a directory without checkpoints, an error where there are some."""
    found = [f"{choice.entry.id}: {choice.reason}" for choice in choices if choice.entry.is_committed]
    if found:
        raise RestoreError(
            f"no checkpoint in {paths.root} can be restored:\n{listing(found)}\n"
            "`stepwell why` shows the details; restore(step=...) takes a named one; another directory starts anew",
            path=str(paths.root),
        )
    log.emit(events.Fresh(where=str(paths.root)))


def _from_disk(paths: RunPaths, choices: Sequence[Choice], log: journal.EventLog) -> list[_Candidate]:
    candidates = []
    for choice in choices:
        entry = choice.entry
        if entry.damage is not None:
            log.emit(events.Damage(directory=entry.id.directory, reason=entry.damage))
        if choice.rank is not None and entry.manifest is not None:
            candidates.append(_disk_candidate(paths, entry))
    return candidates


def _disk_candidate(paths: RunPaths, entry: catalog.Entry) -> _Candidate:
    manifest, directory = entry.manifest, entry.path
    assert manifest is not None
    return _Candidate(
        id=entry.id,
        source="disk",
        record=lambda: catalog.read_record(paths, manifest),
        open_source=lambda file: FileSource(directory / file.name),
        is_suspect=manifest.suspect is not None,
        is_live=entry.is_live,
    )


def _try_all(
    candidates: Sequence[_Candidate],
    tracked: Sequence[Tracked],
    log: journal.EventLog,
    paths: RunPaths,
    only: set[str] | None,
    strict: bool,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[CheckpointId | None, dict[str, Any] | None, set[str]]:
    """The first candidate whose every byte is right. Raises RestoreError when all of them are damaged."""
    damaged = []
    for candidate in candidates:
        started = time.monotonic()
        try:
            with _no_collection():
                record = candidate.record()
                loaded = load_record(record, candidate.open_source, tracked, only=only, strict=strict, check=check)
        except DamagedError as error:
            damaged.append(f"{candidate.id} ({candidate.source}): {error}")
            log.emit(events.Damage(directory=candidate.id.directory, reason=str(error)))
            continue
        crash_point("restore.loaded")
        if loaded.problems:
            log.emit(events.Mismatch(problems=loaded.problems))
        log.emit(
            events.Restore(
                step=candidate.id.step,
                directory=candidate.id.directory,
                source=candidate.source,
                seconds=time.monotonic() - started,
                nbytes=loaded.nbytes,
                redone=_redone(paths, candidate.id),
                suspect=candidate.is_suspect,
            )
        )
        return candidate.id, loaded.own, {leaf.name for leaf in record.leaves if leaf.file == 1}
    if damaged:
        raise RestoreError(
            f"no checkpoint in {paths.root} is whole, and the live state may be half overwritten:\n{listing(damaged)}\n"
            "restore from a copy of the run directory, or start anew in another one",
            path=str(paths.root),
        )
    return None, None, set()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of new objects would make Python look for garbage, in all there is, while the readers wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _redone(paths: RunPaths, id: CheckpointId) -> int | None:
    """Steps the last trainer had finished beyond the restored one, if that is known."""
    progress = read_progress(paths.progress)
    if progress is None or progress.step < id.step:
        return None
    return progress.step - id.step


class _Memory:
    """What a lingering agent still holds of the run."""

    def __init__(self, arena: Arena | None = None, offer: Message | None = None) -> None:
        self._arena = arena
        self._offer = offer or {"snapshots": []}

    @classmethod
    def find(cls, run: str, root: Path, client: AgentClient) -> _Memory:
        """Adopt the agent of a dead trainer on this node, if there is one, or has been in a try before this one."""
        if client.offer is None:
            found = find_orphan(place(run, root), rank=0)
            if found is None:
                return cls()
            client.adopt(*found)
        assert client.offer is not None
        offer, fds = client.offer
        if not fds:
            return cls()
        return cls(Arena.attach(os.dup(fds[0]), ArenaShape(**offer["arena"])), offer)

    def candidates(self, paths: RunPaths, step: int | None, before: int | None) -> list[_Candidate]:
        """Snapshots in memory that lie on the run's path and fit the request."""
        history, found = read_history(paths), []
        for item in self._offer["snapshots"]:
            record = Record.load(item["record"].encode(), path="arena")
            wanted = (step is None or record.id.step == step) and (before is None or record.id.step < before)
            if wanted and history.is_live(record.id):
                found.append(self._candidate(record, item["slot"], item["frozen"]))
        return found

    def _candidate(self, record: Record, slot: int, frozen: int) -> _Candidate:
        arena = self._arena
        assert arena is not None

        def open_source(file: FileEntry) -> Source:
            index = frozen if file is record.files[-1] and len(record.files) > 1 else slot
            return MemorySource(arena.fd, arena.shape.start(index), file.nbytes, file.name)

        return _Candidate(record.id, "memory", lambda: record, open_source, record.suspect is not None)

    def close(self) -> None:
        """Let go of the old arena; the agent frees it when its snapshots are durable."""
        if self._arena is not None:
            self._arena.close()
