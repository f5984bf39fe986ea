"""The small frozen types that all stages share.

Owns:    identities (which checkpoint, which rank), what a person may ask to keep, and what trainer
         and agent say of one snapshot.
Not:     bytes (format), files (store), tensors (state).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from stepwell.errors import ConfigError

__all__ = [
    "CheckpointId", "CodedPlace", "Keep", "OfferedArena", "OfferedSnapshot", "Owner", "SaveRequest", "Status",
    "quick_dataclass",
]  # fmt: skip

_NAME = re.compile(r"^step-(\d{12})\.l(\d{4,8})(?:\.r(\d{1,6}))?$")


@functools.total_ordering
@dataclass(frozen=True)
class CheckpointId:
    """The id of a checkpoint: ordered by step, then lineage, then how often that lineage saved the step again."""

    step: int
    repeat: int
    lineage: int

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory in the run."""
        again = f".r{self.repeat}" if self.repeat else ""
        return f"step-{self.step:012d}.l{self.lineage:04d}{again}"

    @classmethod
    def parse(cls, directory: str) -> CheckpointId | None:
        """The id behind a directory name, or None for a stray name."""
        match = _NAME.match(directory)
        if match is None:
            return None
        found = cls(step=int(match[1]), lineage=int(match[2]), repeat=int(match[3] or 0))
        return found if found.directory == directory else None

    def __lt__(self, other: CheckpointId) -> bool:
        return (self.step, self.lineage, self.repeat) < (other.step, other.lineage, other.repeat)

    def __str__(self) -> str:
        return self.directory


@dataclass(frozen=True)
class Owner:
    """The process of the run that a shard belongs to."""

    rank: int = 0
    world_size: int = 1

    @property
    def stem(self) -> str:
        """Prefix of every file name that this rank writes."""
        return f"rank-{self.rank:05d}"

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits for all ranks and removes old checkpoints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1


@dataclass(frozen=True)
class Status:
    """The current state of a run.

    memory_step:      the newest step that is complete in memory, where it survives this process
    committed_step:   the newest durable step; with levels, on the nodes
    shared_step:      with levels, the newest step in the shared place
    delta_step:       with `deltas=`, the last step in the chain of lossy records
    degraded:         why `committed_step` is not protected; None if it is
    policy:           a sentence that gives the interval and its reason
    overdue_since:    since when (as `time.time()`) a checkpoint is several intervals late; `overdue_because` tells why
    """

    step: int
    epoch: int
    committed_step: int | None
    memory_step: int | None
    pending: int
    agent_pid: int
    lineage: int
    is_fenced: bool
    policy: str
    degraded: str | None = None
    shared_step: int | None = None
    delta_step: int | None = None
    is_finished: bool = False
    overdue_since: float | None = None
    overdue_because: str | None = None


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints retention keeps. It always keeps named ones.

    last:    the newest n good ones (at least 2, because one may be damaged)
    every:   also every checkpoint whose step is a multiple of this
    epochs:  also every end-of-epoch checkpoint
    """

    last: int = 2
    every: int | None = None
    epochs: bool = False

    def __post_init__(self) -> None:
        if self.last < 2:
            raise ConfigError(
                f"keep={self.last}: keep at least 2, because the newest may be damaged; use keep=2",
                found=self.last,
            )
        if self.every is not None and self.every < 1:
            raise ConfigError(f"Keep(every={self.every}): give a number of steps of 1 or more", found=self.every)


if TYPE_CHECKING:
    from dataclasses import dataclass as quick_dataclass
else:

    def quick_dataclass(*, frozen: bool) -> Callable[[type], type]:
        """`dataclass(frozen=True)`, with methods that all share: made one by one, as `dataclass` does it, those of the
        messages cost an agent a sixth of its start.
        """
        assert frozen
        return _make_quick


def _make_quick(cls: type) -> type:
    made: type = dataclass(init=False, repr=False, eq=False)(cls)
    for name, method in _METHODS.items():
        setattr(made, name, method)
    return made


def _init(self: Any, *values: Any, **named: Any) -> None:
    names = self.__match_args__
    given = dict(zip(names, values, strict=False)) | named
    if len(given) != len(values) + len(named) or not given.keys() <= set(names):
        raise TypeError(f"{type(self).__name__}: takes each of {', '.join(names)} once, found {', '.join(named)}")
    for name in names:
        usual = self.__dataclass_fields__[name].default
        if usual is MISSING and name not in given:
            raise TypeError(f"{type(self).__name__}: {name} is missing")
        self.__dict__[name] = given.get(name, usual)


def _refuse(self: Any, name: str, value: Any = None) -> None:
    raise FrozenInstanceError(f"cannot change {name} of {type(self).__name__}")


def _repr(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__name__}({', '.join(shown)})"


def _is_equal(self: Any, other: object) -> bool:
    return vars(self) == vars(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), *(getattr(self, name) for name in self.__match_args__)))


_METHODS: Final[dict[str, Callable[..., Any]]] = {
    "__init__": _init,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__repr__": _repr,
    "__eq__": _is_equal,
    "__hash__": _hash,
}


@quick_dataclass(frozen=True)
class SaveRequest:
    """What the trainer wants of one snapshot.

    tree:     the state without its tensors; `Encoded` where it is sent, plain values where it arrived
    durable:  it is to be a checkpoint; else it stays in memory
    flush:    with levels, it goes to the shared place in any case
    delta:    what changed goes into a chain
    """

    step: int
    repeat: int
    created: float
    tree: Any
    epoch_end: bool
    finished: bool
    name: str | None
    files: dict[str, str]
    durable: bool = True
    flush: bool = False
    delta: bool = False


@quick_dataclass(frozen=True)
class CodedPlace:
    """Where in a slot the agent finds what was coded, against which base, and which part of the state it is."""

    base: str
    part: int
    start: int
    nbytes: int
    facts: int


@quick_dataclass(frozen=True)
class OfferedSnapshot:
    """A snapshot in the memory of a dead trainer: its record, and where its bytes lie."""

    record: str
    slot: int
    frozen: int


@quick_dataclass(frozen=True)
class OfferedArena:
    """The shape of the arena in which it lies."""

    generation: int
    slots: int
    slot_bytes: int
    frozen_bytes: int
