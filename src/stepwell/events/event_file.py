"""The event file of a rank on disk: lines appended by several processes, bounded, and read back in order.

Owns:    `events.jsonl` (what is written now), `events.old.jsonl` (what was written before) and `events.kept.jsonl` (of
         what was before both, all but the routine), and when one becomes the other.
Not:     what is in a line (events), the thread that writes (journal).
Holds:   a line is written with one `write` on a file opened for appending, so that trainer and agent share it; one of
         them, behind a lock, rotates. What is dropped is counted in the first line of the kept part. Nothing is synced.
         Writers take no lock: one that is stopped within a write while two files fill up loses that line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from stepwell.errors import ConfigError

VARIABLE: Final = "STEPWELL_EVENT_BYTES"
_MOST_BYTES: Final = 48 << 20
_LEAST_BYTES: Final = 16 << 10
_HEAD_BYTES: Final = 64
_AGAIN_SECONDS: Final = 30.0
_KEPT: Final = 4
"""The kept part is at most so many times smaller."""
THINNED: Final = "thinned"
"""Kind of the line that counts what was dropped."""
ROUTINE: Final = frozenset(
    {
        *("snapshot", "snapshot-skipped", "stall", "persist", "commit", "prune", "arena", "decision", "log", "put-off"),
        *("sharing", "protected", "flush", "output"),
        *("base-due", "chain-begun", "coding", "delta", "delta-skipped"),
    }
)
"""What comes with steps and checkpoints that go well. The kinds of everything else are kept."""
_KIND: Final = re.compile(rb'"kind": "([a-z-]+)"')


def parts_of(path: Path) -> tuple[Path, Path, Path]:
    """The kept, the old and the present part."""
    return path.with_suffix(".kept.jsonl"), path.with_suffix(".old.jsonl"), path


def most_bytes() -> int:
    """How large the present part may become: of all three together 2.25 times that. Raises ConfigError."""
    text = os.environ.get(VARIABLE, str(_MOST_BYTES))
    if not text.isdecimal() or int(text) < _LEAST_BYTES:
        raise ConfigError(f"{VARIABLE}={text!r}: give a number of bytes, at least {_LEAST_BYTES}", found=text)
    return int(text)


class EventFile:
    """The writer's side. Constructing only assigns. Used under a lock."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._fd: int | None = None
        self._again_at = 0.0

    def append(self, line: bytes) -> None:
        """Write one line. Raises OSError."""
        os.write(self._open(), line)

    def _open(self) -> int:
        if self._fd is None:
            self._fd = _open_to_append(self.path)
        found = os.fstat(self._fd)
        if stat.S_ISREG(found.st_mode) and (found.st_size >= self._most_bytes or not found.st_nlink):
            self._move_on(self._fd)
        return self._fd

    def _move_on(self, fd: int) -> None:
        """To a fresh file: this one is full. If that fails (a full disk) it is written on, and tried again later."""
        if time.monotonic() < self._again_at:
            return
        with contextlib.suppress(OSError):
            if _is_at(fd, self.path):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else another process is at it
                try:
                    if _is_at(fd, self.path):
                        self._again_at = time.monotonic() + _AGAIN_SECONDS  # it reads a whole file
                        rotate(self.path, self._most_bytes // _KEPT)
                        self._again_at = 0.0
                finally:
                    fcntl.flock(fd, fcntl.LOCK_UN)
            self._fd = _open_to_append(self.path)
            os.close(fd)

    def close(self) -> None:
        """A later append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open_to_append(path: Path) -> int:
    # A link could lead out of the run directory, and a pipe without a reader would block.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o644)


def _create(path: Path) -> int:
    # A hard link to another file must not be emptied: what was left there goes.
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _is_at(fd: int, path: Path) -> bool:
    """Whether this name is still that of this file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


# -- rotation ---------------------------------------------------------------------------------------------------------


def rotate(path: Path, kept_bytes: int) -> None:
    """The present part becomes the old one; of the one before it, what matters goes to the kept part. OSError."""
    kept, old, _ = parts_of(path)
    file = _open_to_read(old)
    if file is not None:
        with file:
            data = _keep(kept, file, kept_bytes)
        temporary = kept.with_name(f"{kept.name}.tmp")
        with open(_create(temporary), "wb") as out:
            out.write(data)
        os.rename(temporary, kept)
    os.rename(path, old)


def _keep(kept: Path, old: BinaryIO, kept_bytes: int) -> bytes:
    """What the kept part is to hold. Where that is too much, its oldest lines go too, and are counted."""
    lines: list[bytes] = []
    dropped: Counter[str] = Counter()
    identity, until = os.fstat(old.fileno()).st_ino, 0.0
    before = _open_to_read(kept)
    if before is not None:
        with before:
            head, *lines = before.readlines() or [b""]
        fields = _load(head)
        dropped.update({str(kind): int(count) for kind, count in dict(fields.get("dropped", {})).items()})
        until = float(fields.get("until", 0.0))
        if fields.get("from") == identity:  # whoever did this before died before the last rename
            return b"".join([head, *lines])
    for line in old:
        found = _KIND.search(line)
        kind = "?" if found is None else found[1].decode()
        if kind in ROUTINE or found is None or not line.endswith(b"\n"):
            dropped[kind] += 1
        else:
            lines.append(line)
    size, first = sum(map(len, lines)), 0
    if size > kept_bytes:
        while size > kept_bytes // 2:  # half of it, or each rotation would drop a few
            size, first = size - len(lines[first]), first + 1
    for line in lines[:first]:
        found = _KIND.search(line)
        dropped["?" if found is None else found[1].decode()] += 1
        until = max(until, float(_load(line).get("time", 0.0)))
    head_fields = {"time": time.time(), "who": "events", "process": os.getpid(), "lineage": 0, "kind": THINNED}
    summary = {**head_fields, "dropped": dict(sorted(dropped.items())), "until": until, "from": identity}
    return b"".join([json.dumps(summary).encode() + b"\n", *lines[first:]])


def _load(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


# -- reading ----------------------------------------------------------------------------------------------------------


class FilePart(NamedTuple):
    """One of the files, open. `identity` tells it from all others, also when it has another name by now.

    The number of a file that is gone is soon given again, but not with the same first line.
    """

    file: BinaryIO
    identity: tuple[int, bytes]
    is_kept: bool


@contextlib.contextmanager
def opened(path: Path) -> Iterator[list[FilePart]]:
    """The parts that are there, the oldest first. A rotation meanwhile takes nothing away and doubles nothing."""
    with contextlib.ExitStack() as stack:
        found: list[FilePart] = []
        for name in reversed(parts_of(path)):  # the present one first: its next name is one that is still to be opened
            file = _open_to_read(name)
            if file is None:
                continue
            stack.enter_context(file)
            identity = os.fstat(file.fileno()).st_ino, os.pread(file.fileno(), _HEAD_BYTES, 0)
            if identity[0] not in [part.identity[0] for part in found]:
                found.append(FilePart(file, identity, is_kept=name == parts_of(path)[0]))
        yield found[::-1]


def _open_to_read(path: Path) -> BinaryIO | None:
    """None where there is no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")
