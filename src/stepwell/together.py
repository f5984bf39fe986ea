"""The other ranks, as the training process sees them: one door to the group, the line and what they decide.

Owns:    the group of the run, the line, and the order in which they are opened; what this rank stores.
Not:     the decisions themselves (ranks), checkpoints (checkpointer).
Holds:   alone, nothing here does anything. After opening nothing here waits, but for `save()` on the first verdict
         about who stores what.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stepwell import faults, journal
from stepwell.errors import GroupError, PersistError
from stepwell.events import Event
from stepwell.groups.choose import choose_group
from stepwell.groups.group import Group, default_seconds
from stepwell.groups.line import Line
from stepwell.ranks.agreement import Agreement, Message
from stepwell.ranks.events import NoAgent, RankLost, Sharing
from stepwell.ranks.sharing import Claim, Shares, share
from stepwell.snapshot.guard import content_digest
from stepwell.state.flatten import Flat, Leaf
from stepwell.state.share import OWN, Cutter, describe
from stepwell.types import Owner

Costs = tuple[float, float]
"""What a checkpoint takes from training, and until it is durable."""
_TORN_SECONDS: Final = 3.0
"""After this long without a word the ranks that have not told what they hold will not do so by themselves."""
_AGAIN_SECONDS: Final = 30.0
"""How long a save waits for another verdict: the ranks may hold it up themselves, by not changing alike."""


class Together:
    """This rank among the others. Constructing only assigns; `open` is collective.

    on_late:   see `Agreement`
    on_costs:  told what checkpoints cost another rank (rank 0 only)
    on_leave:  another rank was told to leave (rank 0 only)
    """

    def __init__(
        self,
        on_late: Callable[[int], None],
        on_costs: Callable[[int, Costs], None],
        on_leave: Callable[[], object],
    ) -> None:
        self.log: journal.EventLog | None = None
        self.find_still: Callable[[Sequence[Leaf]], set[str]] = lambda leaves: set()
        self.on_lost: Callable[[int], None] = lambda rank: None
        self.on_no_agent: Callable[[int], None] = lambda rank: None
        self._on_late, self._on_costs, self._on_leave = on_late, on_costs, on_leave
        self.group: Group = choose_group()
        self._is_open = False
        self._line: Line | None = None
        self._agreement: Agreement | None = None
        self._changed = threading.Condition()
        self._form: object = None
        self._round = 0
        self._claims: dict[int, dict[int, dict[str, Claim]]] = {}
        self._torn_at = 0.0
        self._shares: dict[int, Shares] = {}
        self._cutter: tuple[int, Cutter] | None = None
        self._lost: list[int] = []

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank."""
        return self.group.size == 1

    @property
    def is_broken(self) -> bool:
        """Whether a rank was lost: this run ends, and begins again with all of them."""
        return bool(self._lost)

    @property
    def owner(self) -> Owner:
        """This rank, as records name it."""
        return Owner(self.group.rank, self.group.size)

    def open(self) -> Group:
        """Meet the others. Collective."""
        if not self._is_open:
            self._is_open = True
            faults.set_rank(self.group.rank)
            self.group.open()
        return self.group

    def start(self) -> None:
        """All have restored: from here on they talk over the line. Collective."""
        if self.is_alone:
            return
        self._line = Line(self.group, self._on_message, self._on_line_lost)
        self._agreement = Agreement(self.group.rank, self.group.size, self._line.send, self._on_late)
        self._line.open()

    def close(self) -> None:
        """Let go of the others."""
        if self._line is not None:
            self._line.close()
        self.group.close()

    def _emit(self, event: Event) -> None:
        if self.log is not None:
            self.log.emit(event)

    # -- when ---------------------------------------------------------------------------------------------------------

    def pass_step(self, step: int, *, wishes: Iterable[str], is_busy: Callable[[], bool]) -> set[str]:
        """What is to be done after this step: alone what is wished for, else what was planned.

        is_busy:  a checkpoint is under way: with many ranks the next one is planned when they all have room again
        """
        if self._agreement is None:
            return set(wishes)
        wishes = [wish for wish in wishes if wish == "leave" or not is_busy()]
        if self._is_torn():
            wishes.insert(0, "look again")
        return self._agreement.pass_step(step, wishes=wishes)

    def tell_ready(self, is_ready: bool) -> None:
        """See `Agreement`."""
        if self._agreement is not None:
            self._agreement.tell_ready(is_ready)

    def ask_to_leave(self) -> None:
        """See `Agreement`."""
        if self._agreement is not None:
            self._agreement.ask_to_leave()

    def tell_costs(self, costs: Costs) -> None:
        """What checkpoints cost this rank: the interval follows the slowest."""
        if self._line is not None and not self.group.is_leader:
            self._line.send({"type": "costs", "costs": costs})

    def tell_no_agent(self) -> None:
        """This rank will write nothing any more: nobody is to wait for its parts."""
        if self._line is not None:
            self._line.send({"type": "no agent", "rank": self.group.rank})

    # -- what this rank stores ----------------------------------------------------------------------------------------

    def cut(self, flat: Flat, step: int, *, block: bool = False) -> Flat | None:
        """What this rank stores of the state. None while the ranks have not agreed on that; with `block` it waits."""
        if self._line is None:
            return flat
        self._claim(flat, step)
        with self._changed:
            seconds = min(_AGAIN_SECONDS, default_seconds()) if self._shares else default_seconds()
            if block and not self._changed.wait_for(lambda: self._is_settled(), seconds):
                raise PersistError(f"the ranks did not agree within {seconds:g} s on who stores what")
            if self._lost and self._round not in self._shares:
                raise GroupError(f"rank {self._lost[0]} is gone", missing=self._lost, operation="sharing the state")
            if self._round not in self._shares:
                return None
            if self._cutter is None or self._cutter[0] != self._round:
                self._cutter = (self._round, Cutter(self._shares[self._round]))
        return self._cutter[1].cut(flat)

    def look_again(self) -> None:
        """What was shared has drifted apart: the next cut is by a new verdict. All ranks at the same step."""
        self._form = None

    def _is_settled(self) -> bool:
        return self._round in self._shares or bool(self._lost)

    def _is_torn(self) -> bool:
        """Rank 0: some have told what they hold, and the others do not. They all do so again, at one step."""
        with self._changed:
            return bool(self._claims) and time.monotonic() > self._torn_at

    def _claim(self, flat: Flat, step: int) -> None:
        """Tell rank 0 what this rank holds, when that is not what it was. In one round are claims of one step."""
        form = [(leaf.name, leaf.dtype, leaf.local.shape, leaf.box) for leaf in flat.leaves if leaf.path[0] != OWN]
        if form == self._form:
            return
        assert self._line is not None
        self._form = form
        self._round = max(self._round + 1, step << 8)
        found = {leaf.name: describe(leaf, content_digest) for leaf in flat.leaves if leaf.path[0] != OWN}
        still = self.find_still(flat.leaves)
        claims = {name: Claim(*facts, is_still=name in still) for name, facts in found.items()}
        if self.group.is_leader:
            self._hear_claims(0, self._round, claims)
        else:
            leaves = {name: claim.dump() for name, claim in claims.items()}
            self._line.send({"type": "claims", "round": self._round, "leaves": leaves})

    def _hear_claims(self, rank: int, number: int, claims: dict[str, Claim]) -> None:
        assert self._line is not None
        with self._changed:
            self._torn_at = time.monotonic() + _TORN_SECONDS
            heard = self._claims.setdefault(number, {})
            heard[rank] = claims
            if len(heard) < self.group.size:
                return
            self._claims = {other: parts for other, parts in self._claims.items() if other > number}
        verdict = share([heard[rank] for rank in range(self.group.size)])
        self._emit(_sharing(verdict, heard[0]))
        for other in range(1, self.group.size):
            self._line.send({"type": "shares", "round": number, "rows": verdict[other]}, to=other)
        self._settle(number, verdict[0])

    def _settle(self, number: int, shares: Shares) -> None:
        with self._changed:
            self._shares = {number: shares}
            self._changed.notify_all()

    # -- the line's thread --------------------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "claims":
            claims = {name: Claim.load(values) for name, values in message["leaves"].items()}
            self._hear_claims(rank, message["round"], claims)
        elif kind == "shares":
            self._settle(
                message["round"], {name: (first, last, who) for name, (first, last, who) in message["rows"].items()}
            )
        elif kind == "costs":
            self._on_costs(rank, tuple(message["costs"]))
        elif kind == "leave":
            self._on_leave()
        elif kind == "no agent":
            self._hear_no_agent(message)
        elif self._agreement is not None:
            self._agreement.on_message(rank, message)

    def _hear_no_agent(self, message: Message) -> None:
        assert self._line is not None
        if self.group.is_leader:
            self._line.send(message)  # to all: the others have no line to each other
        if message["rank"] != self.group.rank:
            self._emit(NoAgent(of_rank=message["rank"]))
            self.on_no_agent(message["rank"])

    def _on_line_lost(self, rank: int) -> None:
        """It died, or its machine: the launcher ends us, or training does. Nobody waits for it here."""
        with self._changed:
            self._lost.append(rank)
            self._changed.notify_all()
        self._emit(RankLost(rank=rank))
        self.on_lost(rank)


def _sharing(verdict: Sequence[Shares], claims: dict[str, Claim]) -> Sharing:
    shared = sum(name in verdict[0] for name in claims)
    return Sharing(ranks=len(verdict), shared=shared, own=len(claims) - shared)
