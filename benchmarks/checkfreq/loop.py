"""The loop that is timed, segments of it, and the synchronous baseline.

Owns:    when iterations ended, and which of them belong to what. A mark is set after the optimizer's step and before
         the checkpointer is called, so that all a checkpoint makes training wait for (call, copy, gate) lies in the
         one iteration that follows the mark of the step it saves.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from networks import Work
from peer.clock import Marks


@dataclass(frozen=True)
class Segment:
    """Iterations in a row: `first` is the number of the mark that its first iteration ended with."""

    first: int
    count: int

    @property
    def numbers(self) -> range:
        """Of its marks."""
        return range(self.first, self.first + self.count)


class Loop:
    """Iterations of a network, and their ends. One per process."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.marks = Marks(work.device)
        self.wall = time.time() - time.monotonic()
        """What turns a mark into the time that events carry."""

    def run(
        self,
        *,
        count: int | None = None,
        seconds: float = 1e9,
        after: Callable[[], None] = lambda: None,
        until: Callable[[], bool] = lambda: False,
    ) -> Segment:
        """So many iterations, or for so long, or until something is so (asked four times a second)."""
        first, started, asked = len(self.marks), time.monotonic(), 0.0
        while count is None or len(self.marks) - first < count:
            self.work.iterate()
            self.marks.mark()
            after()
            now = time.monotonic()
            if now - started > seconds:
                break
            if now - asked > 0.25:
                asked = now
                if until():
                    break
        return Segment(first, len(self.marks) - first)

    def lengths(self) -> list[float]:
        """`lengths[n]`: from mark n to mark n + 1; what is done after mark n is in it. Waits for the device."""
        return [b - a for a, b in pairwise(self.marks.ends())]


def warm(loop: Loop, *, quick: bool) -> Segment:
    """Kernels are chosen, memory is there."""
    return loop.run(count=5 if quick else 12)


def spans(segment: Segment, lengths: list[float]) -> list[float]:
    """How long the iterations of a segment took, its first left out: what came before is in that."""
    return [lengths[number - 1] for number in segment.numbers[1:]]


class Synchronous:
    """Save, and wait until it is durable, in the loop: `torch.save` and fsync. Two files take turns."""

    def __init__(self, folder: Path, work: Work) -> None:
        self._folder, self._work, self._saves = folder, work, 0
        folder.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        state = {"model": self._work.model.state_dict(), "optimizer": self._work.optimizer.state_dict()}
        target = self._folder / f"model-{self._saves % 2}.pt"
        self._saves += 1
        with open(self._folder / "partial", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._folder / "partial", target)
        descriptor = os.open(self._folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class OnDemand:
    """A policy: an automatic checkpoint at the end of the iteration in which `due` was set."""

    def __init__(self) -> None:
        self.due = False

    def is_due(self, moment: Any) -> bool:
        found, self.due = self.due, False
        return found


class EveryNth:
    """Calls something after each nth iteration, and notes after which."""

    def __init__(self, loop: Loop, nth: int, call: Callable[[], None]) -> None:
        self._loop, self._nth, self._call, self._since = loop, nth, call, 0
        self.at: list[int] = []

    def __call__(self) -> None:
        self._since += 1
        if self._since >= self._nth:
            self._since = 0
            self.at.append(len(self._loop.marks) - 1)
            self._call()


def summary(values: list[float]) -> dict[str, Any]:
    """Count, median, mean, extremes."""
    if not values:
        return {"n": 0}
    found = {"n": len(values), "median": statistics.median(values), "mean": statistics.fmean(values)}
    return {**found, "min": min(values), "max": max(values)}
