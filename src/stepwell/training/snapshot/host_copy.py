"""Copies of leaves into the arena by the host, and the one thread that finishes snapshots.

Owns:    the copier thread, the copying threads beside it, and how a tensor's bytes get into a slot.
Holds:   the copying threads have a low priority: they use what training leaves idle, and at the gate the training
         thread copies too, so nobody waits for them; each byte is read once, the look for non-finite values happens
         while it is in the cache; the copy runs without the interpreter lock.
"""

from __future__ import annotations

import cmath
import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from stepwell.events.run_events import logger
from stepwell.faults import crash_point, slow_copy
from stepwell.training.loop.waits import until
from stepwell.training.snapshot.program import CopySource

_PIECE_BYTES = 4 << 20
_CHECKED_BYTES = 1 << 20
"""A piece that is also looked at stays in the cache between the two."""
_MANY, _SMALL_BYTES = 512, 64 << 10
"""With more leaves than this, small ones are copied in groups: each by itself costs more than its bytes."""
_MAX_THREADS = 4
_NICE = 10
_END_SECONDS = 10.0
"""What copies longer after the end of the run ends with the process."""


@dataclass(frozen=True)
class HostCopy:
    """Part of a leaf on the CPU, and the address its bytes go to. `start`: in the live image, None outside."""

    tensor: torch.Tensor
    address: int
    nbytes: int
    name: str = ""
    start: int | None = None
    is_checked: bool = False
    is_first: bool = True

    def run(self) -> None:
        """Copy now."""
        if not self.nbytes:
            return
        source = self.tensor if self.tensor.is_contiguous() else self.tensor.contiguous()
        ctypes.memmove(self.address, source.data_ptr(), self.nbytes)

    def run_and_look(self, suspects: dict[str, None]) -> None:
        """Copy, and add its name if it holds an infinity or a NaN."""
        if self.is_checked and self.name not in suspects and has_non_finite(self.tensor):
            suspects[self.name] = None
        self.run()


@dataclass(frozen=True)
class HostGroup:
    """Small leaves of one type that lie side by side in the image at `address`."""

    sources: list[CopySource]
    address: int
    start: int | None
    is_first: ClassVar[bool] = True

    def run_and_look(self, suspects: dict[str, None]) -> None:
        """Copy, and add the names of those that hold an infinity or a NaN: one look at all of them is enough mostly."""
        first, last = self.sources[0], self.sources[-1]
        nbytes = last.start + last.nbytes - first.start
        memory = (ctypes.c_char * nbytes).from_address(self.address + first.start)
        image = torch.frombuffer(memory, dtype=first.tensor.dtype)
        with torch.no_grad():
            flat = [source.tensor.view(-1) for source in self.sources]
            copies = image.split([tensor.numel() for tensor in flat])
            torch._foreach_copy_(copies, flat)  # one call, without the interpreter's lock
            if first.is_checked and has_non_finite(image):
                pairs = zip(self.sources, copies, strict=True)
                suspects.update({source.name: None for source, copy in pairs if has_non_finite(copy)})


def line_up(sources: Sequence[CopySource], address: int, *, is_live: bool = True) -> list[HostCopy | HostGroup]:
    """The work that several threads share: large leaves in pieces, many small ones in groups."""
    if len(sources) < _MANY:
        return [copy for source in sources for copy in pieces(source, address, is_live=is_live)]
    found: list[HostCopy | HostGroup] = []
    group: list[CopySource] = []
    for source in [*sorted(sources, key=lambda source: source.start), None]:
        if group and (source is None or not _continues(group, source)):
            found.append(HostGroup(group, address, group[0].start if is_live else None))
            group = []
        if source is None:
            break
        tensor = source.tensor
        if source.nbytes <= _SMALL_BYTES and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            group.append(source)
        else:
            found += pieces(source, address, is_live=is_live)
    return found


def _continues(group: list[CopySource], source: CopySource) -> bool:
    last = group[-1]
    return (
        last.start + last.nbytes == source.start
        and last.tensor.dtype == source.tensor.dtype
        and last.is_checked == source.is_checked
        and source.start + source.nbytes - group[0].start <= _CHECKED_BYTES
    )


