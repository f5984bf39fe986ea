"""Events never land in another file: a descriptor that was closed may be that of a shard a moment later."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from stepwell.events import event_file, run_events
from stepwell.events.journal import EventLog, read_events

SECONDS = 30.0


class Watched:
    """A lock that tells when somebody asks for it a second time. With the safety off it locks nothing."""

    def __init__(self, *, is_off: bool) -> None:
        self._lock, self._is_off = threading.Lock(), is_off
        self._count, self.asked_again = 0, threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        self._count += 1
        if self._count == 2:
            self.asked_again.set()
        return self._is_off or self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        if not self._is_off:
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def make_log(path: Path) -> tuple[EventLog, int]:
    """A log with one line, and its descriptor."""
    log = EventLog(path, who="trainer")
    emit(log, 0)
    assert log._file._fd is not None
    return log, log._file._fd


def emit(log: EventLog, step: int) -> None:
    log.emit(run_events.SnapshotSkipped(step=step, reason="no memory yet"))


def open_shards(folder: Path, number: int) -> list[int]:
    """Shards, until one has this descriptor, if it is free."""
    found: list[int] = []
    while number not in found and len(found) < 64:
        found.append(os.open(folder / f"shard.{len(found)}", os.O_WRONLY | os.O_CREAT))
    return found


def written_to_shards(folder: Path, shards: list[int]) -> bytes:
    for fd in shards:
        os.close(fd)
    return b"".join(path.read_bytes() for path in sorted(folder.glob("shard.*")))


def steps(log: EventLog) -> list[int]:
    return [event["step"] for event in read_events(log.path)]


@pytest.mark.parametrize("is_off", [False, True])
def test_a_close_waits_for_the_end_of_a_write(is_off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the thread that looks for notices logs while the run is closed. Control: without the lock it lands in a
    shard.
    """
    log, number = make_log(tmp_path / "events.jsonl")
    watched = log._writing = Watched(is_off=is_off)  # type: ignore[assignment]
    has_begun, may_go, real = threading.Event(), threading.Event(), os.write

    def write(fd: int, data: Any) -> int:
        if fd == number:
            has_begun.set()
            assert may_go.wait(SECONDS)
        return real(fd, data)

    monkeypatch.setattr(event_file.os, "write", write)
    writer = threading.Thread(target=emit, args=(log, 1))
    writer.start()
    assert has_begun.wait(SECONDS)
    closer = threading.Thread(target=log.close)
    closer.start()
    assert watched.asked_again.wait(SECONDS)
    if is_off:
        closer.join(SECONDS)  # it does not wait for the write
    shards = open_shards(tmp_path, number)
    may_go.set()
    for thread in (writer, closer):
        thread.join(SECONDS)
        assert not thread.is_alive()
    landed = written_to_shards(tmp_path, shards)
    assert (b"no memory yet" in landed) == is_off
    assert steps(log) == ([0] if is_off else [0, 1])


@pytest.mark.parametrize("is_off", [False, True])
def test_an_event_after_the_end_goes_to_the_file_again(is_off: bool, tmp_path: Path) -> None:
    """As the last word of a grace time that ends while the run does. Control: by the old number, in a shard."""
    log, number = make_log(tmp_path / "events.jsonl")
    log.close()
    shards = open_shards(tmp_path, number)
    assert number in shards
    if is_off:
        log._file._fd = number
    emit(log, 1)
    if is_off:
        log._file._fd = None
    log.close()
    landed = written_to_shards(tmp_path, shards)
    assert (b"no memory yet" in landed) == is_off
    assert steps(log) == ([0] if is_off else [0, 1])
