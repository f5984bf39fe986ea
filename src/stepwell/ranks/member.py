"""The other ranks, as the training process sees them: one door to the group, the line and what they decide.

Owns:    the group of the run, the line, and the order in which they are opened.
Not:     the decisions themselves (ranks), what this rank stores (share_rounds), checkpoints (checkpointer).
Holds:   alone, nothing here does anything. After opening nothing here waits, but for `save()` on the first verdict
         about who stores what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from stepwell import faults
from stepwell.errors import GroupError
from stepwell.events import journal
from stepwell.events.rank_events import NoAgent, PoliciesDiffer, RankLost
from stepwell.events.run_events import Event
from stepwell.ranks.agreement import Action, Agreement, Message
from stepwell.ranks.asked_saves import KINDS, Asked
from stepwell.ranks.groups.detect import choose_group
from stepwell.ranks.groups.group import Group, default_seconds
from stepwell.ranks.line.line import Line
from stepwell.ranks.share_rounds import ShareRounds
from stepwell.training.state.flatten import Flat, Leaf
from stepwell.training.state.roles import Role
from stepwell.types import Owner

Costs = tuple[float, float]
"""What a checkpoint takes from training, and until it is durable."""


class ThisRank(Protocol):
    """What the training process of this rank answers, and does, when other ranks say something."""

    def find_roles(self, leaves: Sequence[Leaf]) -> list[Role]:
        """How each leaf may be copied, and what it is."""
        ...

    def policies(self) -> list[Any]:
        """What it counts by."""
        ...

    def follow_policies(self, policies: list[Any]) -> None:
        """Count by rank 0's."""

    def is_within_step(self) -> bool:
        """A step has begun, and its end is still to come."""
        ...

    def on_late(self, step: int) -> None:
        """See `Agreement`."""

    def on_alone(self, step: int, repeat: int, by: int, missing: int) -> None:
        """Rank 0: not all ranks ask for this save."""

    def on_ended(self, step: int, repeat: int, missing: int) -> None:
        """Rank 0 ended such a save."""

    def on_costs(self, rank: int, costs: Costs) -> None:
        """Rank 0: what checkpoints cost another rank."""

    def on_leave(self) -> None:
        """Rank 0: another rank has to leave."""

    def on_rank_lost(self, rank: int) -> None:
        """It is gone."""

    def on_no_agent(self, rank: int) -> None:
        """It has no agent any more."""


