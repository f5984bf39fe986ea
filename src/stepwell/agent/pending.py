"""One snapshot on its way through the agent: what it was taken for, how far it is, and the layout of its bytes.

Not:     which one comes next, and which one makes room (queue).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stepwell.handover.memory import FROZEN, Arena
from stepwell.handover.message import Encoded
from stepwell.handover.protocol import Begin, NewLayout
from stepwell.storage.format.record import LeafEntry, Record, load_absent
from stepwell.types import CheckpointId, Owner, SaveRequest

_POLL_SECONDS: Final = 0.0015
_LAYOUTS: Final = 2


class AbandonedError(Exception):
    """A snapshot that was being written ahead of its completion came to nothing. No failure: nobody was promised it."""


@dataclass(frozen=True)
class AgentLayout:
    """The part of a record that stays the same from snapshot to snapshot."""

    number: int
    nbytes: int
    frozen_bytes: int
    leaves: tuple[LeafEntry, ...]
    versions: dict[str, str]
    elsewhere: tuple[LeafEntry, ...] | None = None
    partners: tuple[int, ...] = ()

    @classmethod
    def from_message(cls, message: NewLayout) -> AgentLayout:
        """As the trainer sent it."""
        assert not isinstance(message.leaves, Encoded), "it did not travel"
        absent = message.elsewhere
        return cls(
            message.id,
            message.nbytes,
            message.frozen_bytes,
            tuple(_leaf(**leaf) for leaf in message.leaves),
            message.versions,
            None if absent is None else tuple(load_absent(item, "the trainer") for item in absent),
            message.partners or (),
        )


def _leaf(**fields: Any) -> LeafEntry:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return LeafEntry(**values)


class Layouts:
    """The newest of each kind, and the one before. A state that changes its form brings one with each snapshot.

    A snapshot refers to the newest of its kind when it is announced, and keeps it.
    """

    def __init__(self) -> None:
        self._of_kind: dict[bool, dict[int, AgentLayout]] = {}

    def add(self, message: NewLayout) -> None:
        """As the trainer sent it. One that is partial describes what goes beside symbols."""
        known = self._of_kind.setdefault(message.is_partial, {})
        known[message.id] = AgentLayout.from_message(message)
        for number in sorted(known)[:-_LAYOUTS]:
            del known[number]

    def __getitem__(self, number: int) -> AgentLayout:
        return {**self._of_kind.get(False, {}), **self._of_kind.get(True, {})}[number]

    def __len__(self) -> int:
        return sum(map(len, self._of_kind.values()))


class Purpose(enum.Enum):
    """What the trainer took a snapshot for."""

    CHECKPOINT = enum.auto()
    MEMORY = enum.auto()
    """It waits for a successor, until a newer one is complete."""
    DELTA = enum.auto()
    """The same, and what changed goes into a chain."""
    CODED_DELTA = enum.auto()
    """What changed came coded: then it is no state, and no other record can take its place."""

    @classmethod
    def of(cls, begin: Begin) -> Purpose:
        """As the trainer announced it."""
        if begin.symbols is not None:
            return cls.CODED_DELTA
        if begin.request.delta:
            return cls.DELTA
        return cls.CHECKPOINT if begin.request.durable else cls.MEMORY


class Stage(enum.Enum):
    """How far a snapshot is. ARRIVING and COMPLETE are read from the arena, where the trainer writes them."""

    ARRIVING = enum.auto()
    COMPLETE = enum.auto()
    WRITTEN = enum.auto()
    """This rank's part is durable, and those of others are waited for."""
    COMMITTED = enum.auto()
    GIVEN_UP = enum.auto()
    """Its write failed for good."""
    DROPPED = enum.auto()
    """It left the queue: who writes it ahead of its completion is to stop. A successor may want it all the same."""


OVER: Final = (Stage.COMMITTED, Stage.GIVEN_UP)
"""Nothing more is done for it."""


@dataclass(eq=False)
class Pending:
    """One snapshot on its way, as `begin` announced it.

    is_wanted:  it is to be written. Not a purpose: at the death of a trainer, what it only kept in memory, or for a
                chain, is written too, and goes into its chain all the same
    is_coded:   it went into its chain, at whatever stage
    is_held:    it is being read for a chain: its slot is not free, whatever became of it
    """

    run: str
    id: CheckpointId
    owner: Owner
    arena: Arena
    layout: AgentLayout
    begin: Begin
    failures: int = 0
    not_before: float = 0.0
    record: Record | None = None
    written_at: float | None = None
    """Since when this rank's part is durable."""
    ended: Stage | None = None
    """COMMITTED, GIVEN_UP or DROPPED."""
    is_coded: bool = False
    is_held: bool = False

    def __post_init__(self) -> None:
        self.sequence, self.slot = self.begin.sequence, self.begin.slot
        self.purpose, self.is_wanted = Purpose.of(self.begin), self.begin.request.durable

    @property
    def request(self) -> SaveRequest:
        """What the trainer wants of it."""
        return self.begin.request

    @property
    def stage(self) -> Stage:
        """How far it is now."""
        if self.ended is not None:
            return self.ended
        if self.written_at is not None:
            return Stage.WRITTEN
        return Stage.COMPLETE if self.is_complete else Stage.ARRIVING

    @property
    def is_over(self) -> bool:
        """Nothing more is done for it."""
        return self.ended in OVER

    @property
    def is_delta(self) -> bool:
        """What changed goes into a chain."""
        return self.purpose in (Purpose.DELTA, Purpose.CODED_DELTA)

    @property
    def is_symbols(self) -> bool:
        """That came coded."""
        return self.purpose is Purpose.CODED_DELTA

    @property
    def is_complete(self) -> bool:
        """All bytes and the guard's verdict are in memory, the frozen image included."""
        frozen = self.begin.frozen
        return self.arena.is_complete(self.slot, self.sequence) and (
            not frozen or self.arena.is_complete(FROZEN, frozen)
        )

    @property
    def is_unfinished(self) -> bool:
        """Neither complete nor written: without its trainer it comes to nothing."""
        return self.written_at is None and not self.is_complete

    @property
    def is_void(self) -> bool:
        """The guard threw it away."""
        return self.arena.is_void(self.slot, self.sequence)

    @property
    def has_begun(self) -> bool:
        """Some of its bytes are final, and nothing speaks against it so far."""
        is_dropped = self.ended is Stage.DROPPED
        return not self.failures and not is_dropped and not self.is_void and self._ready_bytes() > 0

    def _ready_bytes(self) -> int:
        if self.is_complete:
            return self.layout.nbytes
        return self.arena.filled(self.slot, self.sequence)

    def arrive(self, nbytes: int) -> float:
        """Wait until so many leading bytes are final; returns for how long. Raises AbandonedError if they never are."""
        return self._wait(lambda: self._ready_bytes() >= nbytes)

    def wait_complete(self) -> None:
        """Wait until it counts. Raises AbandonedError if it does not."""
        self._wait(lambda: self.is_complete)

    def _wait(self, is_there: Callable[[], bool]) -> float:
        if is_there():
            return 0.0
        started = time.monotonic()
        while not is_there():
            if self.ended is Stage.DROPPED or self.is_void:
                raise AbandonedError
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - started

    def suspect(self) -> str | None:
        """Name of the first non-finite leaf, if any."""
        found = self.arena.suspects(self.slot)
        if not found.leaves:
            return None
        name = self.layout.leaves[found.first].name if found.first < len(self.layout.leaves) else "?"
        return f"{found.leaves} non-finite, first {name}"
