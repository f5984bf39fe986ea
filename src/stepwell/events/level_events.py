"""Events of checkpoints on their way through the levels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class LevelsChosen(Event):
    """Without `levels=`, stepwell chose where checkpoints go first, by measuring the node caches and the shared place.

    The seconds are those of the slowest rank, for `nbytes` per rank; None: that place could not be written.
    """

    level: ClassVar[int] = logging.INFO
    first: str
    nbytes: int
    node_seconds: float | None
    shared_seconds: float | None

    def text(self) -> str:
        def measured(seconds: float | None) -> str:
            return "cannot be written" if seconds is None else f"{seconds:.2g} s"

        node, shared = measured(self.node_seconds), measured(self.shared_seconds)
        return (
            f"Checkpoints go to the {self.first} level first: {self.nbytes / 1e6:.0f} MB per rank take {node} in the "
            f"node cache, {shared} in the shared place"
        )


@dataclass(frozen=True, kw_only=True)
class ProtectionDiffers(Event):
    """These nodes cannot provide what `protect=` asks for. `is_less`: it survives fewer losses."""

    asked: str
    found: str
    is_less: bool

    def severity(self) -> int:
        return logging.WARNING if self.is_less else logging.INFO

    def text(self) -> str:
        return f"protect={self.asked}: {self.found}"


@dataclass(frozen=True, kw_only=True)
class LevelsUnused(Event):
    """STEPWELL_CACHE is set, but this start does not use it."""

    level: ClassVar[int] = logging.WARNING
    path: str
    why: str

    def text(self) -> str:
        return f"Ignoring STEPWELL_CACHE={self.path}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Protected(Event):
    """This rank holds its share of the redundancy of other ranks."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Degraded(Event):
    """All ranks hold their parts of a checkpoint, but part of its redundancy is missing."""

    level: ClassVar[int] = logging.WARNING
    step: int
    ranks: list[int]
    reasons: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        ranks = "; ".join(f"rank {rank}: {self.reasons.get(str(rank), 'unknown reason')}" for rank in self.ranks)
        return f"Step {self.step} is complete but not fully protected ({ranks})"


@dataclass(frozen=True, kw_only=True)
class Flush(Event):
    """This rank's part of a checkpoint is in the shared place. Logged by rank 0: the whole checkpoint is."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FlushFailed(Event):
    """A checkpoint could not be copied to the shared place. It stays on the nodes, and training continues."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Cannot copy step {step} to the shared place: {error}; {action}"
    step: int
    error: str
    action: str


@dataclass(frozen=True, kw_only=True)
class NodeCloned(Event):
    """The cache of this node had the id of another node and got a new one."""

    level: ClassVar[int] = logging.WARNING
    rank: int
    of_rank: int
    path: str

    def text(self) -> str:
        return (
            f"The nodes of rank {self.rank} and rank {self.of_rank} had the same id in {self.path}/node.json but "
            f"are different nodes (cloned from one image?). The node of rank {self.rank} has a new id now"
        )


@dataclass(frozen=True, kw_only=True)
class OneCache(Event):
    """Several machines use the same directory as their cache."""

    level: ClassVar[int] = logging.WARNING
    ranks: list[int]
    path: str

    def text(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"The caches of ranks {ranks}, on different machines, are one directory, {self.path}: nothing "
            "protects its content. Give Node() a local disk of each node"
        )


@dataclass(frozen=True, kw_only=True)
class CacheFailing(Event):
    """The cache of this node cannot be written: this rank writes straight to the shared place."""

    level: ClassVar[int] = logging.WARNING
    path: str
    error: str

    def text(self) -> str:
        return (
            f"Cannot write the cache of this node, {self.path}: {self.error}. Until this works again, this rank "
            "writes straight to the shared place, and this node holds nothing for other nodes"
        )


@dataclass(frozen=True, kw_only=True)
class CacheMade(Event):
    """stepwell created the cache of this node. `missing`: the first directory of its path that did not exist."""

    level: ClassVar[int] = logging.WARNING
    path: str
    missing: str
    mount: str
    file_system: str
    free_bytes: int

    def text(self) -> str:
        way = "" if self.missing == self.path else f"; neither did {self.missing}"
        return (
            f"The cache of this node, {self.path}, did not exist{way}. stepwell created it on the file system "
            f"mounted at {self.mount} ({self.file_system}, {self.free_bytes / 1e9:.3g} GB free). If that is the "
            "wrong disk, mount the right one and start again"
        )


@dataclass(frozen=True, kw_only=True)
class CacheWorks(Event):
    """The cache of this node can be written again."""

    level: ClassVar[int] = logging.WARNING
    path: str

    def text(self) -> str:
        return f"The cache of this node, {self.path}, is writable again"


@dataclass(frozen=True, kw_only=True)
class MarkFailed(Event):
    """The mark in the shared place that names the newest step on the nodes could not be updated."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Cannot note in the shared place that the nodes have step {step}: {error}; {action}"
    step: int
    error: str
    action: str = (
        "stepwell retries until it works; until then, a start that does not find the nodes does not know this step"
    )


@dataclass(frozen=True, kw_only=True)
class NodesBehind(Event):
    """A checkpoint that was complete on the nodes can no longer be read from them: the run goes further back."""

    level: ClassVar[int] = logging.WARNING
    step: int
    to: int
    why: str

    def text(self) -> str:
        return f"Step {self.step} was complete on the nodes, {self.why}: the run goes back to step {self.to}"


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """This node's agent refused requests."""

    level: ClassVar[int] = logging.WARNING
    kinds: dict[str, int]

    def text(self) -> str:
        found = ", ".join(f"{kind} ({count})" for kind, count in self.kinds.items())
        return f"Refused requests of other processes to this node's agent: {found}"
