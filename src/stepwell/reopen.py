"""Opening a run directory: inventory, plan, verified read, vote; then the next lineage.

Owns:    the order of these, and what is said to the person.
Before:  nothing is running.   After: `checkpointer` starts the agent in the new lineage.
Holds:   rank 0 opens, lists and chooses for all, so that all try the same candidates in the same order; a candidate
         counts only if every rank has it. A damaged one is reported and the next older one is tried; never silently
         from zero; the lineage is created only after the state is back.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stepwell import events, journal
from stepwell.agent.client import AgentClient
from stepwell.arena.channel import Message
from stepwell.caches import Caches
from stepwell.candidates import Candidate, Places, Wish, inventory, plan
from stepwell.errors import ConfigError, RestoreError, listing
from stepwell.faults import crash_point
from stepwell.format.manifest import Lineage, Run
from stepwell.groups.consent import each, lead, vote
from stepwell.groups.group import Group
from stepwell.groups.local import LocalGroup
from stepwell.holdings import Holdings
from stepwell.levels.orders import Orders
from stepwell.levels.spec import Levels
from stepwell.options import seconds_from
from stepwell.restore.load import Loaded, load
from stepwell.restore.whole import Part
from stepwell.state.tracked import Tracked
from stepwell.store import catalog, desk
from stepwell.store.lineage import create_next, open_run, read_history
from stepwell.store.paths import RunPaths
from stepwell.store.progress import read_progress
from stepwell.types import CheckpointId, Keep, Owner

if TYPE_CHECKING:
    from stepwell.codecs.layout import Deltas


@dataclass
class Reopened:
    """An opened run. `restored` is None after a fresh start; `own` is the run's own state, if it came back.

    is_resized:  as many ranks as saved it are not here: what was each rank's own is rank 0's
    """

    run: Run
    lineage: Lineage
    owner: Owner
    restored: CheckpointId | None = None
    own: dict[str, Any] | None = None
    frozen: set[str] = field(default_factory=set)
    is_resized: bool = False
    is_lossy: bool = False
    orders: Orders | None = None

    @property
    def derived_seed(self) -> int | None:
        """For the generators of this rank, where it cannot have its own ones back."""
        if not self.is_resized or self.restored is None:
            return None
        text = f"stepwell.rank/1:{self.run.seed}:{self.restored}:{self.owner.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def start(self, *, step: int, agent_pid: int, data: str | None) -> events.Start:
        """The event that says who opened the run."""
        host = os.uname().nodename
        return events.Start(run=self.run.id, step=step, pid=os.getpid(), agent_pid=agent_pid, host=host, data=data)

    def hello(self, paths: RunPaths, keep: Keep, deltas: Deltas | None = None) -> Message:
        """What an agent has to know of the run."""
        wanted = None
        if deltas is not None:
            from stepwell.codecs.message import dump

            wanted = dump(deltas)
        return {
            "type": "hello",
            "pid": os.getpid(),
            "run": self.run.id,
            "root": str(paths.root),
            "lineage": self.lineage.number,
            "rank": self.owner.rank,
            "world_size": self.owner.world_size,
            "keep": asdict(keep),
            "restored": "" if self.restored is None or self.is_resized else self.restored.directory,
            "linger": seconds_from("STEPWELL_LINGER", 60),
            "storage": seconds_from("STEPWELL_CLOSE_SECONDS", 120),
            "patience": seconds_from("STEPWELL_GROUP_SECONDS", 600),
            "levels": None if self.orders is None else self.orders.dump(),
            "deltas": wanted,
        }


def reopen(
    paths: RunPaths,
    tracked: Sequence[Tracked],
    *,
    seed: int | None,
    log: journal.EventLog,
    client: AgentClient,
    attach: Callable[[int], None],
    check: Callable[[dict[str, Any]], None],
    group: Group | None = None,
    levels: Levels | None = None,
    deltas: Deltas | None = None,
    step: int | None = None,
    before: int | None = None,
    strict: bool = True,
    prefer: str | None = None,
    fresh: bool = False,
    may_abandon: bool = False,
) -> Reopened:
    """Open or create the run and restore what is asked for. Collective: all ranks restore the same checkpoint.

    attach:       told the run's seed, before anything is read
    check:        told the run's own state, if `strict`, before anything is changed; may refuse it
    fresh:        restore nothing: refused where there are checkpoints, unless
    may_abandon:  the user took single objects out of them and goes on from step 0
    """
    group = LocalGroup() if group is None else group
    wish = Wish(step, before, prefer, None if deltas is None else deltas.worth)
    journal.speak_to_terminal(level=logging.INFO if group.is_leader else logging.WARNING)
    opened = lead(group, "opening the run", lambda: open_run(paths, seed=_seed(seed)).dump().decode())
    run, owner = Run.load(opened.encode(), path=str(paths.run)), Owner(group.rank, group.size)

    def begin() -> None:
        desk.fetch(paths, since=run.created)
        attach(run.seed)

    each(group, "the data", begin)

    def next_lineage(parent: int, step: int, lossy: str | None = None) -> Lineage:
        made = lead(
            group, "the next lineage", lambda: create_next(paths, parent=parent, step=step, lossy=lossy).dump().decode()
        )
        return Lineage.load(made.encode(), path=str(paths.lineages))

    caches = None if levels is None else Caches(levels, run.id, group, log)
    if fresh:
        lead(group, "a fresh start", lambda: None if may_abandon else _refuse_overwriting(paths, catalog.scan(paths)))
        return _settle(Reopened(run, next_lineage(0, 0), owner), paths, caches, client)
    holdings = Holdings.find(run.id, paths.identity, client, group.rank)
    client.launch()
    with contextlib.closing(holdings):
        if caches is not None:
            caches.meet(client)
            caches.share()
        everywhere = group.all_gather(inventory(holdings), "what is held in memory")
        plans = lead(group, "the plan", lambda: plan(paths, everywhere, caches, log, wish))
        candidates = [Candidate.load(values) for values in plans]
        places = Places(paths, holdings, caches, log)
        restored = _try_all(candidates, places, tracked, log, paths, group, strict, check if strict else None)
        if restored is None:
            return _settle(Reopened(run, next_lineage(0, 0), owner), paths, caches, client)
        id, loaded, frozen, world_size, lossy = restored
        lineage = next_lineage(id.lineage, id.step, lossy)
    reopened = Reopened(run, lineage, owner, id, loaded.own, frozen, world_size != group.size, lossy is not None)
    return _settle(reopened, paths, caches, client)


def _settle(reopened: Reopened, paths: RunPaths, caches: Caches | None, client: AgentClient) -> Reopened:
    """What the agent has to know about the nodes, now that the lineage is known."""
    if caches is not None:
        caches.meet(client)
        again = None if reopened.is_resized else reopened.restored
        reopened.orders = caches.orders(read_history(paths), again) if caches.are_first(paths) else None
        caches.close()
    return reopened


def load_only(
    paths: RunPaths,
    tracked: Sequence[Tracked],
    *,
    log: journal.EventLog,
    step: int | None,
    before: int | None,
    only: str | set[str],
    strict: bool,
    prefer: str | None = None,
    group: Group | None = None,
) -> bool:
    """Take single objects out of a run and leave the run as it is: no lineage, no agent. False: nothing was there."""
    group = LocalGroup() if group is None else group
    only = {only} if isinstance(only, str) else only
    each(group, "the desk", lambda: desk.fetch(paths))
    journal.speak_to_terminal()
    plans = lead(group, "the plan", lambda: plan(paths, [], None, log, Wish(step, before, prefer), any_branch=True))
    candidates = [Candidate.load(values) for values in plans]
    places = Places(paths, Holdings(), None, log)
    return _try_all(candidates, places, tracked, log, paths, group, strict, None, only) is not None


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


def _try_all(
    candidates: Sequence[Candidate],
    places: Places,
    tracked: Sequence[Tracked],
    log: journal.EventLog,
    paths: RunPaths,
    group: Group,
    strict: bool,
    check: Callable[[dict[str, Any]], None] | None,
    only: set[str] | None = None,
) -> tuple[CheckpointId, Loaded, set[str], int, str | None] | None:
    """The first candidate whose every byte is right on every rank. Raises RestoreError when all are damaged."""
    damaged = []
    for candidate in candidates:
        for source, find in places.of(candidate):
            started = time.monotonic()
            if source == "node" and places.caches is not None:
                places.caches.complete(candidate.id)
            parts: list[Part] = []
            loaded: Loaded | None = None
            error: Exception | None = None
            try:
                with _no_collection():
                    parts = find()
                    mine = group.rank if len(parts) == group.size else None
                    loaded = load(parts, tracked, mine=mine, only=only, strict=strict, check=check)
            except Exception as raised:
                error = raised
                if source == "node" and places.caches is not None:
                    places.caches.doubt(raised)
            bad = vote(group, f"the vote on step {candidate.id.step}", error)
            if bad is not None:
                damaged.append(f"{candidate.id} ({source}): {bad}")
                log.emit(events.Damage(directory=candidate.id.directory, reason=bad))
                continue
            assert loaded is not None
            id = parts[0].record.id  # a chain may end before the record that was asked for
            crash_point("restore.loaded")
            if loaded.problems:
                log.emit(events.Mismatch(problems=loaded.problems))
            log.emit(
                events.Restore(
                    step=id.step,
                    directory=id.directory,
                    source=source,
                    seconds=time.monotonic() - started,
                    nbytes=loaded.nbytes,
                    redone=_redone(paths, id),
                    suspect=candidate.is_suspect,
                )
            )
            leaves = [leaf for part in parts for leaf in part.record.leaves]
            frozen = {leaf.name for leaf in leaves if leaf.file == 1}
            return id, loaded, frozen, len(parts), f"chain of {candidate.chain}" if candidate.chain else None
    if damaged:
        raise RestoreError(
            f"no checkpoint in {paths.root} is whole, and the live state may be half overwritten:\n{listing(damaged)}\n"
            "restore from a copy of the run directory, or start anew in another one",
            path=str(paths.root),
        )
    return None


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
