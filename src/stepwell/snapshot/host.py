"""Copies of leaves into the arena by the host, and the one thread that finishes snapshots.

Owns:    the copier thread, and how a tensor's bytes get into a slot.
Holds:   the copy runs without the interpreter lock; the training thread is never needed to finish a snapshot.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stepwell.events import logger
from stepwell.faults import crash_point, slow_copy


@dataclass(frozen=True)
class HostCopy:
    """One leaf on the CPU and the address its bytes go to."""

    tensor: torch.Tensor
    address: int
    nbytes: int

    def run(self) -> None:
        """Copy now."""
        if not self.nbytes:
            return
        source = self.tensor if self.tensor.is_contiguous() else self.tensor.contiguous()
        ctypes.memmove(self.address, source.data_ptr(), self.nbytes)


def copy_all(copies: Sequence[HostCopy]) -> None:
    """Copy leaves while training runs; a test may slow this down or kill it half-way."""
    for number, copy in enumerate(copies):
        if number == len(copies) // 2:
            crash_point("copy.middle")
        slow_copy()
        copy.run()


class Copier:
    """One daemon thread that runs jobs in order. Starts with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread. It must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="stepwell-copier")
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a job tells of its own failures; this thread must live on for the next one
                logger.exception("a snapshot's bookkeeping failed")

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
