"""Finds and ends the processes a test left behind.

A process counts when this pytest process started it, directly or through others: it is a descendant, or (reparented
after its parent died) it carries this session's mark in its environment. And it must be ours: its command line names
stepwell or the session's temporary directory, which leaves alone what libraries keep for the whole session.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "STEPWELL_TEST_ID"


@dataclass(frozen=True)
class Process:
    pid: int
    started: int  # clock ticks after boot: tells a process from a later one with the same pid
    command: str


@dataclass(frozen=True)
class Stat:
    parent: int
    state: str
    started: int


def find(mark: str, words: Collection[str]) -> set[Process]:
    """All live processes started from here whose command line contains one of `words`."""
    stats = dict(read_stats())
    descendants = descend(os.getpid(), stats)
    found = set()
    for pid, stat in stats.items():
        if pid == os.getpid() or stat.state in "ZX":
            continue
        # argv[0] only by its last part: the interpreter's own path may well contain "stepwell".
        program, *arguments = read(pid, "cmdline").decode(errors="replace").split("\0")
        command = " ".join([Path(program).name, *arguments]).strip()
        if any(word in command for word in words) and (pid in descendants or is_marked(pid, mark)):
            found.add(Process(pid, stat.started, command))
    return found


def end(processes: Collection[Process], grace_seconds: float) -> list[Process]:
    """Give processes that are on their way out the time to leave, SIGKILL the others and return those."""
    deadline = time.monotonic() + grace_seconds
    left = []
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            stat = read_stat(process.pid)
            if stat is None or stat.started != process.started:
                continue  # gone, and the pid belongs to someone else: never signal it
            if not has_ended(handle, max(0.0, deadline - time.monotonic())):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                has_ended(handle, 10.0)
                left.append(process)
        finally:
            os.close(handle)
    return left


def has_ended(handle: int, timeout_seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def read_stats() -> Iterator[tuple[int, Stat]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read_stat(int(name))):
            yield int(name), stat


def read_stat(pid: int) -> Stat | None:
    # The second field is the name in parentheses and may contain anything: count from the last parenthesis.
    fields = read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    return Stat(parent=int(fields[1]), state=fields[0], started=int(fields[19])) if len(fields) > 19 else None


def descend(root: int, stats: dict[int, Stat]) -> set[int]:
    found: set[int] = set()
    new = {root}
    while new:
        found |= new
        new = {pid for pid, stat in stats.items() if stat.parent in new} - found
    return found - {root}


def is_marked(pid: int, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in read(pid, "environ").split(b"\0")


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process ended, or is another user's: then it is not ours
        return b""
