"""What this rank stores of the state: the rounds in which the ranks tell what they hold and hear who stores what.

Owns:    the rounds, what rank 0 has heard in them, and the verdict by which states are cut.
Not:     the verdict itself (ranks.sharing), cutting (state.share), the line (together).
Holds:   in one round are claims of one step. The training thread hashes and encodes nothing, unless it would wait for
         that at the gate. Nothing here waits, but the gate for the look at what the optimizers will change, and a
         `save()` for the verdict.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stepwell.errors import GroupError, PersistError
from stepwell.events.rank_events import Sharing
from stepwell.ranks.claims import NO_DIGEST, Claims, Form, Heard, Listener, Message
from stepwell.ranks.groups.group import default_seconds
from stepwell.ranks.share_verdict import ShareVerdict
from stepwell.ranks.sharing import share
from stepwell.training.snapshot.digests import Reading
from stepwell.training.state.flatten import Flat, Leaf
from stepwell.training.state.roles import Role
from stepwell.training.state.shards import is_only_here
from stepwell.training.state.share import OWN, Cutter, content_of, describe

_TORN_SECONDS: Final = 3.0
"""After this long without a word the ranks that have not told what they hold will not do so by themselves."""
_AGAIN_SECONDS: Final = 30.0
"""How long a save waits for another verdict: the ranks may hold it up themselves, by not changing alike."""


class _Round:
    """Rank 0: what was heard in one round so far."""

    def __init__(self) -> None:
        self.heard: dict[int, Heard] = {}
        self.listener = Listener()
        self.is_torn = False
        """Something changed while a rank looked at it."""


class ShareRounds:
    """The part of one rank. Constructing only assigns.

    send:      hands a message to rank 0, from there to one rank or all; never waits; and whom to tell if it is too long
    on_agreed: rank 0 only: told of each verdict
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[Message, Callable[[GroupError], None], int | None], None],
        find_roles: Callable[[Sequence[Leaf]], list[Role]],
        on_agreed: Callable[[Sharing], None],
    ) -> None:
        self._rank, self._size, self._send = rank, size, send
        self._find_roles, self._on_agreed = find_roles, on_agreed
        self._changed = threading.Condition()
        self._form: object = None
        self._round = 0
        self._claims: Claims | None = None
        """What this rank has told in this round."""
        self._reading: Reading | None = None
        self._restless: set[str] = set()
        self._is_asked_again = False
        self._heard: dict[int, _Round] = {}
        self._torn_at = 0.0
        self._cutters: dict[int, Cutter] = {}
        """By round: the one of the last verdict."""
        self._lost: GroupError | None = None

    # -- the training thread ------------------------------------------------------------------------------------------

    def cut(self, flat: Flat, step: int, *, block: bool = False) -> Flat | None:
        """What this rank stores of the state. None while the ranks have not agreed on that; with `block` it waits."""
        self._claim(flat, step)
        if block:
            self.gate()
        else:
            self.look()
        with self._changed:
            seconds = min(_AGAIN_SECONDS, default_seconds()) if self._cutters else default_seconds()
            if block and not self._changed.wait_for(lambda: self._is_settled, seconds):
                raise PersistError(f"the ranks did not agree within {seconds:g} s on who stores what")
            if self._round not in self._cutters:
                if self._lost is not None:
                    raise self._lost
                return None
            cutter = self._cutters[self._round]
        return cutter.cut(flat)

    def gate(self) -> float:
        """Nobody may change what is being looked at for the other ranks. Returns the seconds it waited."""
        if self._reading is None:
            return 0.0
        started = time.monotonic()
        self._reading.gate()
        return time.monotonic() - started

    def look(self) -> None:
        """The training thread is between two operations. No wait."""
        if self._reading is not None:
            self._reading.look()

    def look_again(self) -> None:
        """What was shared has drifted apart: the next cut is by a new verdict. All ranks at the same step."""
        self._form = None

    def close(self) -> None:
        """Nothing is told any more."""
        if self._reading is not None:
            self._reading.close()

    @property
    def is_torn(self) -> bool:
        """Rank 0: all ranks have to tell what they hold once more, at one step.

        Some have told it and the others do not, or something changed while a rank looked.
        """
        with self._changed:
            return self._is_asked_again or (bool(self._heard) and time.monotonic() > self._torn_at)

    @property
    def _is_settled(self) -> bool:
        return self._round in self._cutters or self._lost is not None

    def _claim(self, flat: Flat, step: int) -> None:
        """Begin to look at what this rank holds, when that is not what it was."""
        held = [leaf for leaf in flat.leaves if leaf.path[0] != OWN]
        form = [(leaf.name, leaf.dtype, leaf.local.shape, leaf.local.stride(), leaf.box) for leaf in held]
        if form == self._form:
            return
        if self._reading is not None:
            self._reading.drop()
        with self._changed:
            number = self._round = max(self._round + 1, step << 8)
            self._claims, self._is_asked_again = None, False
        pairs = list(zip(held, self._find_roles(held), strict=True))
        self._reading = Reading(lambda found, changed: self._tell(number, pairs, found, changed))
        self._reading.begin([(leaf, role) for leaf, role in pairs if not self._is_only_here(leaf)], self._restless)
        self._form = form

    def _is_only_here(self, leaf: Leaf) -> bool:
        return leaf.origin is not None and bool(leaf.local.numel()) and is_only_here(leaf.origin, self._size)

    # -- the thread of a reading --------------------------------------------------------------------------------------

    def _tell(
        self, number: int, pairs: Sequence[tuple[Leaf, Role]], found: Mapping[str, str], changed: Sequence[str]
    ) -> None:
        """Tell rank 0 what this rank held. What changed meanwhile counts as its own until all ranks look again."""
        claims = Claims.of(
            {
                leaf.name: (
                    Form(*describe(leaf), role.protection == "frozen"),
                    content_of(leaf, found[leaf.name]) if leaf.name in found else NO_DIGEST,
                )
                for leaf, role in pairs
            }
        )
        message = {"type": "claims", "round": number, "again": bool(changed), **claims.dump()}
        with self._changed:
            self._restless.update(changed)
            if number != self._round:
                return
            self._claims = claims
        if self._rank:
            self._send(message, self.lose, None)
        else:
            self.hear(0, message)

    # -- the line's thread --------------------------------------------------------------------------------------------

    def hear(self, rank: int, message: Message) -> None:
        """A message of this module. Raises ValueError for one that is none."""
        if message["type"] == "claims":
            self._hear_claims(rank, message)
        else:
            self._settle(message["round"], ShareVerdict.load(message))

    def lose(self, error: GroupError) -> None:
        """A rank is gone: there will be no other verdict."""
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def _hear_claims(self, rank: int, message: Message) -> None:
        number = message["round"]
        with self._changed:
            self._torn_at = time.monotonic() + _TORN_SECONDS
            here = self._heard.setdefault(number, _Round())
            here.heard[rank] = here.listener.hear(message)
            here.is_torn |= bool(message["again"])
            for other in [other for other in self._heard if other < number]:  # left behind by this rank
                self._heard[other].heard.pop(rank, None)
                if not self._heard[other].heard:
                    del self._heard[other]
            if len(here.heard) < self._size:
                return
            self._heard = {other: found for other, found in self._heard.items() if other > number}
            self._is_asked_again = here.is_torn
        verdicts = share([here.heard[other] for other in range(self._size)])
        own, count = verdicts[0].own_count, len(here.heard[0].names)
        self._on_agreed(Sharing(ranks=self._size, shared=count - own, own=own))
        self._answer(number, verdicts)
        self._settle(number, verdicts[0])

    def _answer(self, number: int, verdicts: Sequence[ShareVerdict]) -> None:
        """What is the same for several ranks is made once, and what is the same for all is sent as one message."""
        if all(verdict is verdicts[0] for verdict in verdicts):
            self._send({"type": "shares", "round": number, **verdicts[0].dump()}, self.lose, None)
            return
        made: dict[int, Message] = {}
        for rank, verdict in enumerate(verdicts[1:], 1):
            if id(verdict) not in made:
                made[id(verdict)] = {"type": "shares", "round": number, **verdict.dump()}
            self._send(made[id(verdict)], self.lose, rank)

    def _settle(self, number: int, verdict: ShareVerdict) -> None:
        with self._changed:
            if number != self._round or self._claims is None:
                return  # of a round that this rank has left behind
            self._cutters = {number: Cutter(verdict.rows(self._claims, self._rank), verdict.partners)}
            self._changed.notify_all()
