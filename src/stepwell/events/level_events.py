"""What happens to checkpoints on their way through the levels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class LevelsChosen(Event):
    """Nobody gave `levels=`, and the nodes have caches: where checkpoints go first, and what was measured for it.

    The seconds are of the slowest rank, for `nbytes` of each; None: that place could not be written.
    """

    level: ClassVar[int] = logging.INFO
    first: str
    nbytes: int
    node_seconds: float | None
    shared_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class ProtectionDiffers(Event):
    """What `protect=` asks for cannot be had on these nodes. `is_less`: fewer of them may be lost."""

    asked: str
    found: str
    is_less: bool

    def severity(self) -> int:
        return logging.WARNING if self.is_less else logging.INFO

    def text(self) -> str:
        return f"protect={self.asked}: {self.found}"


@dataclass(frozen=True, kw_only=True)
class LevelsUnused(Event):
    """A node's cache is named, and this start does not use it."""

    level: ClassVar[int] = logging.WARNING
    path: str
    why: str

    def text(self) -> str:
        return f"STEPWELL_CACHE={self.path} is not used: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Protected(Event):
    """This rank holds for others what it has to."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Degraded(Event):
    """All ranks hold their parts of a checkpoint, but not all that was to protect it could be made."""

    level: ClassVar[int] = logging.WARNING
    step: int
    ranks: list[int]
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Flush(Event):
    """This rank's part of a checkpoint is in the shared place; said by rank 0, all of it is."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FlushFailed(Event):
    """A checkpoint could not be carried to the shared place; it stays on the nodes, and training goes on."""

    level: ClassVar[int] = logging.WARNING
    step: int
    error: str
    action: str


@dataclass(frozen=True, kw_only=True)
class NodeCloned(Event):
    """The cache of this node had the id of another node: it got one of its own."""

    level: ClassVar[int] = logging.WARNING
    rank: int
    of_rank: int
    path: str

    def text(self) -> str:
        return (
            f"the node of rank {self.rank} had the id of that of rank {self.of_rank} in {self.path}/node.json, and is "
            "another one (cloned from one image?): it has a new id now"
        )


@dataclass(frozen=True, kw_only=True)
class OneCache(Event):
    """Several machines have one and the same directory for a cache."""

    level: ClassVar[int] = logging.WARNING
    ranks: list[int]
    path: str

    def text(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"the caches of ranks {ranks}, on different machines, are one directory, {self.path}: nothing protects "
            "what is there; give Node() a local disk of each node"
        )


@dataclass(frozen=True, kw_only=True)
class CacheFailing(Event):
    """The cache of this node takes nothing: this rank's parts go straight to the shared place."""

    level: ClassVar[int] = logging.WARNING
    path: str
    error: str

    def text(self) -> str:
        return (
            f"the cache of this node, {self.path}, cannot be written: {self.error}; the parts of this rank go straight "
            "to the shared place, and nothing is held here for other nodes, until it can be written again"
        )


@dataclass(frozen=True, kw_only=True)
class CacheMade(Event):
    """The cache of this node was not there, and was made; `missing`: the first directory of it that was not there."""

    level: ClassVar[int] = logging.WARNING
    path: str
    missing: str
    mount: str
    file_system: str
    free_bytes: int

    def text(self) -> str:
        way = "" if self.missing == self.path else f", nor was {self.missing}"
        return (
            f"the cache of this node, {self.path}, was not there{way}: it was made on the file system mounted at "
            f"{self.mount} ({self.file_system}, {self.free_bytes / 1e9:.3g} GB free); if that is not the disk that it "
            "should be on, mount that, and start again"
        )


@dataclass(frozen=True, kw_only=True)
class CacheWorks(Event):
    """The cache of this node takes this rank's parts again."""

    level: ClassVar[int] = logging.WARNING
    path: str

    def text(self) -> str:
        return f"the cache of this node, {self.path}, can be written again"


@dataclass(frozen=True, kw_only=True)
class MarkFailed(Event):
    """The shared place could not be told how far the nodes are."""

    level: ClassVar[int] = logging.WARNING
    step: int
    error: str
    action: str = "tried again until it works; until then a start that does not find the nodes does not know of it"


@dataclass(frozen=True, kw_only=True)
class NodesBehind(Event):
    """A checkpoint that was whole on the nodes cannot be had from them any more: the run goes further back."""

    level: ClassVar[int] = logging.WARNING
    step: int
    to: int
    why: str

    def text(self) -> str:
        return f"step {self.step} was whole on the nodes, {self.why}: the run goes back to step {self.to}"


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """Somebody asked this node's agent for something it does not give."""

    level: ClassVar[int] = logging.WARNING
    kinds: dict[str, int]
