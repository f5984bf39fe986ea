"""Opening a run directory: inventory, plan, verified read, vote; then the next lineage.

Owns:    the order of these, and what is said to the person.
Before:  nothing is running.   After: `checkpointer` starts the agent in the new lineage.
Not:     trying candidates (search).
Holds:   rank 0 opens, lists and chooses for all, so that all try the same candidates in the same order; never silently
         from zero; the lineage is created only after the state is back.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stepwell.errors import ConfigError
from stepwell.events import journal, run_events
from stepwell.events.level_events import LevelsUnused
from stepwell.handover.client import AgentClient
from stepwell.handover.find_agents import make_whereabouts
from stepwell.handover.protocol import Hello
from stepwell.levels.assignments import Orders
from stepwell.ranks.groups.consent import each, lead
from stepwell.ranks.groups.group import Group
from stepwell.ranks.groups.group_key import common_key
from stepwell.ranks.groups.local import LocalGroup
from stepwell.restore.behind_nodes import check_fresh
from stepwell.restore.candidates import Places, inventory, plan
from stepwell.restore.common_setup import check_directory, check_levels, check_lineage
from stepwell.restore.from_memory import Holdings
from stepwell.restore.from_nodes import Caches
from stepwell.restore.open_request import LoadRequest, OpenRequest
from stepwell.restore.search import Search
from stepwell.storage.format.manifest import Lineage, Run
from stepwell.storage.store import catalog, files, mirror
from stepwell.storage.store.lineage import create_next, open_run, read_history, read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.run_secret import make_shared, read_shared
from stepwell.training.loop.options import seconds_from
from stepwell.training.state.tracked import Tracked
from stepwell.types import CheckpointId, Keep, Owner

if TYPE_CHECKING:
    from stepwell.storage.codecs.assignment import Deltas


@dataclass
class Reopened:
    """An opened run. `restored` is None after a fresh start; `own` is the run's own state, if it came back.

    is_resized:  as many ranks as saved it are not here: what was each rank's own is rank 0's
    key:         what the ranks know one another by; empty if there is one
    agents:      where this run's agents are on this machine; empty if they cannot be found
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
    key: bytes = field(default=b"", repr=False)
    agents: str = field(default="", repr=False)

    @property
    def derived_seed(self) -> int | None:
        """For the generators of this rank, where it cannot have its own ones back."""
        if not self.is_resized or self.restored is None:
            return None
        text = f"stepwell.rank/1:{self.run.seed}:{self.restored}:{self.owner.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def start(self, *, step: int, agent_pid: int, data: str | None) -> run_events.Start:
        """The event that says who opened the run."""
        host = os.uname().nodename
        return run_events.Start(run=self.run.id, step=step, pid=os.getpid(), agent_pid=agent_pid, host=host, data=data)

    def hello(self, paths: RunPaths, keep: Keep, deltas: Deltas | None = None) -> Hello:
        """What an agent has to know of the run."""
        wanted = None
        if deltas is not None:
            from stepwell.storage.chain.chain_request import dump

            wanted = dump(deltas)
        return Hello(
            pid=os.getpid(),
            run=self.run.id,
            root=str(paths.root),
            lineage=self.lineage.number,
            rank=self.owner.rank,
            world_size=self.owner.world_size,
            agents=self.agents,
            keep=keep,
            restored="" if self.restored is None or self.is_resized else self.restored.directory,
            linger=seconds_from("STEPWELL_LINGER", 60),
            storage=seconds_from("STEPWELL_CLOSE_SECONDS", 120),
            patience=seconds_from("STEPWELL_GROUP_SECONDS", 600),
            levels=None if self.orders is None else self.orders.dump(),
            deltas=wanted,
        )


