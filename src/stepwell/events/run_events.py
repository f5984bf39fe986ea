"""What can happen to a run: one typed record per happening.

Owns:    the list of event kinds and the line each shows to a person.
Not:     writing them down (journal). An event decides nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from stepwell.escape import shown

logger = logging.getLogger("stepwell")


def _make_fit(record: logging.LogRecord) -> bool:
    """Whatever is logged may quote a file that anybody wrote, or an address."""
    record.msg, record.args = shown(record.getMessage()), None
    if record.exc_info and not record.exc_text:  # formatters take this where it is there
        record.exc_text = shown(logging.Formatter().formatException(record.exc_info))
    return True


logger.addFilter(_make_fit)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `level` is the level of its line in `logging`."""

    level: ClassVar[int] = logging.DEBUG

    @property
    def kind(self) -> str:
        """Name in the file: the class name in lower case with dashes."""
        return "".join(f"-{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("-")

    def severity(self) -> int:
        """Level of this very one."""
        return self.level

    def text(self) -> str:
        """One line for a person."""
        facts = ", ".join(
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None
        )
        return f"{self.kind.replace('-', ' ')}: {facts}"


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A trainer opened the run. `data`: what a resume promises of the batches, `exact`, `order` or `replay`."""

    run: str
    step: int
    pid: int
    agent_pid: int
    host: str
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot(Event):
    """A copy of the state is complete. `stall_seconds`: waited so far; `durable`: it is to be a checkpoint."""

    step: int
    sequence: int
    strategy: str
    nbytes: int
    stall_seconds: float
    copy_seconds: float
    durable: bool = True


@dataclass(frozen=True, kw_only=True)
class Stall(Event):
    """The gate held the optimizer back until a copy was done."""

    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SnapshotVoid(Event):
    """A leaf changed while it was being copied: the snapshot was thrown away."""

    level: ClassVar[int] = logging.WARNING
    step: int
    leaf: str
    seen_by: str
    action: str = "the next snapshot is taken blocking; guard the change with `with ckpt.updating():`"


@dataclass(frozen=True, kw_only=True)
class SnapshotSkipped(Event):
    """A snapshot was due and was put off to a later step."""

    level: ClassVar[int] = logging.INFO
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Strategy(Event):
    """The way snapshots are taken changed."""

    level: ClassVar[int] = logging.INFO
    step: int
    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Suspect(Event):
    """Non-finite values in parameters or optimizer state."""

    level: ClassVar[int] = logging.WARNING
    step: int
    leaves: int
    first: str
    action: str = "the checkpoint is marked suspect; a restart prefers an older one without"


@dataclass(frozen=True, kw_only=True)
class Arena(Event):
    """Host memory for snapshots was set up or replaced."""

    slots: int
    slot_bytes: int
    frozen_bytes: int
    seconds: float
    page_locked: bool
    reason: str

    def severity(self) -> int:
        return logging.WARNING if self.reason else logging.DEBUG

    def text(self) -> str:
        return f"memory for {self.slots} snapshots, fewer than wanted: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Persist(Event):
    """A snapshot's bytes are on storage."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PersistFailed(Event):
    """Writing a snapshot failed; training goes on."""

    level: ClassVar[int] = logging.WARNING
    step: int
    error: str
    action: str


@dataclass(frozen=True, kw_only=True)
class Commit(Event):
    """A checkpoint exists."""

    step: int
    directory: str
    nbytes: int
    seconds: float
    suspect: bool = False


@dataclass(frozen=True, kw_only=True)
class Prune(Event):
    """Retention removed a checkpoint."""

    directory: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PruneFailed(Event):
    """Retention could not remove a checkpoint."""

    level: ClassVar[int] = logging.WARNING
    directory: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Storage(Event):
    """How a file system is written fastest was found out, with the bytes of checkpoints."""

    file_system: str
    threads: int
    write_bytes: int
    bytes_per_second: float
    reason: str

    def text(self) -> str:
        rate = f"{self.bytes_per_second / 1e9:.1f} GB/s"
        writes = f"{self.threads} thread{'' if self.threads == 1 else 's'}, writes of {self.write_bytes >> 20} MiB"
        return f"storage ({self.file_system}): {writes}, {rate}; {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """The automatic interval changed: what it is now, which term bound it, and what it was computed from.

    `is_news`: it changed so much that a person may want to know.
    """

    step: int
    seconds: float
    term: str
    predicted_overhead: float
    at_risk_seconds: float
    iteration_seconds: float | None
    checkpoint_seconds: float
    durable_seconds: float
    restart_seconds: float
    mtbf_seconds: float | None
    overhead_bound: float
    recovery_point: float | None
    sentence: str
    is_news: bool

    def severity(self) -> int:
        return logging.INFO if self.is_news else self.level

    def text(self) -> str:
        return self.sentence


@dataclass(frozen=True, kw_only=True)
class Infeasible(Event):
    """A wish of the user's cannot be met."""

    level: ClassVar[int] = logging.WARNING
    step: int
    problem: str

    def text(self) -> str:
        return self.problem


@dataclass(frozen=True, kw_only=True)
class MeasureAgain(Event):
    """What an earlier process measured does not hold any more."""

    level: ClassVar[int] = logging.INFO
    changed: list[str]

    def text(self) -> str:
        return f"costs are measured again: {', '.join(self.changed)} changed"


@dataclass(frozen=True, kw_only=True)
class Told(Event):
    """The process was told to leave: by a signal, or by a notice."""

    level: ClassVar[int] = logging.WARNING
    step: int
    by: str
    grace: float
    saves: bool = True

    def text(self) -> str:
        again = "; once more to leave at once" if self.by == "SIGINT" else ""
        what = "and saved" if self.saves else "and nothing new is saved (another process of the run died)"
        return f"{self.by}: the running step is finished {what}, within {self.grace:.0f} s{again}"


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The process leaves, because it was told to."""

    level: ClassVar[int] = logging.WARNING
    step: int
    by: str
    durable: bool
    seconds: float
    reason: str

    def text(self) -> str:
        return f"leaving at step {self.step}, {self.seconds:.1f} s after {self.by}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Restore(Event):
    """State was brought back. `redone`: steps done before the failure that have to be done again."""

    level: ClassVar[int] = logging.INFO
    step: int
    directory: str
    source: str
    seconds: float
    nbytes: int
    redone: int | None = None
    suspect: bool = False

    def text(self) -> str:
        redone = "" if self.redone is None else f", {self.redone} step{'' if self.redone == 1 else 's'} redone"
        suspect = ", marked suspect (non-finite values)" if self.suspect else ""
        return f"restored step {self.step} from {self.source}, {self.seconds:.1f} s{redone}{suspect}"


@dataclass(frozen=True, kw_only=True)
class Fresh(Event):
    """There was nothing to restore."""

    level: ClassVar[int] = logging.INFO
    where: str

    def text(self) -> str:
        return f"starting fresh: no checkpoint in {self.where}"


@dataclass(frozen=True, kw_only=True)
class Damage(Event):
    """A checkpoint does not hold what it should; an older one is tried."""

    level: ClassVar[int] = logging.WARNING
    directory: str
    reason: str

    def text(self) -> str:
        return f"damaged: {self.directory}: {self.reason}; trying the next older checkpoint"


@dataclass(frozen=True, kw_only=True)
class Mismatch(Event):
    """`restore(strict=False)` left these leaves alone or converted them."""

    level: ClassVar[int] = logging.WARNING
    problems: list[str]


@dataclass(frozen=True, kw_only=True)
class AgentDeath(Event):
    """The agent process ended unasked and was replaced."""

    level: ClassVar[int] = logging.WARNING
    pid: int
    status: str
    resent: int


@dataclass(frozen=True, kw_only=True)
class TrainerDeath(Event):
    """The trainer process ended without closing; complete snapshots are being finished."""

    level: ClassVar[int] = logging.WARNING
    pid: int
    step: int
    pending: int


@dataclass(frozen=True, kw_only=True)
class Adopted(Event):
    """A successor took over the lingering agent and its memory."""

    pid: int
    complete: int


@dataclass(frozen=True, kw_only=True)
class Fenced(Event):
    """A newer lineage exists: this process may not commit or prune any more."""

    level: ClassVar[int] = logging.ERROR
    lineage: int
    newest: int
    action: str = "another process continues this run; stop this one"


@dataclass(frozen=True, kw_only=True)
class Log(Event):
    """Values the user logged for one step."""

    step: int
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The run reached its last epoch."""

    level: ClassVar[int] = logging.INFO
    step: int
    again: bool
    early: bool = False

    def text(self) -> str:
        if self.early and self.again:
            return f"this run was finished early, at step {self.step}; restore(step={self.step}) trains on"
        if self.again:
            return f"this run is finished (step {self.step}): no epoch left; ask for more epochs to train on"
        return f"finished at step {self.step}"
