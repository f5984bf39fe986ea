"""The events of a run: one typed record per kind.

Owns:    the list of event kinds and the line each shows to a person.
Not:     writing events (journal). An event decides nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from stepwell.escape import shown

logger = logging.getLogger("stepwell")


def _make_fit(record: logging.LogRecord) -> bool:
    """Escape control characters and hide addresses: a message may quote a file that anybody wrote."""
    record.msg, record.args = shown(record.getMessage()), None
    if record.exc_info and not record.exc_text:  # formatters prefer this text
        record.exc_text = shown(logging.Formatter().formatException(record.exc_info))
    return True


logger.addFilter(_make_fit)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `level` is its level in `logging`, `line` what a person reads, with fields in braces."""

    level: ClassVar[int] = logging.DEBUG
    line: ClassVar[str] = ""

    @property
    def kind(self) -> str:
        """Name in the file: the class name in lower case with dashes."""
        return "".join(f"-{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("-")

    def severity(self) -> int:
        """Level of this one event."""
        return self.level

    def text(self) -> str:
        """One line for a person; without a `line`, all fields that are set."""
        if self.line:
            return self.line.format_map(vars(self))
        facts = ", ".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)
        return f"{self.kind.replace('-', ' ')}: {facts}"


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A trainer opened the run. `data`: how a resume continues the batches: `exact`, `order` or `replay`."""

    run: str
    step: int
    pid: int
    agent_pid: int
    host: str
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot(Event):
    """A copy of the state is complete. `stall_seconds`: waited so far; `durable`: it becomes a checkpoint."""

    step: int
    sequence: int
    strategy: str
    nbytes: int
    stall_seconds: float
    copy_seconds: float
    durable: bool = True


@dataclass(frozen=True, kw_only=True)
class Stall(Event):
    """The optimizer step waited for a copy to finish."""

    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SnapshotVoid(Event):
    """A leaf changed while it was being copied, so the snapshot was discarded."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Discarded the snapshot of step {step}: {leaf} changed during the copy ({seen_by}); {action}"
    step: int
    leaf: str
    seen_by: str
    action: str = "the next snapshot blocks training; guard the change with `with ckpt.updating():`"


@dataclass(frozen=True, kw_only=True)
class SnapshotSkipped(Event):
    """A snapshot was due and is postponed to a later step."""

    level: ClassVar[int] = logging.INFO
    line: ClassVar[str] = "Skipped the save at step {step}: {reason}"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Strategy(Event):
    """The snapshot strategy changed."""

    level: ClassVar[int] = logging.INFO
    line: ClassVar[str] = "Snapshot strategy from step {step} on: {strategy} ({reason})"
    step: int
    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Suspect(Event):
    """Non-finite values in parameters or optimizer state."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "NaN or infinity at step {step} (tensors: {leaves}, first {first}); {action}"
    step: int
    leaves: int
    first: str
    action: str = "the checkpoint is marked suspect; a restart prefers the last finite one"


@dataclass(frozen=True, kw_only=True)
class Arena(Event):
    """Host memory for snapshots was allocated or replaced."""

    line: ClassVar[str] = "Host memory holds fewer snapshots than wanted ({slots}): {reason}"

    slots: int
    slot_bytes: int
    frozen_bytes: int
    seconds: float
    page_locked: bool
    reason: str

    def severity(self) -> int:
        return logging.WARNING if self.reason else logging.DEBUG


@dataclass(frozen=True, kw_only=True)
class Persist(Event):
    """All bytes of a snapshot are on storage."""

    step: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PersistFailed(Event):
    """Writing a snapshot failed; training continues."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Cannot write step {step}: {error}; {action}"
    step: int
    error: str
    action: str


