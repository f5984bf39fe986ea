"""What happened to a run: one typed record per happening, one line of `events.jsonl` each.

Owns:    the list of event kinds, the append-only file, and the mirror into standard `logging`.
Not:     deciding anything. Losing an event never costs a checkpoint or a training step.

A line is written with one `write` on a file opened for appending, so trainer and agent share the file.
A torn last line is skipped by readers.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

logger = logging.getLogger("stepwell")
_CLOSE_SECONDS = 5.0
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `level` is the level of its line in `logging`."""

    level: ClassVar[int] = logging.DEBUG

    @property
    def kind(self) -> str:
        """Name in the file: the class name in lower case with dashes."""
        return "".join(f"-{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("-")

    def text(self) -> str:
        """One line for a person."""
        facts = ", ".join(
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None
        )
        return f"{self.kind.replace('-', ' ')}: {facts}"


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A trainer opened the run."""

    run: str
    step: int
    pid: int
    agent_pid: int
    host: str


@dataclass(frozen=True, kw_only=True)
class Snapshot(Event):
    """A consistent copy of the state is complete. `stall_seconds`: what the training thread waited so far."""

    step: int
    sequence: int
    strategy: str
    nbytes: int
    stall_seconds: float
    copy_seconds: float


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
class LookAhead(Event):
    """Two batches were requested without an optimizer step in between."""

    level: ClassVar[int] = logging.INFO
    step: int
    meaning: str = "gradient accumulation, or a consumer that reads ahead; in the latter case call ckpt.step() yourself"


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

    def text(self) -> str:
        if self.again:
            return f"this run is finished (step {self.step}): no epoch left; ask for more epochs to train on"
        return f"finished at step {self.step}"


class EventLog:
    """Appends events to one file. Never raises for a full or broken disk: it says so once in the log.

    `background`: lines are written by a thread of its own, so that a file system that hangs does not hold training up.
    """

    def __init__(self, path: Path, *, who: str, lineage: int = 0, background: bool = False) -> None:
        self.path = path
        self.who = who
        self.lineage = lineage
        self._background = background
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._failed = False
        self._kept: list[tuple[int, dict[str, Any]]] = []

    def emit(self, event: Event) -> None:
        """Write one line and mirror it into `logging`."""
        if event.level > logging.DEBUG:
            logger.log(event.level, "%s", event.text())
        else:
            logger.debug("%s", event.kind)
        line = {
            "time": time.time(),
            "who": self.who,
            "process": os.getpid(),
            "lineage": self.lineage,
            "kind": event.kind,
        }
        line.update(asdict(event))
        data = json.dumps(line, default=str).encode() + b"\n"
        if not self._background:
            self._write(data)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drain, daemon=True, name="stepwell-events")
                self._thread.start()
        self._lines.put(data)

    def _drain(self) -> None:
        while (data := self._lines.get()) is not None:
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            with self._lock:
                if self._fd is None:
                    # A link could lead out of the run directory, and a pipe without a reader would block.
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                    self._fd = os.open(self.path, flags, 0o644)
                fd = self._fd
            os.write(fd, data)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write %s: %s; events are not kept until this works again", self.path, error)
            self._failed = True

    def keep(self, step: int, values: dict[str, Any]) -> None:
        """Note logged values; tensors are turned into numbers by `flush`, a step later, so nothing waits here."""
        kept = {key: value.detach() if hasattr(value, "detach") else value for key, value in values.items()}
        self._kept.append((step, kept))

    def flush(self) -> None:
        """Write the values that were kept."""
        kept, self._kept = self._kept, []
        for step, values in kept:
            plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in values.items()}
            self.emit(Log(step=step, values=plain))

    def close(self) -> None:
        """Write what is left and close the file; a later emit opens it again."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return  # the file system hangs: the thread ends with the process
            self._thread = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All readable lines of an event file, in file order; torn, foreign or endless lines are skipped."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return
    with os.fdopen(fd, "rb") as lines:
        while line := lines.readline(_MAX_LINE_BYTES):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                yield event


def speak_to_terminal(who: str = "stepwell", level: int = logging.INFO) -> None:
    """Show our lines on stderr where the program has not set up logging itself."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{who}: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
