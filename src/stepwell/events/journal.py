"""The events of a run: one line per event in its file, mirrored into standard `logging`.

Owns:    what is written to `events.jsonl`, and the lines a person sees on the terminal.
Not:     the file, and how it stays bounded (eventfile).
Holds:   a torn or foreign line is skipped by readers; losing an event never costs a checkpoint or a training step.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepwell.events.event_file import EventFile, most_bytes, opened
from stepwell.events.run_events import Event, Log, logger

_CLOSE_SECONDS = 5.0
_MOST_WAITING = 100_000
_MAX_LINE_BYTES = 1 << 20
_AGAIN_SECONDS = 60.0


class EventLog:
    """Appends events to one file. Never raises for a full or broken disk: it says so once in the log.

    `background`: lines are written by a thread of its own, so that a file system that hangs does not hold training up.
    """

    def __init__(self, path: Path, *, who: str, lineage: int = 0, rank: int = 0, background: bool = False) -> None:
        self.path = path
        self.who = who
        self.rank = rank
        self.lineage = lineage
        self._background = background
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._file = EventFile(path, most_bytes())
        self._writing = threading.Lock()
        self._failed = False
        self._kept: list[tuple[int, dict[str, Any]]] = []
        self._said: dict[str, Any] = {}
        self._said_at = 0.0

    def emit(self, event: Event) -> None:
        """Write one line and mirror it into `logging`: not again, for a while, what was said last, of another step."""
        if event.severity() > logging.DEBUG and not self._is_said(event):
            logger.log(event.severity(), "%s", event.text())
        else:
            logger.debug("%s", event.kind)
        line = {
            "time": time.time(),
            "who": self.who,
            "process": os.getpid(),
            "lineage": self.lineage,
            "kind": event.kind,
            **({"rank": self.rank} if self.rank else {}),
        }
        line.update(asdict(event))
        data = json.dumps(line, default=str).encode() + b"\n"
        if not self._background:
            self._write(data)
            return
        self.later(lambda: self._write(data))

    def _is_said(self, event: Event) -> bool:
        """Whether nothing else was said since; else it is from now on. Warnings are never."""
        said, now = {**asdict(event), "kind": event.kind, "step": None}, time.monotonic()
        if said == self._said and now < self._said_at + _AGAIN_SECONDS and event.severity() < logging.WARNING:
            return True
        self._said, self._said_at = said, now
        return False

    def later(self, call: Callable[[], None]) -> None:
        """Run a call on the writing thread, in order. Dropped while the file system hangs and too many wait."""
        with self._lock:
            if self._thread is None:
                self._start()
        if self._calls.qsize() < _MOST_WAITING:
            self._calls.put(call)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._drain, daemon=True, name="stepwell-events")
        self._thread.start()

    def _drain(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _write(self, data: bytes) -> None:
        try:
            with self._writing:  # to the end of the write: a closed descriptor may soon be that of a shard
                self._file.append(data)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("Cannot write %s: %s; stepwell drops events until this works again", self.path, error)
            self._failed = True

    def keep(self, step: int, values: dict[str, Any]) -> None:
        """Note logged values; tensors are turned into numbers by `flush`, a step later, so nothing waits here."""
        kept = {key: value.detach() if hasattr(value, "detach") else value for key, value in values.items()}
        self._kept.append((step, kept))

    def flush(self, until: int | None = None) -> None:
        """Write the values that were kept, of steps up to `until` only if given."""
        kept, self._kept = self._kept, []
        for step, values in kept:
            if until is not None and step > until:
                self._kept.append((step, values))
                continue
            plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in values.items()}
            self.emit(Log(step=step, values=plain))

    def close(self) -> None:
        """Write what is left and close the file; a later emit opens it again."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return  # the file system hangs: the thread ends with the process
            with self._lock:
                self._thread = None
                if not self._calls.empty():  # said since: for a thread of its own
                    self._start()
        if not self._writing.acquire(timeout=_CLOSE_SECONDS):
            return  # the same
        try:
            self._file.close()
        finally:
            self._writing.release()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All readable lines of an event file and of its older parts, in order; torn, foreign or endless ones are skipped.

    What was dropped of a long run is counted in a line of kind `thinned`, the first one.
    """
    with opened(path) as parts:
        for part in parts:
            while line := part.file.readline(_MAX_LINE_BYTES):
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
