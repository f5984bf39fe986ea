"""Named points where a test may kill the process, fail a file operation or slow a copy down.

Owns:    the environment variables below, read once at import.
Not:     any decision: with the variables unset every call returns at once.

    STEPWELL_CRASH=point:rank:nth[:stop]  SIGKILL (SIGSTOP) at the nth passage of that point on that rank
    STEPWELL_CRASH_MARK=path              only once: whoever creates this file dies, its replacement does not
    STEPWELL_FAULT=op:errno:nth[,...]     the nth call of a file operation fails; `3+` from the 3rd on,
                                          `SHORT` instead of an errno writes only half of the bytes
    STEPWELL_SLOW_COPY=seconds            pause before each leaf that is copied while training runs

A variable but the mark may hold `agent!` or `trainer!` in front, to act in that process only.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from typing import Final, Literal

Role = Literal["trainer", "agent"]

_role: Role = "trainer"
_rank = 0
_lock: Final = threading.Lock()
_counts: Final[dict[str, int]] = {}
PARTS: Final = (10, 50, 90)
POINTS: Final[dict[str, str]] = {
    "trigger.begin": "trainer: before anything of a snapshot exists",
    "trigger.announced": "trainer: the agent knows of the snapshot, nothing is copied",
    "copy.middle": "trainer: half of the leaves are copied",
    "copy.done": "trainer: all bytes are there, the verdict is not",
    "copy.complete": "trainer: the snapshot is complete",
    "gate.passed": "trainer: the optimizer may step",
    "persist.begin": "agent: a snapshot was picked up, complete or about to be",
    "shard.middle": "agent: half of the blocks are written",
    "shard.written": "agent: all blocks are written, not synced",
    "shard.synced": "agent: synced under the temporary name",
    "shard.renamed": "agent: final name, directory not synced",
    "shard.durable": "agent: shard durable, no record",
    "record.renamed": "agent: record under its final name",
    "record.durable": "agent: record durable, no manifest",
    "record.written": "agent: record of one of many ranks under a temporary name",
    "record.linked": "agent: record of one of many ranks visible, directory not synced",
    "records.gathered": "agent: the leader has seen the records of all ranks",
    "void.written": "agent: the word that a checkpoint of many ranks is void, under a temporary name",
    "void.linked": "agent: that word visible, directory not synced",
    "manifest.written": "agent: manifest under a temporary name",
    "manifest.linked": "agent: manifest visible, directory not synced",
    "manifest.durable": "agent: committed, nobody told",
    "prune.begin": "agent: before the manifest of an old checkpoint goes",
    "prune.unlisted": "agent: the old checkpoint is no checkpoint any more",
    "prune.middle": "agent: some of its files are gone",
    "spare.kept": "agent: the shard of an old checkpoint waits to be overwritten",
    "spare.taken": "agent: an old shard under the temporary name of the next one",
    **{f"copy.{part}": f"agent: {part} % of a file of another rank's shard are on this node" for part in PARTS},
    "copy.files": "agent: all files of another rank's shard are on this node, its record is not",
    "copy.record.written": "agent: that record under a temporary name",
    "copy.record.linked": "agent: another rank's shard is held on this node, directory not synced",
    **{f"parity.{part}": f"agent: {part} % of the parity of a set are computed and written" for part in PARTS},
    "parity.written": "agent: the parity of a set under a temporary name, not synced",
    "parity.renamed": "agent: parity and its document are there, directory not synced",
    "parity.durable": "agent: parity is held on this node",
    "level.written": "agent: what becomes of a whole checkpoint, under a temporary name",
    "level.linked": "agent: that is decided, the manifest is not there",
    "flush.begin": "agent: before anything is carried to the shared place",
    **{f"flush.{part}": f"agent: {part} % of a file are carried there" for part in PARTS},
    "flush.carried": "agent: all files of this rank are there, its record is not",
    "flush.gathered": "agent: the leader has seen the parts of all ranks there, no manifest",
    "flushed.renamed": "agent: carried, and noted on the node, directory not synced",
    "flushed.durable": "agent: carried, and noted on the node",
    "node.written": "trainer: who this node is, under a temporary name",
    "node.linked": "trainer: that is decided, directory not synced",
    **{f"rebuild.{part}": f"trainer: {part} % of a lost shard are computed again" for part in PARTS},
    "rebuild.computed": "trainer: a lost shard is computed again, under a temporary name",
    "chain.base": "agent: a base is committed, records against it are about to follow",
    "chain.started": "agent: the directory of a chain, no document",
    "chain.begin": "agent: a snapshot is about to be coded",
    "chain.writing": "agent: the head of a record is in the file, its body is not",
    "chain.appended": "agent: its record is durable, nobody told",
    "chain.prune": "agent: before an old chain goes",
    "lineage.linked": "trainer: the next lineage exists, directory not synced",
    "restore.loaded": "trainer: state is back, no lineage yet",
}
OF_MANY: Final = frozenset({"record.written", "record.linked", "records.gathered", "void.written", "void.linked"})
"""Points that only agents of many ranks pass; they pass all others but `record.renamed` and `record.durable` too."""
OF_LEVELS: Final = frozenset(
    point
    for point in POINTS
    if point.split(".")[0] in ("parity", "level", "flush", "flushed", "node", "rebuild")
    or point in ("copy.files", "copy.record.written", "copy.record.linked", *(f"copy.{part}" for part in PARTS))
)
"""Points that are passed only where checkpoints go to nodes first. A trainer that makes a lost shard again passes those
of copying too.
"""
OF_CHAINS: Final = frozenset(point for point in POINTS if point.startswith("chain."))
"""Points that are passed only with `deltas=`."""
OPERATIONS: Final = (
    "open", "write", "fallocate", "truncate", "fsync", "fsync_dir", "rename", "mkdir", "link", "unlink", "rmdir",
)  # fmt: skip


def _clause(variable: str) -> str | None:
    value = os.environ.get(variable)
    if not value:
        return None
    role, mark, rest = value.partition("!")
    if not mark:
        return value
    return rest if role == _role else None


def set_role(role: Role) -> None:
    """Say which process this is. Called once by the agent's main."""
    global _role, _crash, _faults
    _role = role
    _crash, _faults = _read_crash(), _read_faults()


