"""Copies of CUDA leaves into the arena: on a side stream, from the live tensors or from copies on the device.

Owns:    streams, events, staging on the device, page-locking, and the measured wait at the gate.
Holds:   everything is ordered by streams and events; the host never waits here, except in `finish` (copier thread).
         The training thread only stages what may change before its copy is done; the copier thread issues the rest,
         as a few launches. Tensors that are being copied are held until then, so the allocator cannot reuse them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch

from stepwell.handover.memory import Arena
from stepwell.training.cuda.copy_graph import CopyBatch
from stepwell.training.cuda.runtime import lock_pages, unlock_pages
from stepwell.training.loop.waits import until
from stepwell.training.snapshot.program import CopySource

Strategy = Literal["device", "overlap", "blocking"]
_CHUNK_BYTES = 512 << 20
"""What is copied between two marks: the agent may begin to write up to a mark."""
_PAUSE_SECONDS = 0.02
"""In which others get at the driver."""
_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes are copied as integers of their width: no type is special."""


class CopyRun:
    """Leaves that lie one after the other in the image: staged into one buffer, copied to the host in one piece."""

    def __init__(self, start: int, kind: torch.dtype) -> None:
        self.start = start
        self.kind = kind
        self.sources: list[torch.Tensor] = []
        self.counts: list[int] = []
        self.nbytes = 0
        self._flat: list[torch.Tensor] = []

    def add(self, source: CopySource) -> None:
        """The next leaf."""
        self.sources.append(source.tensor)
        self.counts.append(source.nbytes // self.kind.itemsize)
        self.nbytes += source.nbytes
        if source.tensor.is_contiguous():
            self._flat.append(source.tensor.view(-1).view(self.kind))

    def stage(self) -> torch.Tensor:
        """A private copy on the device, on the current stream. Raises torch.OutOfMemoryError."""
        buffer = torch.empty(self.nbytes // self.kind.itemsize, dtype=self.kind, device=self.sources[0].device)
        views = list(buffer.split(self.counts))
        if len(self._flat) < len(self.sources):
            pairs = list(zip(self.sources, views, strict=True))
            views = [view for source, view in pairs if source.is_contiguous()]
            for source, view in pairs:
                if not source.is_contiguous():
                    view.view(source.dtype).view(source.shape).copy_(source)
        if views:
            torch._foreach_copy_(views, self._flat)
        return buffer


def _runs(sources: Sequence[CopySource]) -> list[CopyRun]:
    found: list[CopyRun] = []
    for source in sorted(sources, key=lambda source: source.start):
        kind = _WIDE.get(source.tensor.element_size(), torch.int64)
        if not found or found[-1].kind != kind or found[-1].start + found[-1].nbytes != source.start:
            found.append(CopyRun(source.start, kind))
        found[-1].add(source)
    return found


class DeviceProgram:
    """Leaves of one device. One that is kept, for leaves that stay, prepares the copies out of live tensors once."""

    def __init__(self, sources: Sequence[CopySource], *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        self._chunks = _chunks([source for source in sources if source.is_direct])
        self._staged = _runs([source for source in sources if not source.is_direct])
        self._all = _runs(sources)
        self.checked = [
            source
            for source in sources
            if source.is_checked and source.tensor.is_floating_point() and source.tensor.element_size() > 1
        ]
        self._batches: dict[tuple[int, int], list[tuple[int, CopyBatch]]] = {}
        self._lock = threading.Lock()

    def runs(self, strategy: Strategy) -> list[CopyRun]:
        """What has to be staged at the trigger."""
        return self._all if strategy == "device" else self._staged

    def batches(self, image: torch.Tensor, key: tuple[int, int], strategy: Strategy) -> list[tuple[int, CopyBatch]]:
        """Copies of live tensors into the slot that `key` names, each with its first byte in the image."""
        if strategy == "device":
            return []
        with self._lock:
            if key not in self._batches:
                self._batches[key] = [
                    (chunk[0].start, CopyBatch([_pair(image, source) for source in chunk], prepare=self._is_kept))
                    for chunk in self._chunks
                ]
            return self._batches[key]

    def starts(self, strategy: Strategy) -> list[int]:
        """First byte of every piece that is copied late."""
        direct = [] if strategy == "device" else [chunk[0].start for chunk in self._chunks]
        return direct + [start for run in self.runs(strategy) for start in _cuts(run)]

    def close(self) -> None:
        """Let go of the prepared copies. None may be running."""
        with self._lock:
            for _, batch in (pair for pairs in self._batches.values() for pair in pairs):
                batch.close()
            self._batches.clear()

    def largest(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest magnitude of each leaf in question, on the device and (later) on the host: infinite or NaN if one
        of its values is. Issued on the current stream.
        """
        if not self.checked:
            return None
        found = list(torch._foreach_norm([source.tensor for source in self.checked], float("inf")))
        if len({value.dtype for value in found}) > 1:
            found = [value.float() for value in found]
        on_device = torch.stack(found).float()
        return on_device, torch.empty(len(found), dtype=torch.float32, pin_memory=True).copy_(
            on_device, non_blocking=True
        )


def _chunks(sources: Sequence[CopySource]) -> list[list[CopySource]]:
    chunks: list[list[CopySource]] = []
    filled = _CHUNK_BYTES
    for source in sorted(sources, key=lambda source: source.start):
        if filled >= _CHUNK_BYTES:
            chunks.append([])
            filled = 0
        chunks[-1].append(source)
        filled += source.nbytes
    return chunks


def _pair(image: torch.Tensor, source: CopySource) -> tuple[torch.Tensor, torch.Tensor]:
    flat = source.tensor.view(-1).view(torch.uint8)
    return image[source.start : source.start + source.nbytes], flat


@dataclass
class DeviceJob:
    """Copies of one snapshot on one device. `image` is the slot (or the frozen image) as bytes."""

    device: torch.device
    strategy: Strategy
    program: DeviceProgram
    image: torch.Tensor
    key: tuple[int, int]
    is_live: bool
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream]
    ready: torch.cuda.Event
    staged: list[tuple[CopyRun, torch.Tensor]]
    done: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(blocking=True))
    issued: threading.Event = field(default_factory=threading.Event)
    marks: list[tuple[int, torch.cuda.Event]] = field(default_factory=list)
    largest: tuple[torch.Tensor, torch.Tensor] | None = None
    wait_from: torch.cuda.Event | None = None
    wait_to: torch.cuda.Event | None = None

    def issue(self) -> None:
        """Line everything up on the side streams. Called once, by the copier thread."""
        side, check = self.streams
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(side):
                side.wait_event(self.ready)
                pieces: list[tuple[int, Callable[[], None]]] = [
                    (start, lambda batch=batch: batch.launch(side))  # type: ignore[misc]
                    for start, batch in self.program.batches(self.image, self.key, self.strategy)
                ]
                pieces += [
                    (start, lambda run=run, buffer=buffer, start=start: self._drain(run, buffer, start))  # type: ignore[misc]
                    for run, buffer in self.staged
                    for start in _cuts(run)
                ]
                for start, copy in sorted(pieces, key=lambda piece: piece[0]):
                    copy()
                    mark = torch.cuda.Event(blocking=True)
                    mark.record(side)
                    self.marks.append((start, mark))
                with torch.cuda.stream(check):
                    check.wait_event(self.ready)
                    self.largest = self.program.largest()
                side.wait_stream(check)
                self.done.record(side)
        finally:
            self.issued.set()

    def _drain(self, run: CopyRun, buffer: torch.Tensor, start: int) -> None:
        low = start - run.start
        piece = buffer.view(torch.uint8)[low : low + _CHUNK_BYTES]
        self.image[start : start + piece.numel()].copy_(piece, non_blocking=True)

    def gate(self) -> None:
        """Let the compute stream wait for the copy, on the device. The host waits at most for the copier's launches."""
        if self.strategy == "device" or self.wait_to is not None:
            return
        until(self.issued, "the start of a copy on the device")
        stream = torch.cuda.current_stream(self.device)
        self.wait_from, self.wait_to = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait_from.record(stream)
        stream.wait_event(self.done)
        self.wait_to.record(stream)

    def stop(self) -> None:
        """The snapshot is lost: nobody waits for copies that were never issued; those that were are over on return."""
        self.issued.set()
        for stream in self.streams:
            with contextlib.suppress(RuntimeError):  # a device that is gone copies nothing
                stream.synchronize()

    def waited_seconds(self) -> float | None:
        """How long the compute stream stood at the gate, or copied on the device; None if not known (yet)."""
        if self.wait_from is None or self.wait_to is None or not self.wait_to.query():
            return None
        return float(self.wait_from.elapsed_time(self.wait_to)) / 1000

    def finish(self, on_copied: Callable[[int], None]) -> list[str]:
        """Wait for the copy, piece by piece; let go of the tensors. Returns leaves that hold non-finite values."""
        for start, mark in self.marks:
            mark.synchronize()
            if self.is_live:
                on_copied(start)
        self.done.synchronize()
        self.staged.clear()
        if self.largest is None:
            return []
        fine = torch.isfinite(self.largest[1]).tolist()
        return [source.name for source, is_fine in zip(self.program.checked, fine, strict=True) if not is_fine]


def _cuts(run: CopyRun) -> range:
    return range(run.start, run.start + run.nbytes, _CHUNK_BYTES)


class DeviceCopier:
    """Begins device copies. Two side streams per device, made at the first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def start(
        self,
        device: torch.device,
        program: DeviceProgram,
        strategy: Strategy,
        image: torch.Tensor,
        key: tuple[int, int],
        *,
        is_live: bool = True,
    ) -> DeviceJob:
        """Stage what may change, on the compute stream: ordered after the step that made it, before anything that
        could change it. Raises torch.OutOfMemoryError only for strategy `device`.
        """
        streams, compute = self._side_streams(device), torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(compute)
            staged = _stage(program.runs(strategy), strategy, image)
            after.record(compute)
        job = DeviceJob(device, strategy, program, image, key, is_live, streams, after, staged)
        if strategy == "device":
            job.wait_from, job.wait_to = before, after
        return job

    def _side_streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    def rehearse(
        self, device: torch.device, program: DeviceProgram, images: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        """Prepare the copies into each slot, and use every kernel once: its first use holds the device up."""
        side = self._side_streams(device)[1]
        # What fails here (no memory left) will fail, or not, at the first snapshot, which tells of it.
        with contextlib.suppress(RuntimeError), torch.cuda.device(device), torch.cuda.stream(side):
            for key, image in images.items():
                program.batches(image, key, "overlap")
            for run in program.runs("overlap"):
                run.stage()
            program.largest()
            side.synchronize()


def _stage(runs: Sequence[CopyRun], strategy: Strategy, image: torch.Tensor) -> list[tuple[CopyRun, torch.Tensor]]:
    staged = []
    for run in runs:
        try:
            staged.append((run, run.stage()))
        except torch.OutOfMemoryError:
            if strategy == "device":
                raise
            # No room on the device for a copy of what may change at any time: straight to the host, blocking.
            position = run.start
            for source, count in zip(run.sources, run.counts, strict=True):
                end = position + count * run.kind.itemsize
                image[position:end].view(source.dtype).view(source.shape).copy_(source)
                position = end
    return staged


def spare_bytes(device: torch.device) -> int:
    """Free device memory that a clone may take, less a reserve for what training may still ask for."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - max(1 << 30, total // 50))


class CudaPages:
    """Registers arenas with CUDA, so that copies run at full speed beside compute. Does nothing without CUDA."""

    def __init__(self) -> None:
        self._locked: dict[int, list[int]] = {}

    def lock(self, arena: Arena) -> bool:
        """Takes seconds for many gigabytes; False if there is no device or the driver refused.

        Slot by slot: meanwhile the driver lets nobody queue anything, nor after it, unless we leave it alone for a
        moment. No copy may reach from one to the next.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return False
        shape, locked = arena.shape, self._locked.setdefault(arena.address(), [])
        cuts = [0, *map(shape.start, range(1, shape.slots)), shape.nbytes]
        for start, end in pairwise(cuts):
            if not lock_pages(arena.address() + start, end - start):
                self.unlock(arena)
                return False
            locked.append(arena.address() + start)
            time.sleep(_PAUSE_SECONDS)
        return True

    def unlock(self, arena: Arena) -> None:
        """Undo `lock`, if it did something."""
        for address in self._locked.pop(arena.address(), []):
            unlock_pages(address)
