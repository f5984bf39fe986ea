"""The line between ranks, on real sockets: opening it, a word of all ranks and to all, and connections."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

from many.crowd import MOST_GUARDED, Process, descriptors, play
from many.report import Row
from stepwell.ranks.line.line import Line

ABOUT = __doc__
COLUMNS = (
    "open s", "open CPU s", "CPU s of rank 0", "of a node's first rank, ms", "of another rank, ms",
    "all to rank 0 s", "rank 0 to all s", "close s",
    "descriptors of rank 0", "of a node's first", "of another", "of all, counted",
)  # fmt: skip
FIT = ("open CPU s", "CPU s of rank 0", "all to rank 0 s", "rank 0 to all s", "descriptors of rank 0")
_SECONDS = 300.0
_KEY = b"k" * 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(size: int, options: argparse.Namespace) -> Row:
    """One row."""
    found, _ = play(size, options.processes, options.node_size, _work)
    row: Row = {name: max(result[name] for result in found) for name in found[0] if name.endswith(" s")}
    row["open CPU s"] = sum(result["open CPU s"] for result in found)
    counts = [count for result in found for count in result["descriptors"]]
    firsts = counts[options.node_size :: options.node_size]
    others = [count for rank, count in enumerate(counts) if rank % options.node_size]
    row["descriptors of rank 0"] = counts[0]
    row["of a node's first"] = max(firsts) if firsts else counts[0]
    row["of another"] = max(others) if others else counts[-1]
    busy = [seconds for result in found for seconds in result["busy"]]
    row["CPU s of rank 0"] = busy[0]
    row["of a node's first rank, ms"] = 1e3 * statistics.median(busy[options.node_size :: options.node_size] or busy)
    row["of another rank, ms"] = 1e3 * statistics.median(
        [seconds for rank, seconds in enumerate(busy) if rank % options.node_size] or busy
    )
    row["of all, counted"] = f"{sum(counts)}, {sum(result['counted'] for result in found)}"
    return row


class _End:
    def __init__(self, group: Any) -> None:
        self.group, self.heard, self.changed = group, 0, threading.Condition()
        self.line = Line(group, _KEY, self._hear, lambda rank: None)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        with self.changed:
            self.heard += 1
            self.changed.notify_all()

    def until(self, count: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.heard >= count, _SECONDS):
                raise TimeoutError(f"rank {self.group.rank} heard {self.heard} of {count}")


def _work(process: Process) -> dict[str, Any]:
    found: dict[str, Any] = {}
    process.all_do(lambda group: group.open(_SECONDS))
    process.share_tables()
    ends = {group.rank: _End(group) for group in process.groups}
    before = descriptors()
    busy: dict[int, float] = {}

    def open_line(group: Any) -> None:
        spent: list[float] = []
        process.spent.seconds, began = spent, time.thread_time()
        line = ends[group.rank].line
        line.open(_SECONDS)
        own = time.thread_time() - began + (sum(spent) if group.size <= MOST_GUARDED else 0.0)
        busy[group.rank] = own + time.clock_gettime(time.pthread_getcpuclockid(line._thread.ident))

    found["open s"] = process.all_do(open_line)
    found["open CPU s"] = process.cpu_seconds
    found["busy"] = [busy[rank] for rank in process.ranks]
    found["descriptors"] = [_descriptors(end.line) for end in ends.values()]
    found["counted"] = descriptors() - before
    process.barrier.wait(_SECONDS)

    def speak(group: Any) -> None:
        if group.rank == 0:
            ends[0].until(group.size - 1)
        else:
            ends[group.rank].line.send({"type": "ready", "is_ready": True})

    def listen(group: Any) -> None:
        if group.rank == 0:
            ends[0].line.send({"type": "plan", "step": 1, "what": "save"})
        else:
            ends[group.rank].until(1)

    found["all to rank 0 s"] = process.all_do(speak)
    found["rank 0 to all s"] = process.all_do(listen)
    found["close s"] = process.all_do(lambda group: ends[group.rank].line.close())
    return found


def _descriptors(line: Any) -> int:
    """What this rank's line holds open: its connections, a selector and an eventfd."""
    wires = line._hub.wires if hasattr(line, "_hub") else line._wires
    return len(wires) + 2