def _read_crash() -> tuple[str, int, int, signal.Signals] | None:
    clause = _clause("STEPWELL_CRASH")
    if clause is None:
        return None
    point, rank, nth, *stop = clause.split(":")
    if point not in POINTS:
        raise ValueError(f"STEPWELL_CRASH names no known point: {point!r}; known: {', '.join(POINTS)}")
    return point, int(rank), int(nth), signal.SIGSTOP if stop == ["stop"] else signal.SIGKILL


def _read_faults() -> list[tuple[str, str, int, bool]]:
    clause = _clause("STEPWELL_FAULT")
    faults = []
    for part in clause.split(",") if clause else ():
        op, error, nth = part.split(":")
        if op not in (*OPERATIONS, "any"):
            raise ValueError(f"STEPWELL_FAULT names no known operation: {op!r}; known: {', '.join(OPERATIONS)}, any")
        faults.append((op, error, int(nth.rstrip("+")), nth.endswith("+")))
    return faults


_crash = _read_crash()
_faults = _read_faults()
_slow_copy = float(_clause("STEPWELL_SLOW_COPY") or 0)


def set_rank(rank: int) -> None:
    """Say which rank this process belongs to."""
    global _rank
    _rank = rank


def crash_point(name: str) -> None:
    """Die here by SIGKILL if a test asked for it: no handlers, no flushing, as a real kill."""
    if _crash is None or _crash[0] != name or _crash[1] != _rank:
        return
    with _lock:
        _counts[name] = count = _counts.get(name, 0) + 1
    if count == _crash[2] and _is_first():
        signal.pthread_kill(threading.get_ident(), _crash[3])  # this thread: no other line of ours runs after it


def crash_part(point: str, start: int, nbytes: int, total: int) -> None:
    """These bytes of `total` are done: pass those of `point.10`, `point.50` and `point.90` that lie among them."""
    if _crash is not None:
        for part in PARTS:
            if start <= total * part // 100 < start + nbytes:
                crash_point(f"{point}.{part}")


def _is_first() -> bool:
    mark = os.environ.get("STEPWELL_CRASH_MARK")
    if mark is None:
        return True
    try:
        fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    os.write(fd, b"%d" % os.getpid())
    os.close(fd)
    return True


def file_operation(op: str, path: object, length: int = 0) -> int:
    """Raise the error a test asked for at this operation; return how many bytes may be written."""
    if not _faults:
        return length
    with _lock:
        _counts[op] = count = _counts.get(op, 0) + 1
    for name, error, nth, onwards in _faults:
        if name in (op, "any") and (count == nth or (onwards and count > nth)):
            if error == "SHORT":
                return max(1, length // 2)
            number = getattr(errno, error)
            raise OSError(number, os.strerror(number), str(path))
    return length


def slow_copy() -> None:
    """Pause in a copier, so that tests can see what changes under a slow copy."""
    if _slow_copy:
        time.sleep(_slow_copy)