def reopen(
    paths: RunPaths,
    tracked: Sequence[Tracked],
    request: OpenRequest,
    *,
    log: journal.EventLog,
    client: AgentClient,
    group: Group | None = None,
) -> Reopened:
    """Open or create the run and restore what is asked for. Collective: all ranks restore the same checkpoint."""
    group = LocalGroup() if group is None else group
    levels, deltas = request.levels, request.deltas
    journal.speak_to_terminal(level=logging.INFO if group.is_leader else logging.WARNING)
    opened = lead(group, "opening the run", lambda: open_run(paths, seed=request.seed).dump().decode())
    run, owner = Run.load(opened.encode(), path=str(paths.run)), Owner(group.rank, group.size)

    def begin() -> None:
        mirror.fetch(paths, since=run.created)
        request.attach(run.seed)

    each(group, "the data", begin)
    check_directory(group, paths, run)
    check_levels(group, levels)
    if deltas is not None and (unused := os.environ.get("STEPWELL_CACHE")):
        log.emit(LevelsUnused(path=unused, why=f"deltas= writes straight to {paths.root}"))

    def next_lineage(parent: int, step: int, lossy: str | None = None) -> Lineage:
        told: dict[str, Any] = {"parent": parent, "step": step, "lossy": lossy, "keep": request.keep}
        made = lead(group, "the next lineage", lambda: create_next(paths, **told).dump().decode())
        lineage = Lineage.load(made.encode(), path=str(paths.lineages))
        check_lineage(group, paths, lineage)
        return lineage

    key = b""
    if group.size > 1:
        key = common_key(group, run.id, lambda: make_shared(paths), lambda: read_shared(paths))
    agents = make_whereabouts(paths, run.id)
    opened_as = functools.partial(Reopened, run, owner=owner, key=key, agents=agents)
    caches = None if levels is None else Caches(levels, run.id, paths, group, log, key)
    if request.fresh:
        if not request.may_abandon:
            lead(group, "a fresh start", lambda: _refuse_overwriting(paths, catalog.scan(paths)))
        return _settle(opened_as(next_lineage(0, 0)), paths, caches, client)
    holdings = Holdings.find(agents, client, group.rank)
    client.launch()
    with contextlib.closing(holdings):
        if caches is not None:
            caches.meet(client)
            caches.share()
        everywhere = group.all_gather(inventory(holdings), "what is held in memory")
        places = Places(paths, holdings, caches, log)
        search = Search(places, tracked, group, request.strict, request.check if request.strict else None)
        restored = search.run(lambda: plan(paths, everywhere, caches, log, request.wish_with_worth))
        if restored is None:
            return _settle(opened_as(next_lineage(0, 0)), paths, caches, client)
        id, loaded, frozen, world_size, lossy = restored
        lineage = next_lineage(id.lineage, id.step, lossy)
    reopened = opened_as(
        lineage,
        restored=id,
        own=loaded.own,
        frozen=frozen,
        is_resized=world_size != group.size,
        is_lossy=lossy is not None,
    )
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
    request: LoadRequest,
    *,
    log: journal.EventLog,
    group: Group | None = None,
) -> bool:
    """Take single objects out of a run and leave the run as it is: no lineage, no agent. False: nothing was there."""
    group = LocalGroup() if group is None else group
    each(group, "the desk", lambda: mirror.fetch(paths))
    journal.speak_to_terminal()
    opened = lead(group, "the run", lambda: read_run(paths).dump().decode() if files.exists(paths.run) else None)
    if opened is not None:
        check_directory(group, paths, Run.load(opened.encode(), path=str(paths.run)))
    search = Search(Places(paths, Holdings(), None, log), tracked, group, request.strict, None, set(request.only))
    return search.run(lambda: plan(paths, [], None, log, request.wish, any_branch=True)) is not None


def _refuse_overwriting(paths: RunPaths, entries: Sequence[catalog.Entry]) -> None:
    committed = [entry for entry in entries if entry.is_committed]
    if committed:
        raise ConfigError(
            f"{paths.root} holds checkpoints up to step {committed[0].id.step}: call ckpt.restore() before the loop, "
            "or use another directory for a new run",
            path=str(paths.root),
        )
    check_fresh(paths)