def pieces(source: CopySource, address: int, *, is_live: bool = True) -> Iterator[HostCopy]:
    """A leaf in pieces that several threads can share; `address` is that of the image."""
    size = _CHECKED_BYTES if source.is_checked else _PIECE_BYTES
    if source.nbytes <= size or not source.tensor.is_contiguous():
        start = source.start if is_live else None
        yield HostCopy(source.tensor, address + source.start, source.nbytes, source.name, start, source.is_checked)
        return
    flat, width = source.tensor.view(-1), source.tensor.element_size()
    step = size // width
    for low in range(0, flat.numel(), step):
        part, offset = flat[low : low + step], source.start + low * width
        start = offset if is_live else None
        yield HostCopy(part, address + offset, part.nbytes, source.name, start, source.is_checked, low == 0)


def has_non_finite(tensor: torch.Tensor) -> bool:
    """Whether a host tensor holds an infinity or a NaN. A finite sum proves it does not."""
    wide = tensor.float() if tensor.element_size() < 4 else tensor
    if cmath.isfinite(wide.sum().item()):
        return False
    return not bool(torch.isfinite(wide).all())


class HostWork:
    """The copies of one snapshot, shared by all threads that call `help`."""

    def __init__(self, copies: Sequence[HostCopy | HostGroup], on_copied: Callable[[int], None]) -> None:
        self._left = iter(enumerate(copies))
        self._middle = len(copies) // 2
        self._count = len(copies)
        self._on_copied = on_copied
        self._lock = threading.Lock()
        self.suspects: dict[str, None] = {}
        self.error: Exception | None = None
        self.copied = threading.Event()
        if not copies:
            self.copied.set()

    def help(self) -> None:
        """Copy what nobody copies yet. Never raises: an error is kept, and voids the snapshot."""
        if self.copied.is_set():
            return
        with _computing_alone():
            self._help()

    def _help(self) -> None:
        for number, copy in self._left:
            try:
                if number == self._middle:
                    crash_point("copy.middle")
                if copy.is_first:
                    slow_copy()
                if self.error is None:
                    self._copy(copy)
            except Exception as error:
                self.error = error
            with self._lock:
                self._count -= 1
                if not self._count:
                    self.copied.set()

    def stop(self, error: Exception) -> None:
        """The snapshot is lost: copy nothing more. On return no thread writes to its slot any more."""
        self.error = self.error or error
        self.help()
        until(self.copied, "the end of a copy")

    def _copy(self, copy: HostCopy | HostGroup) -> None:
        copy.run_and_look(self.suspects)
        if copy.start is not None:
            self._on_copied(copy.start)


class Copier:
    """One daemon thread that runs jobs in order, and a few that copy for it. They start with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[HostWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._helpers: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread. It must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="stepwell-copier")
            self._thread.start()
        self._jobs.put(job)

    def copy(self, work: HostWork) -> None:
        """Let the copying threads begin."""
        if work.copied.is_set():
            return
        if not self._helpers:
            count = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
            self._helpers = [
                threading.Thread(target=self._help, daemon=True, name=f"stepwell-copy-{number}")
                for number in range(count)
            ]
            for helper in self._helpers:
                helper.start()
        for _ in self._helpers:
            self._work.put(work)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a job tells of its own failures; this thread must live on for the next one
                logger.exception("an error in the bookkeeping of a snapshot")

    def _help(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (work := self._work.get()) is not None:
            work.help()

    def close(self) -> None:
        """Finish what was submitted, then end the threads."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END_SECONDS)
            self._thread = None
        for _ in self._helpers:
            self._work.put(None)
        for helper in self._helpers:
            helper.join(_END_SECONDS)
        self._helpers = []


@lru_cache(maxsize=1)
def _thread_libraries() -> list[ctypes.CDLL]:
    """The OpenMP libraries of this process, as torch loaded them."""
    torch.get_num_threads()
    with open("/proc/self/maps") as file:
        names = ("libgomp", "libiomp5", "libomp")
        found = {line.split()[-1] for line in file if any(f"/{name}" in line for name in names)}
    libraries = []
    for path in found:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path)
            library.omp_set_num_threads.restype = None
            libraries.append(library)
    return libraries


@contextlib.contextmanager
def _computing_alone() -> Iterator[None]:
    """Let torch use this thread alone for what it computes here: its other threads would take the cores from those
    that copy (measured: 0.25 s instead of 0.11 for 1.2 GB). The number belongs to the calling thread only.
    """
    threads = torch.get_num_threads()  # torch sets a thread up at its first use: after this it leaves the number alone
    for library in _thread_libraries():
        library.omp_set_num_threads(1)
    try:
        yield
    finally:
        for library in _thread_libraries():
            library.omp_set_num_threads(threads)
