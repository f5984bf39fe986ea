"""What torchrun asks: who am I this time, and do my workers have to start again?

Owns:    the agent's way through the table: gate, enter, arrive, wait for the round, leave; and its patience.
Not:     the table's rules (table), the store (keeper).
Holds:   the rank torchrun gets is the slot. `num_nodes_waiting` is 0 as long as this agent's round holds: a spare that
         comes, waits or dies never restarts anybody's workers. Every end that is not torchrun's own is one line and a
         status of `codes`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from stepwell.errors import ConfigError, StepwellError
from stepwell.escape import shown
from stepwell.events.run_events import logger
from stepwell.launch import exit_status
from stepwell.launch import slot_table as change
from stepwell.launch.conf import Conf, read_conf
from stepwell.launch.exit_status import LaunchEnded
from stepwell.launch.health import why_refused
from stepwell.launch.meeting_point import hold_port, own_address
from stepwell.launch.round import RoundStore
from stepwell.launch.slot_table import Member, SlotTable
from stepwell.launch.store_thread import Change, StoreLostError, StoreThread
from stepwell.storage.store.node_id import node_id

BACKEND: Final = "stepwell"
DEFAULT_PORT: Final = 29400
_TWIN_LIVES: Final = 3
"""How often a node would have been found dead by now."""


def create(params: RendezvousParameters) -> RendezvousHandler:
    """What torchrun calls for `--rdzv-backend=stepwell`."""
    try:
        conf = read_conf(params.config)
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
        root = Path(cache) if (cache := os.environ.get("STEPWELL_CACHE")) else None
        if not params.run_id or params.run_id == "none":
            raise ConfigError("name the job: --rdzv-id=NAME, the same on all nodes")
    except (ConfigError, ValueError) as error:
        say(str(error))
        raise LaunchEnded(exit_status.FAILED, str(error)) from error
    return Rendezvous(params.run_id, (host, port), params.min_nodes, params.max_nodes, conf, root, params.local_addr)


class Rendezvous(RendezvousHandler):
    """One torchrun agent's part in the job. Constructing only assigns."""

    def __init__(
        self,
        job: str,
        endpoint: tuple[str, int],
        slots: int,
        most: int,
        conf: Conf,
        root: Path | None,
        local: str | None,
    ) -> None:
        self._job = job
        self._endpoint = endpoint
        self._slots = slots
        self._most = most
        self._conf = conf
        self._root = root
        self._local = local
        self._keeper = StoreThread(job, SlotTable((None,) * slots, most), conf, os.environ.get("STEPWELL_NOTICE"))
        self._me: Member | None = None
        self._node = ""
        self._held: socket.socket | None = None
        self._since: dict[tuple[object, ...], float] = {}
        self._was_in = False
        self._has_left = False

    def get_backend(self) -> str:
        """Name on torchrun's command line."""
        return BACKEND

    def get_run_id(self) -> str:
        """Name of the job."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """No: rank 0's worker serves a store of its own in every round, so no key of a dead round is ever seen."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node has a slot and everybody is there. Takes for ever on a spare. Raises Ended."""
        try:
            generation = self._keeper.end_round()
            if self._me is None:
                self._connect()
            table = self._keeper.ask(_nothing)
            while (slot := self._slot(table, generation)) is None:
                table = self._step(table, generation)
        except StoreLostError as error:
            raise self._lost(error) from error
        self._keeper.begin_round(table.generation, table.version)
        logger.info("round %d of %s: this node has slot %d", table.generation, self._job, slot)
        leader = table.seats()[0]
        store = RoundStore(slot, self._slots, self._count_workers, self._wait_for_end)
        return RendezvousInfo(store, slot, self._slots, RendezvousStoreInfo(leader.host, leader.port))

    def num_nodes_waiting(self) -> int:
        """1 if the running workers have to end, else 0. Does not wait. Raises Ended when the job is over."""
        try:
            is_broken = self._keeper.is_broken()
        except StoreLostError as error:
            raise self._lost(error) from error
        if is_broken:
            self._check(self._keeper.table)
        return int(is_broken)

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._keeper.table.over is not None

    def set_closed(self) -> None:
        """Nobody closes a job from outside: the table says when it is over."""

    def shutdown(self) -> bool:
        """torchrun ends. If it gives up on its workers the job is over: on other nodes they would fail too."""
        if isinstance(sys.exc_info()[1], ChildFailedError):
            reason = f"the workers of {self._me} failed more often than --max-restarts allows"
            with contextlib.suppress(StoreLostError):
                self._keeper.ask(lambda table: change.end(table, exit_status.FAILED, reason))
        self._leave()
        return True

    # Coming

    def _connect(self) -> None:
        """Pass the gate, and begin to live in the store."""
        reason = why_refused(self._root, self._conf)
        try:
            self._node = secrets.token_hex(16) if self._root is None else node_id(self._root)
        except (OSError, StepwellError) as error:
            # Without an id there is nothing to put in quarantine; the node stays outside all the same.
            raise self._end(exit_status.QUARANTINED, f"this node cannot join: {reason or error}") from error
        host, port = self._endpoint
        try:
            timeout = timedelta(seconds=self._conf.store_seconds)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise StoreLostError(str(error).splitlines()[0]) from error
        self._keeper.start(store)
        atexit.register(self._leave)  # on a signal torchrun does not call shutdown
        self._begin_life(reason)

    def _begin_life(self, reason: str | None) -> Member:
        """Under a new name: at the start, and when the others took us for dead. `reason`: why the gate says no."""
        me = Member(self._node, secrets.token_hex(8), self._local or own_address(*self._endpoint))
        self._me, self._was_in = me, False
        self._keeper.live_as(me.agent)
        if reason is not None:
            self._keeper.ask(lambda table: change.refuse(table, me, reason))
        return me

    def _slot(self, table: SlotTable, generation: int) -> int | None:
        """The slot of this agent in a round that has begun; raises Ended where there will be none."""
        self._check(table)
        assert self._me is not None
        slot = table.seat_of(self._me.agent)
        return slot if table.is_running and table.generation > generation else None

    def _step(self, table: SlotTable, generation: int) -> SlotTable:
        """Do what can be done now; wait for the next look if that is nothing."""
        wish = self._wish(table, generation)
        return self._keeper.ask(wish) if wish(table) != table else self._keeper.next_look()

    def _wish(self, table: SlotTable, generation: int) -> Change:
        me, conf = self._me, self._conf
        assert me is not None
        if not table.has(me.agent):
            if self._was_in:
                logger.warning("the other nodes declared this node dead; it joins again as a new one")
                me = self._begin_life(why_refused(self._root, conf))
            self._look_for_twin(table)
            return partial(change.enter, me=me)
        self._was_in = True
        if table.seat_of(me.agent) is not None and me.agent not in table.arrived:
            here = replace(me, port=self._hold())
            return partial(change.arrive, me=here, generation=generation, budget=conf.restarts)
        expired, late, has_waited = self._run_out_of_patience(table)
        wish = partial(change.settle, expired=expired, late=late, node_failures=conf.node_failures)
        if has_waited:
            wish = partial(change.give_up, waited=has_waited)
        # Whoever was frozen has old patience, and was taken for dead meanwhile: it has no say any more.
        return lambda before: wish(before) if before.has(me.agent) else before

    def _look_for_twin(self, table: SlotTable) -> None:
        """Our own earlier life is found dead in a while. A second agent in one cache directory is not."""
        mine = (member for member in (*table.seats(), *table.spares) if member.node == self._node)
        if not any(table.has(member.agent) for member in mine):
            return
        now = time.monotonic()
        self._since = {("twin",): self._since.get(("twin",), now)}
        if now - self._since["twin",] > _TWIN_LIVES * self._conf.dead_seconds:
            raise self._end(
                exit_status.FAILED, f"another agent uses {self._root}: give each agent its own STEPWELL_CACHE"
            )

    def _run_out_of_patience(self, table: SlotTable) -> tuple[set[str], set[str], float]:
        """Agents dead for longer than the grace time, agents that do not arrive, seconds waited in vain for a node.

        By this process's clock, from the moment it saw them so.
        """
        now, conf = time.monotonic(), self._conf
        coming = {seat.agent for seat in table.seats()} - table.arrived - table.dead
        seen: list[tuple[object, ...]] = [("dead", agent) for agent in table.dead]
        seen += [("coming", table.restarts, agent) for agent in coming if not table.is_running]
        seen += [("empty",)] if table.empty() and not table.spares else []
        self._since = {key: self._since.get(key, now) for key in seen}
        age = {key: now - since for key, since in self._since.items()}
        limit = conf.spare_timeout if table.generation else conf.timeout
        return (
            {str(key[-1]) for key, seconds in age.items() if key[0] == "dead" and seconds >= conf.grace},
            {str(key[-1]) for key, seconds in age.items() if key[0] == "coming" and seconds >= conf.late},
            limit if age.get(("empty",), 0.0) >= max(limit, 0.001) else 0.0,
        )

    def _hold(self) -> int:
        """A port of this node for the workers of the next round to meet, in case this is slot 0."""
        if self._held is not None:
            self._held.close()
        self._held = hold_port()
        return int(self._held.getsockname()[1])

    # What torchrun does with the store of a round

    def _count_workers(self, workers: int) -> None:
        me = self._me
        assert me is not None
        try:
            self._check(self._keeper.ask(lambda table: change.count_workers(table, me, workers)))
        except StoreLostError as error:
            raise self._lost(error) from error

    def _wait_for_end(self, seconds: float) -> None:
        """Our workers ended well: wait for those of the others."""
        assert self._me is not None
        agent, deadline = self._me.agent, time.monotonic() + seconds
        try:
            table = self._keeper.ask(lambda table: change.finish(table, agent))
            while table.seat_of(agent) is not None and time.monotonic() < deadline:
                if table.over is not None and table.over.code == exit_status.DONE:
                    return
                self._check(table)
                table = self._keeper.next_look()
        except StoreLostError as error:
            raise self._lost(error) from error
        logger.warning("the workers of other nodes did not end within %g s of ours", seconds)

    # Going

    def _check(self, table: SlotTable) -> None:
        """Raise Ended if the job is over, or this node may not take part in it."""
        if (len(table.slots), table.most) != (self._slots, self._most):
            job = f"--nnodes={len(table.slots)}:{table.most}"
            raise self._end(exit_status.FAILED, f"started with --nnodes={self._slots}:{self._most}, the job with {job}")
        if table.over is not None:
            raise self._end(table.over.code, table.over.reason)
        if reason := table.quarantine.get(self._node):
            raise self._end(exit_status.QUARANTINED, f"node {self._node[:8]} is in quarantine: {reason}")

    def _lost(self, error: StoreLostError) -> LaunchEnded:
        host, port = self._endpoint
        self._has_left = True  # there is nobody to say goodbye to
        return self._end(exit_status.STORE_LOST, f"lost the store {host}:{port}, and the job with it ({error})")

    def _end(self, code: int, reason: str) -> LaunchEnded:
        say(f"{self._job}: {reason} (exit status {code})")
        return LaunchEnded(code, reason)

    def _leave(self) -> None:
        """Say goodbye, so that nobody has to find out. May be called twice."""
        if not self._has_left and self._me is not None:
            self._has_left = True
            agent = self._me.agent
            with contextlib.suppress(StoreLostError):
                self._keeper.ask(lambda table: change.bury(table, {agent}, self._conf.restarts, is_goodbye=True))
        self._keeper.close()


def _nothing(table: SlotTable) -> SlotTable:
    return table


def say(line: str) -> None:
    """For the person who looks at the job's log, whatever torchrun does with logging."""
    print(f"stepwell: {shown(line)}", file=sys.stderr, flush=True)
