"""The table of slots: which node does the work of which rank, and every way this may change.

Owns:    the document in the store, and its transitions as pure functions: a table in, a table out.
Not:     how it is stored (keeper), who is alive (pulse), how long to wait (rendezvous).
Holds:   a slot goes to another node only when its agent is dead or late. Nobody is in two places. A round begins when
         every slot has a live agent that waits for it; only then the generation grows. What is over stays over.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from stepwell.errors import StateError
from stepwell.launch import exit_status

FORMAT: Final = "stepwell.slots/1"


@dataclass(frozen=True)
class Member:
    """One life of an agent on a node, and where its workers would meet if it had slot 0."""

    node: str
    agent: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        return f"node {self.node[:8]} ({self.host})"


@dataclass(frozen=True)
class Over:
    """Why the job is over, and how every agent ends."""

    code: int
    reason: str


@dataclass(frozen=True)
class SlotTable:
    """One version of the table. `dead` and `gone` (said goodbye) name agents that still stand in a slot."""

    slots: tuple[Member | None, ...]
    most: int
    spares: tuple[Member, ...] = ()
    generation: int = 0
    is_running: bool = False
    arrived: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    formed: tuple[str, ...] = ()
    first: str = ""
    blamed: str = ""
    blames: int = 0
    restarts: int = 0
    workers: int = 0
    quarantine: Mapping[str, str] = field(default_factory=dict)
    leaving: str = ""
    over: Over | None = None
    version: int = 0
    writer: str = ""

    def seat_of(self, agent: str) -> int | None:
        """The slot of an agent that was not declared dead."""
        if agent in self.dead:
            return None
        return next((i for i, seat in enumerate(self.slots) if seat is not None and seat.agent == agent), None)

    def has(self, agent: str) -> bool:
        """Whether it is a live member, in a slot or as a spare."""
        return self.seat_of(agent) is not None or any(spare.agent == agent for spare in self.spares)

    def seats(self) -> list[Member]:
        """Those that have a slot, dead ones too."""
        return [seat for seat in self.slots if seat is not None]

    def watched(self) -> list[str]:
        """Agents whose silence means something, in an order that is the same for all."""
        at_work = [seat.agent for seat in self.seats() if seat.agent not in self.dead | self.finished]
        return at_work + [spare.agent for spare in self.spares]

    def empty(self) -> list[int]:
        """Slots nobody works in."""
        return [i for i, seat in enumerate(self.slots) if seat is None or seat.agent in self.dead]

    def encode(self) -> str:
        """For the store."""
        plain = asdict(self)
        for name in ("arrived", "finished", "dead", "gone"):
            plain[name] = sorted(plain[name])
        return json.dumps({"format": FORMAT, **plain}, separators=(",", ":"))


def decode(data: bytes) -> SlotTable:
    """What the store holds. Raises StateError."""
    try:
        plain: dict[str, Any] = json.loads(data)
        if plain.pop("format") != FORMAT:
            raise ValueError("another version of stepwell wrote it")
        plain["slots"] = tuple(None if seat is None else Member(**seat) for seat in plain["slots"])
        plain["spares"] = tuple(Member(**spare) for spare in plain["spares"])
        plain["formed"] = tuple(plain["formed"])
        for name in ("arrived", "finished", "dead", "gone"):
            plain[name] = frozenset(plain[name])
        plain["over"] = None if plain["over"] is None else Over(**plain["over"])
        return SlotTable(**plain)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"the store has no table of slots under this name: {error}") from error


# Coming


def enter(table: SlotTable, me: Member) -> SlotTable:
    """A node comes: to its own slot if that is dead, to one nobody ever had, else to the spares. Unchanged: not yet."""
    if table.over is not None or table.has(me.agent) or me.node in table.quarantine:
        return table
    same = [i for i, seat in enumerate(table.slots) if seat is not None and seat.node == me.node]
    if same:
        seat = table.slots[same[0]]
        assert seat is not None
        return _seat(table, same[0], me) if seat.agent in table.dead else table
    if any(spare.node == me.node for spare in table.spares):
        return table  # an earlier life of this agent, which will be found dead; or a second agent in one cache
    if None in table.slots:
        return _seat(table, table.slots.index(None), me)
    if len(table.slots) + len(table.spares) < table.most:
        return replace(table, spares=(*table.spares, me))
    return table


def arrive(table: SlotTable, me: Member, generation: int, budget: int | None) -> SlotTable:
    """The agent in a slot has no workers any more and waits for the next round; `generation` was its last one."""
    slot = table.seat_of(me.agent)
    if table.over is not None or slot is None or (table.is_running and table.generation != generation):
        return table
    if table.leaving:
        return end(table, exit_status.REQUEUE, f"asked to exit: {table.leaving}; start the job again")
    if table.is_running:
        if table.finished:
            return end(table, exit_status.FAILED, f"the workers of slot {slot} failed when others had ended well")
        table = _break(table, budget, first=me.node)
    return replace(_seat(table, slot, me), arrived=table.arrived | {me.agent}) if table.over is None else table


def settle(table: SlotTable, expired: Collection[str], late: Collection[str], node_failures: int) -> SlotTable:
    """Fill dead slots with spares, and begin the round if everybody is there.

    expired:  agents that were dead for longer than a previous node is waited for
    late:     agents that live, but did not arrive in all the time there was
    """
    if table.over is not None or table.is_running:
        return table
    for slot, seat in enumerate(table.slots):
        is_free = seat is None or seat.agent in late or seat.agent in table.gone
        if (is_free or (seat is not None and seat.agent in table.dead and seat.agent in expired)) and table.spares:
            spare, *rest = table.spares
            table = _seat(replace(table, spares=tuple(rest)), slot, spare)
    if table.empty() or any(seat.agent not in table.arrived for seat in table.seats()):
        return table
    agents = tuple(seat.agent for seat in table.seats())
    is_in_place = agents == table.formed and table.first != ""
    blames = 0 if not is_in_place else table.blames + 1 if table.blamed == table.first else 1
    table = replace(table, blamed=table.first if is_in_place else "", blames=blames, first="")
    if node_failures and blames >= node_failures and table.spares:
        bad = next(seat for seat in table.seats() if seat.node == table.blamed)
        return refuse(table, bad, f"its workers were the first to fail {blames} times in a row")
    return replace(
        table, is_running=True, generation=table.generation + 1, arrived=frozenset(), formed=agents, first=""
    )


# Going


def bury(table: SlotTable, agents: Collection[str], budget: int | None, *, is_goodbye: bool = False) -> SlotTable:
    """These agents are dead. Whoever works with them has to begin a new round."""
    spares = tuple(spare for spare in table.spares if spare.agent not in agents)
    hit = {
        seat.agent
        for seat in table.seats()
        if seat.agent in agents and seat.agent not in table.finished and seat.agent not in table.dead
    }
    if table.over is not None or (not hit and len(spares) == len(table.spares)):
        return table
    table = replace(
        table,
        spares=spares,
        dead=table.dead | hit,
        gone=table.gone | hit if is_goodbye else table.gone,
        arrived=table.arrived - hit,
    )
    if not hit or not table.is_running:
        return table
    if table.finished:
        return end(
            table, exit_status.REQUEUE, f"lost {_names(table, hit)} when other workers had ended; start the job again"
        )
    return _break(table, budget, first="")


def finish(table: SlotTable, agent: str) -> SlotTable:
    """The workers of this agent ended well."""
    if table.over is not None or table.seat_of(agent) is None:
        return table
    if not table.is_running:
        return end(table, exit_status.FAILED, "workers failed when others had ended well")
    table = replace(table, finished=table.finished | {agent})
    if all(seat.agent in table.finished for seat in table.seats()):
        return end(table, exit_status.DONE, "the job is done")
    return table


def refuse(table: SlotTable, who: Member, reason: str) -> SlotTable:
    """Put a node in quarantine: it may not take part in this job again."""
    if table.over is not None or who.node in table.quarantine:
        return table
    table = replace(table, quarantine={**table.quarantine, who.node: reason})
    return bury(table, {who.agent}, None, is_goodbye=True)


def count_workers(table: SlotTable, me: Member, workers: int) -> SlotTable:
    """Every node starts the same number of workers, or ranks would shift with the node that has a slot."""
    if table.workers == 0:
        return replace(table, workers=workers)
    if table.workers == workers:
        return table
    return refuse(table, me, f"it starts {workers} workers, the other nodes of the job {table.workers}")


def tell_to_leave(table: SlotTable, reason: str) -> SlotTable:
    """The workers are leaving by themselves; when they are gone the job is over."""
    return table if table.leaving or table.over is not None else replace(table, leaving=reason)


def end(table: SlotTable, code: int, reason: str) -> SlotTable:
    """Over, for everybody."""
    return table if table.over is not None else replace(table, over=Over(code, reason), is_running=False)


def give_up(table: SlotTable, waited: float) -> SlotTable:
    """Nobody came for slots that have no node."""
    if table.over is not None or table.is_running or table.spares or not table.empty():
        return table
    empty = table.empty()
    names = f"slot{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}"
    if table.generation == 0:
        came = len(table.slots) - len(empty)
        return end(
            table, exit_status.OUT_OF_SPARES, f"only {came} of {len(table.slots)} nodes joined within {waited:g} s"
        )
    return end(
        table,
        exit_status.OUT_OF_SPARES,
        f"out of spares: {names} lost its node, and no other joined within {waited:g} s",
    )


def _break(table: SlotTable, budget: int | None, first: str) -> SlotTable:
    """The round is over: everybody comes again."""
    restarts = table.restarts + 1
    table = replace(table, is_running=False, arrived=frozenset(), restarts=restarts, first=first)
    if budget is not None and restarts > budget:
        return end(table, exit_status.OUT_OF_RESTARTS, f"out of restarts: the job allows {budget}")
    return table


def _seat(table: SlotTable, slot: int, member: Member) -> SlotTable:
    before = table.slots[slot]
    slots = (*table.slots[:slot], member, *table.slots[slot + 1 :])
    out = set() if before is None or before.agent == member.agent else {before.agent}
    return replace(table, slots=slots, dead=table.dead - out, gone=table.gone - out, arrived=table.arrived - out)


def _names(table: SlotTable, agents: Collection[str]) -> str:
    return ", ".join(f"{seat} of slot {i}" for i, seat in enumerate(table.slots) if seat and seat.agent in agents)
