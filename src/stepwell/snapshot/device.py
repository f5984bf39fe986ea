"""Copies of CUDA leaves into the arena: on a side stream, from the live tensors or from clones on the device.

Owns:    streams, events, clones, page-locking, and the measured wait at the gate.
Holds:   everything is ordered by streams and events; the host never waits here, except in `finish` (copier thread).
         Tensors that are being copied are held until the copy is done, so the allocator cannot reuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from stepwell.arena.memory import Arena

Strategy = Literal["device", "overlap", "blocking"]


@dataclass(frozen=True)
class DeviceCopy:
    """One CUDA leaf and the host tensor (a view of the arena, same type and shape) it goes to."""

    name: str
    tensor: torch.Tensor
    target: torch.Tensor
    is_managed: bool


@dataclass
class DeviceJob:
    """Copies of one snapshot on one device."""

    device: torch.device
    strategy: Strategy
    done: torch.cuda.Event
    held: list[torch.Tensor]
    norms: torch.Tensor | None = None
    normed: list[str] = field(default_factory=list)
    wait_from: torch.cuda.Event | None = None
    wait_to: torch.cuda.Event | None = None

    def gate(self) -> None:
        """Let the compute stream wait for the copy, on the device. The host goes on at once."""
        if self.strategy != "overlap" or self.wait_to is not None:
            return
        stream = torch.cuda.current_stream(self.device)
        self.wait_from, self.wait_to = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait_from.record(stream)
        stream.wait_event(self.done)
        self.wait_to.record(stream)

    def waited_seconds(self) -> float | None:
        """How long the compute stream stood at the gate; None if not known (yet)."""
        if self.wait_from is None or self.wait_to is None or not self.wait_to.query():
            return None
        return float(self.wait_from.elapsed_time(self.wait_to)) / 1000

    def finish(self) -> list[str]:
        """Wait for the copy; let go of the tensors. Returns leaves whose norm is not finite."""
        self.done.synchronize()
        self.held.clear()
        if self.norms is None:
            return []
        return [name for name, fine in zip(self.normed, torch.isfinite(self.norms).tolist(), strict=True) if not fine]


class DeviceCopier:
    """Issues device copies. One side stream per device, made at the first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, device: torch.device, copies: Sequence[DeviceCopy], strategy: Strategy) -> DeviceJob:
        """Issue all copies of one device. Raises torch.OutOfMemoryError only for strategy `device`."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side, compute = self._streams[device], torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            # Whatever may change before its copy is done is cloned on the compute stream: ordered after the step
            # that made it, before anything that could change it.
            sources = [_source(copy, strategy) for copy in copies]
            side.wait_stream(compute)
            with torch.cuda.stream(side):
                job = DeviceJob(device, strategy, torch.cuda.Event(), list(sources))
                self._check_finite(job, copies, sources)
                for copy, source in zip(copies, sources, strict=True):
                    if source is not copy.target:
                        copy.target.copy_(source, non_blocking=True)
                job.done.record(side)
        return job

    def _check_finite(self, job: DeviceJob, copies: Sequence[DeviceCopy], sources: Sequence[torch.Tensor]) -> None:
        floating = [
            (copy.name, source)
            for copy, source in zip(copies, sources, strict=True)
            if copy.is_managed and source.is_floating_point() and source.element_size() > 1
        ]
        if floating:
            norms = torch._foreach_norm([source for _, source in floating])
            job.normed = [name for name, _ in floating]
            on_device = torch.stack([norm.float() for norm in norms])
            job.norms = torch.empty(len(norms), dtype=torch.float32, pin_memory=True)
            job.norms.copy_(on_device, non_blocking=True)
            job.held.append(on_device)


def _source(copy: DeviceCopy, strategy: Strategy) -> torch.Tensor:
    """What the side stream copies from: the live tensor, or a clone where that may change before."""
    if copy.is_managed and strategy != "device":
        return copy.tensor
    try:
        return copy.tensor.clone()
    except torch.OutOfMemoryError:
        if strategy == "device":
            raise
        copy.target.copy_(copy.tensor)  # no room for a clone of what may change at any time: blocking, to the host
        return copy.target


def spare_bytes(device: torch.device) -> int:
    """Free device memory that a clone may take, less a reserve for what training may still ask for."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - max(1 << 30, total // 50))


class CudaPages:
    """Registers arenas with CUDA, so that copies run at full speed beside compute. Does nothing without CUDA."""

    def lock(self, arena: Arena) -> bool:
        """Takes seconds for many gigabytes; False if there is no device or the driver refused."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return False
        return int(torch.cuda.cudart().cudaHostRegister(arena.address(), arena.shape.nbytes, 0)) == 0

    def unlock(self, arena: Arena) -> None:
        """Undo `lock`; harmless where it did nothing."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.cudart().cudaHostUnregister(arena.address())
