"""Every message between trainer and agent: what it says, who says it to whom (its base class), and the version.

Not:     how it becomes JSON and comes back (message), framing and descriptors (channel).
Holds:   a field with a default is left out of the JSON where it has it, so old agents read what new trainers say.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Final

from stepwell.handover.message import Encoded, FromClient, Message, ToAgent, ToHolder, ToSuccessor, ToTrainer
from stepwell.types import CodedPlace, Keep, OfferedArena, OfferedSnapshot, SaveRequest, quick_dataclass

PROTOCOL: Final = 2
"""Who asks for the memory of a dead trainer says it: the agent may be of another version of stepwell."""


@quick_dataclass(frozen=True)
class Hello(ToAgent, kind="hello"):
    """What an agent has to know of the run. It answers `Ready`.

    agents:    where successors look for it; empty: nowhere
    restored:  directory of the checkpoint that the trainer goes on from; empty if there is none
    linger:    seconds to wait for a successor; storage, patience: for a shared place that fails, for other ranks
    """

    pid: int
    run: str
    root: str
    lineage: int
    rank: int
    world_size: int
    agents: str
    keep: Keep
    linger: float
    patience: float
    restored: str = ""
    storage: float = 120.0
    levels: dict[str, Any] | None = None
    deltas: dict[str, Any] | None = None


@quick_dataclass(frozen=True)
class Serve(ToAgent, kind="serve"):
    """Let other nodes read this one's cache, at the socket whose descriptor comes along."""

    root: str
    run: str
    secret: str = field(repr=False)
    tls: str | None


@quick_dataclass(frozen=True)
class NewArena(ToAgent, OfferedArena, kind="arena"):
    """An arena, whose descriptor comes along."""


@quick_dataclass(frozen=True)
class NewLayout(ToAgent, kind="layout"):
    """The leaves that stay the same from snapshot to snapshot; these refer to it by `id`.

    is_partial:  it describes what goes beside symbols
    """

    id: int
    nbytes: int
    frozen_bytes: int
    leaves: Encoded | tuple[dict[str, Any], ...]
    versions: dict[str, str]
    elsewhere: tuple[dict[str, Any], ...] | None = None
    partners: tuple[int, ...] | None = None
    is_partial: bool = False


@quick_dataclass(frozen=True)
class Begin(ToAgent, kind="begin"):
    """A snapshot whose bytes are about to arrive in a slot.

    frozen:   number of the frozen image that belongs to it; 0: nothing is frozen
    copies:   digests of what other ranks hold copies of
    coded:    parts that records after this base will bring coded; symbols: this one is such a record
    written:  an agent before this one has written it
    """

    request: SaveRequest
    sequence: int
    slot: int
    generation: int
    layout: int
    frozen: int
    copies: dict[str, str] | None = None
    coded: tuple[int, ...] = ()
    symbols: CodedPlace | None = None
    written: bool = False


class StreamBegin(Begin, kind="stream"):
    """A snapshot that comes through small chunks, while training stands still."""


@quick_dataclass(frozen=True)
class StreamChunk(ToAgent, kind="chunk"):
    """The next bytes are in this slot. The agent answers `ChunkDone`."""

    sequence: int
    slot: int
    nbytes: int


@quick_dataclass(frozen=True)
class StreamEnd(ToAgent, kind="stream_end"):
    """All chunks were sent. suspects: how many leaves are not finite; first: the number of the first of them."""

    sequence: int
    suspects: int
    first: int


@quick_dataclass(frozen=True)
class NoPart(ToAgent, kind="void"):
    """This rank has no part in a checkpoint: the others are not to wait for it."""

    step: int
    repeat: int
    reason: str


@quick_dataclass(frozen=True)
class BaseTaken(ToAgent, kind="taken"):
    """The base of a chain has been read out of its slot."""

    sequence: int


class MakeRoom(ToAgent, kind="make_room"):
    """A snapshot waits for a slot."""


class Ping(ToAgent, kind="ping"):
    """Are you there? Answered by `Pong`."""


@quick_dataclass(frozen=True)
class Close(ToAgent, kind="close"):
    """The run ends: finish what is complete within this time."""

    seconds: float


@quick_dataclass(frozen=True)
class OfSnapshot(ToTrainer):
    """What is said of the snapshot with this number."""

    sequence: int


@quick_dataclass(frozen=True)
class Released(OfSnapshot, kind="released"):
    """Its slot is free. is_over: nothing more will be said of it."""

    is_over: bool


@quick_dataclass(frozen=True)
class Durable(OfSnapshot, kind="durable"):
    """It is a checkpoint. degraded: why other nodes do not protect it."""

    step: int
    directory: str
    seconds: float
    degraded: str | None = None


@quick_dataclass(frozen=True)
class WriteFailed(OfSnapshot, kind="failed"):
    """It could not be written. final: it is not tried again. drift: the ranks' copies are not the same any more."""

    step: int
    lineage: int
    error: str
    final: bool
    fenced: bool = False
    void: bool = False
    drift: bool = False


@quick_dataclass(frozen=True)
class Rebased(OfSnapshot, kind="rebased"):
    """A chain has begun at it, and its slot is kept until `BaseTaken`."""

    base: str


class ChunkDone(OfSnapshot, kind="chunk_done"):
    """A chunk of it is written: its slot may be filled again."""


@quick_dataclass(frozen=True)
class OfStep(ToTrainer):
    """What is said of a step."""

    step: int


class Flushed(OfStep, kind="flushed"):
    """Its checkpoint is in the shared place."""


class DeltaAppended(OfStep, kind="delta"):
    """Its record is in a chain."""


@quick_dataclass(frozen=True)
class Voided(OfStep, kind="voided"):
    """The other ranks know that this one has no part in that checkpoint."""

    repeat: int


@quick_dataclass(frozen=True)
class GivesUp(ToTrainer, kind="gives_up"):
    """The agent is about to let the other ranks know; another agent would have to."""

    void: NoPart


@quick_dataclass(frozen=True)
class ChainOver(ToTrainer, kind="chain_over"):
    """No more records go into the chain of this base."""

    base: str


@quick_dataclass(frozen=True)
class BaseWanted(ToTrainer, kind="base_due"):
    """There is no chain to append to: the next snapshot is to be a checkpoint."""

    reason: str


@quick_dataclass(frozen=True)
class Ready(ToTrainer, kind="ready"):
    """The answer to `Hello`."""

    pid: int


class Pong(ToTrainer, kind="pong"):
    """The answer to `Ping`."""


class Bye(ToTrainer, kind="bye"):
    """The last message."""


@quick_dataclass(frozen=True)
class Replaced(FromClient):
    """There is another agent, which was told of all that is not durable."""

    pid: int


class Lost(FromClient):
    """There is no agent any more, and there will be none."""


@quick_dataclass(frozen=True)
class Peek(ToHolder, kind="peek"):
    """What do you hold? Another rank asks; it will not be the trainer."""

    protocol: int
    pid: int


class Adopt(Peek, kind="adopt"):
    """What do you hold? The process that asks will be the trainer, once it has said `Hello`."""


@quick_dataclass(frozen=True)
class Offer(ToSuccessor, kind="offer"):
    """What an agent holds, the newest first."""

    agent: int
    snapshots: tuple[OfferedSnapshot, ...] = ()
    arena: OfferedArena | None = None


@quick_dataclass(frozen=True)
class NoOffer(ToSuccessor, kind="refused"):
    """Why there is no offer. trainer: the process that the agent serves."""

    reason: str
    trainer: int = 0


KINDS: Final = Message.kinds
"""All that travel, by what they are called there."""