@dataclass(frozen=True, kw_only=True)
class Commit(Event):
    """A checkpoint is committed."""

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
    line: ClassVar[str] = "Cannot remove the old checkpoint {directory}: {error}"
    directory: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Storage(Event):
    """stepwell measured, while writing checkpoints, how to write this file system fastest."""

    file_system: str
    threads: int
    write_bytes: int
    bytes_per_second: float
    reason: str

    def text(self) -> str:
        speed = f"{self.bytes_per_second / 1e9:.1f} GB/s, {self.threads} threads, {self.write_bytes >> 20} MiB a write"
        return f"Storage ({self.file_system}): {speed}; {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """The automatic interval, the term that limits it, and its inputs. `is_news`: the change is worth a line."""

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
    line: ClassVar[str] = "{sentence}"

    def severity(self) -> int:
        return logging.INFO if self.is_news else self.level


@dataclass(frozen=True, kw_only=True)
class Infeasible(Event):
    """A request of the user cannot be met."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "{problem}"
    step: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class MeasureAgain(Event):
    """The measurements of an earlier process are out of date."""

    level: ClassVar[int] = logging.INFO
    changed: list[str]

    def text(self) -> str:
        return f"Measuring checkpoint costs again, because this changed: {', '.join(self.changed)}"


@dataclass(frozen=True, kw_only=True)
class Told(Event):
    """A signal or a notice asked the process to exit."""

    level: ClassVar[int] = logging.WARNING
    step: int
    by: str
    grace: float
    saves: bool = True

    def text(self) -> str:
        again = " Press again to quit without saving." if self.by == "SIGINT" else ""
        saving = "saving" if self.saves else "another process of the run died; finishing, not saving,"
        return f"{'Ctrl-C' if again else self.by}: {saving} the current step (up to {self.grace:.0f} s).{again}"


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The process exits, because a signal or a notice asked it to."""

    level: ClassVar[int] = logging.WARNING
    step: int
    by: str
    durable: bool
    seconds: float
    reason: str

    def text(self) -> str:
        saved = f"Saved step {self.step}, exiting" if self.durable and self.step else f"Exiting: {self.reason};"
        return f"{saved} {self.seconds:.1f} s after {self.by}"


@dataclass(frozen=True, kw_only=True)
class Restore(Event):
    """The state was restored. `redone`: steps that were done before the failure and must be done again."""

    level: ClassVar[int] = logging.INFO
    step: int
    directory: str
    source: str
    seconds: float
    nbytes: int
    redone: int | None = None
    suspect: bool = False

    def text(self) -> str:
        redo = "" if self.redone is None else f"; {self.redone} step{'s' * (self.redone != 1)} to redo"
        return f"Restored step {self.step} from {self.source} in {self.seconds:.1f} s{redo}{'; suspect' * self.suspect}"


@dataclass(frozen=True, kw_only=True)
class Fresh(Event):
    """There was nothing to restore."""

    level: ClassVar[int] = logging.INFO
    line: ClassVar[str] = "Starting fresh: no checkpoint in {where}"
    where: str


@dataclass(frozen=True, kw_only=True)
class Damage(Event):
    """A checkpoint is damaged; restore tries the next older one."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "{directory} is damaged: {reason}; trying the next older checkpoint"
    directory: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Mismatch(Event):
    """`restore(strict=False)` skipped or converted these leaves."""

    level: ClassVar[int] = logging.WARNING
    problems: list[str]

    def text(self) -> str:
        return f"restore(strict=False) skipped or converted: {'; '.join(self.problems)}"


@dataclass(frozen=True, kw_only=True)
class AgentDeath(Event):
    """The agent process died and was replaced."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Agent {pid} died ({status}) and was replaced; snapshots sent to the new one: {resent}"
    pid: int
    status: str
    resent: int


@dataclass(frozen=True, kw_only=True)
class TrainerDeath(Event):
    """The trainer process died without closing; the agent writes its complete snapshots."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Trainer {pid} died at step {step}; snapshots still to write: {pending}"
    pid: int
    step: int
    pending: int


@dataclass(frozen=True, kw_only=True)
class Adopted(Event):
    """A new trainer took over the waiting agent and its memory."""

    pid: int
    complete: int


@dataclass(frozen=True, kw_only=True)
class Fenced(Event):
    """A newer lineage exists: this process may no longer commit or prune."""

    level: ClassVar[int] = logging.ERROR
    line: ClassVar[str] = "Lineage {newest} continues this run; lineage {lineage} must not write. {action}"
    lineage: int
    newest: int
    action: str = "Another process continues this run; stop this one"


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
            return f"Nothing to do: finish() ended this run at step {self.step}; restore(step={self.step}) trains on"
        if self.again:
            return f"Nothing to do: all epochs are done (step {self.step}). Pass a larger number to epochs() to go on"
        return f"Finished at step {self.step}"