class Together:
    """This rank among the others. Constructing only assigns; `open` is collective."""

    def __init__(self) -> None:
        self.group: Group = choose_group()
        self._log: journal.EventLog | None = None
        self._here: ThisRank | None = None
        self._is_open = False
        self._line: Line | None = None
        self._agreement: Agreement | None = None
        self._asked: Asked | None = None
        self._shared: ShareRounds | None = None
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

    def start(self, key: bytes, here: ThisRank, log: journal.EventLog) -> None:
        """All have restored: from here on they talk over the line, with the run's key. Collective."""
        if self.is_alone:
            return
        self._here, self._log = here, log
        self._line = line = Line(self.group, key, self._on_message, self._on_line_lost)
        self._agreement = Agreement(self.group.rank, self.group.size, self._line.send, here.on_late)
        self._asked = Asked(
            self.group.rank,
            self._line.send,
            lambda rank, message: line.send(message, to=rank),
            here.on_alone,
            ranks=self.group.size,
            is_within_step=here.is_within_step,
            seconds=default_seconds(),
        )
        self._shared = ShareRounds(self.group.rank, self.group.size, self._line.send_large, here.find_roles, self._emit)
        self._line.open()
        self._compare_policies(here)
        self.group.rest()

    def _compare_policies(self, here: ThisRank) -> None:
        """Ranks that count by different policies would never checkpoint the same step. Collective."""
        told = self.group.all_gather(here.policies(), "the policies")
        if told[self.group.rank] != told[0]:
            here.follow_policies(told[0])
        for rank, policies in enumerate(told if self.group.is_leader else ()):
            for name, first, other in zip(("policy", "memory"), told[0], policies, strict=True):
                if other != first:
                    self._emit(PoliciesDiffer(of_rank=rank, name=name, other=other[0], first=first[0]))

    def close(self) -> None:
        """Let go of the others."""
        if self._shared is not None:
            self._shared.close()
        if self._line is not None:
            self._line.close()
        self.group.close()

    def _emit(self, event: Event) -> None:
        if self._log is not None:
            self._log.emit(event)

    # -- when ---------------------------------------------------------------------------------------------------------

    def pass_step(self, step: int, *, wishes: Iterable[Action], is_busy: Callable[[], bool]) -> set[Action]:
        """What is to be done after this step: alone what is wished for, else what was planned.

        is_busy:  a checkpoint is under way: with many ranks the next one is planned when they all have room again
        """
        if self._agreement is None:
            return set(wishes)
        wishes = [wish for wish in wishes if wish is Action.LEAVE or not is_busy()]
        if self._shared is not None and self._shared.is_torn:
            wishes.insert(0, Action.LOOK_AGAIN)
        if self._asked is not None:
            self._asked.pass_step(step)
        return self._agreement.pass_step(step, wishes=wishes)

    def ask(self, step: int, repeat: int) -> None:
        """This rank takes a save that all ranks are to ask for; see `Asked`."""
        if self._asked is not None:
            self._asked.ask(step, repeat)

    def explain(self, step: int, repeat: int) -> tuple[Callable[[float], str], float]:
        """For who waits for a save that was asked for: which ranks have not, and how often to look; see `Asked`."""
        asked = self._asked
        assert asked is not None
        return lambda waited: asked.explain(step, repeat, waited), asked.slice_seconds

    def tell_ended(self, step: int, repeat: int, missing: int) -> None:
        """Rank 0: a save that not all ranks asked for is void; whoever waits for it need not."""
        assert self._line is not None and self._here is not None
        self._line.send({"type": "ended", "step": step, "repeat": repeat, "missing": missing})
        self._here.on_ended(step, repeat, missing)

    def end_asking(self) -> None:
        """This rank asks for no save any more."""
        if self._asked is not None:
            self._asked.end()

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
        """See `ShareRounds`. Alone it is all of the state."""
        return flat if self._shared is None else self._shared.cut(flat, step, block=block)

    def gate(self) -> float:
        """Nobody may change what the ranks are told of: see `ShareRounds`. Returns the seconds it waited."""
        return 0.0 if self._shared is None else self._shared.gate()

    def look(self) -> None:
        """The training thread is between two operations. No wait."""
        if self._shared is not None:
            self._shared.look()

    def look_again(self) -> None:
        """See `ShareRounds`."""
        if self._shared is not None:
            self._shared.look_again()

    # -- the line's thread --------------------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Message) -> None:
        kind = message["type"]
        assert self._here is not None
        if kind in ("claims", "shares"):
            assert self._shared is not None
            self._shared.hear(rank, message)
        elif kind == "costs":
            self._here.on_costs(rank, tuple(message["costs"]))
        elif kind == "leave":
            self._here.on_leave()
        elif kind == "no agent":
            self._hear_no_agent(message, self._here)
        elif kind == "ended":
            self._here.on_ended(message["step"], message["repeat"], message["missing"])
        elif kind in KINDS:
            if self._asked is not None:
                self._asked.on_message(rank, message)
        elif self._agreement is not None:
            self._agreement.on_message(rank, message)

    def _hear_no_agent(self, message: Message, here: ThisRank) -> None:
        assert self._line is not None
        if self.group.is_leader:
            self._line.send(message)  # to all: the others have no line to each other
        if message["rank"] != self.group.rank:
            self._emit(NoAgent(of_rank=message["rank"]))
            here.on_no_agent(message["rank"])

    def _on_line_lost(self, rank: int) -> None:
        """It died, or its machine: the launcher ends us, or training does. Nobody waits for it here."""
        self._lost.append(rank)
        if self._shared is not None:
            self._shared.lose(GroupError(self._lost_text(), missing=self._lost, operation="sharing the state"))
        self._emit(RankLost(rank=rank, host=self._host_of(rank)))
        assert self._here is not None
        self._here.on_rank_lost(rank)

    def _host_of(self, rank: int) -> str | None:
        return self.group.hosts[rank] if self.group.hosts else None

    def _lost_text(self) -> str:
        return f"{RankLost(rank=self._lost[0], host=self._host_of(self._lost[0])).text()}; start all ranks again"
