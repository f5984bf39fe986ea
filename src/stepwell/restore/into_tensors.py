"""Verified blocks into tensors: copied on the host, through page-locked staging to a CUDA device.

Owns:    the staging memory and the streams of a restore.
Before:  `read` verified the block.   After: `load` gives the tensors to the objects.
Holds:   when a lane is closed all its bytes have arrived, on the device too; nothing is copied from memory that is
         being overwritten, and nothing into memory that work queued before the restore still uses.

To a device each thread has two rooms: while one is on its way the other is filled. Page-locking the arena itself would
take seconds, this staging a fifth of a millisecond a megabyte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence, Set
from types import TracebackType
from typing import Any, Final

import torch

from stepwell.errors import DamagedError
from stepwell.handover.memory import PAGE, whole_pages
from stepwell.restore.byte_sources import ReadBuffer
from stepwell.restore.verified_read import Lane, Piece
from stepwell.training.cuda.runtime import HOST_TO_DEVICE, PORTABLE, forget_error, lock_pages, quick_copy, unlock_pages
from stepwell.training.state.strides import as_words, fill

_Place = tuple[int, bool]
"""Address of a tensor, and whether its memory is fresh."""
_WORTH_ASKING: Final = 256 << 10
_ROOMS: Final = 2
HUGE_PAGES = True
"""For the staging: a few pages are locked faster than thousands. Where the kernel has none it gives small ones."""
_MADV_POPULATE_WRITE: Final = 23
_libc = ctypes.CDLL(None)


class Placing:
    """Tensors that are being filled, by the name of their leaf. Leaves without a tensor are passed over.

    No element of a tensor shares its memory with another one. Waits for nothing; what the current streams are doing is
    waited for by the lanes.

    fresh:  names of tensors whose memory nobody has touched yet
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], fresh: Set[str] = frozenset()) -> None:
        self._held = tensors  # their addresses are used
        some = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        lines = {name: tensor for name, tensor in some.items() if tensor.is_contiguous()}
        self._on_host = {name: (tensor.data_ptr(), name in fresh) for name, tensor in lines.items() if tensor.is_cpu}
        self._flat = {name: tensor.view(-1).view(torch.uint8) for name, tensor in lines.items() if not tensor.is_cpu}
        self._woven = {name: as_words(tensor) for name, tensor in some.items() if name not in lines}
        self._is_on_host = all(tensor.is_cpu for tensor in some.values())
        devices = {tensor.device for tensor in some.values() if tensor.is_cuda}
        self._ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._staging: list[_Staging] = []

    def __enter__(self) -> Placing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for staging in self._staging:
            staging.close()

    def lane(self, nbytes: int) -> Lane:
        """See `read.Lanes`."""
        if self._is_on_host:
            return _HostLane(self._on_host, self._woven, nbytes)
        places = self._on_host, self._flat, self._woven
        if not self._ready:
            return _DeviceLane(*places, {}, self._take(nbytes), self._staging)
        with torch.cuda.device(next(iter(self._ready))):  # a new thread would make a context on the first device
            staging = self._take(nbytes)
        try:
            streams = {device: torch.cuda.Stream(device) for device in self._ready}
            for device, stream in streams.items():
                stream.wait_event(self._ready[device])
            return _DeviceLane(*places, streams, staging, self._staging)
        except BaseException:
            self._staging.append(staging)  # closed with the others, or it would stay page-locked
            raise

    def _take(self, nbytes: int) -> _Staging:
        """Staging that a lane for an earlier file left, or new one."""
        try:
            found = self._staging.pop()
        except IndexError:
            return _Staging(nbytes, is_locked=bool(self._ready))
        if found.nbytes >= whole_pages(nbytes):
            return found
        found.close()
        return _Staging(nbytes, is_locked=bool(self._ready))


def _move(place: _Place, offset: int, source: int, nbytes: int) -> None:
    """Copy on the host. Fresh pages come from the kernel in one call: a fault for each costs more than the copy."""
    start, is_fresh = place
    if is_fresh and nbytes >= _WORTH_ASKING:
        first = (start + offset) // PAGE * PAGE  # a kernel that does not know the call says so: then they are faulted
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + offset + nbytes - first), _MADV_POPULATE_WRITE)
    ctypes.memmove(start + offset, source, nbytes)


def _weave(words: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """Copy bytes, row by row as they lie in the file, into a tensor that lies otherwise. On the current stream."""
    width = words.element_size()
    if offset % width or data.numel() % width:
        raise DamagedError("the block of a leaf ends within an element", found=offset)
    if data.storage_offset() % width:
        data = data.clone()
    with torch.no_grad():
        fill(words, offset // width, data.view(words.dtype))


class _HostLane:
    """One room, and a copy from it into the tensors."""

    def __init__(self, on_host: Mapping[str, _Place], woven: Mapping[str, torch.Tensor], nbytes: int) -> None:
        self._on_host, self._woven = on_host, woven
        self._room = ReadBuffer(nbytes)

    def room(self) -> memoryview:
        return self._room.view

    def deliver(self, block: memoryview, pieces: Sequence[Piece]) -> None:
        for leaf, offset, low, high in pieces:
            if leaf.name in self._on_host:
                _move(self._on_host[leaf.name], offset, self._room.address + low, high - low)
            elif leaf.name in self._woven:
                _weave(self._woven[leaf.name], offset, torch.frombuffer(self._room.memory, dtype=torch.uint8)[low:high])

    def close(self) -> None:
        self._room.close()


class _Staging:
    """Rooms in page-locked memory. If the driver refuses to lock it, copies are slower and as right."""

    def __init__(self, nbytes: int, *, is_locked: bool) -> None:
        self.nbytes = whole_pages(nbytes)
        self._room = ReadBuffer(_ROOMS * self.nbytes, huge=is_locked and HUGE_PAGES)
        self.is_locked = is_locked and lock_pages(self._room.address, self._room.nbytes, PORTABLE)
        self.starts = [turn * self.nbytes for turn in range(_ROOMS)]
        self.views = [self._room.view[start : start + self.nbytes] for start in self.starts]

    def tensor(self) -> torch.Tensor:
        """All rooms as bytes."""
        return torch.frombuffer(self._room.memory, dtype=torch.uint8)

    def address(self, turn: int) -> int:
        """Where a room lies."""
        return self._room.address + self.starts[turn]

    def close(self) -> None:
        if self.is_locked:
            unlock_pages(self._room.address)
        for view in self.views:
            view.release()
        self._room.close()


class _DeviceLane:
    """Rooms in turn: each is filled again only when the copies from it have ended."""

    def __init__(
        self,
        on_host: Mapping[str, _Place],
        flat: Mapping[str, torch.Tensor],
        woven: Mapping[str, torch.Tensor],
        streams: Mapping[torch.device, torch.cuda.Stream],
        staging: _Staging,
        idle: list[_Staging],
    ) -> None:
        self._on_host, self._flat, self._woven, self._streams = on_host, flat, woven, streams
        self._staging, self._idle = staging, idle
        self._bytes = list(staging.tensor().split(staging.nbytes))
        self._events = [{device: torch.cuda.Event(blocking=True) for device in streams} for _ in range(_ROOMS)]
        self._used: list[set[torch.device]] = [set() for _ in range(_ROOMS)]
        self._turn = 0
        self._copy: Any = quick_copy() if staging.is_locked else None
        self._queues = {device: stream.cuda_stream for device, stream in streams.items()}
        if streams:
            self._before = torch.cuda.current_device(), [torch.cuda.current_stream(device) for device in streams]
            for stream in streams.values():
                torch.cuda.set_stream(stream)  # of this thread; sets the device too

    def room(self) -> memoryview:
        self._turn = (self._turn + 1) % _ROOMS
        for device in self._used[self._turn]:
            if not self._events[self._turn][device].query():
                self._events[self._turn][device].synchronize()
        self._used[self._turn].clear()
        return self._staging.views[self._turn]

    def deliver(self, block: memoryview, pieces: Sequence[Piece]) -> None:
        turn = self._turn
        data, address, used = self._bytes[turn], self._staging.address(turn), self._used[turn]
        for leaf, offset, low, high in pieces:
            flat = self._flat.get(leaf.name)
            if flat is not None:
                is_async = flat.device in self._streams
                if is_async and self._copy is not None:
                    self._queue(flat.data_ptr() + offset, address + low, high - low, self._queues[flat.device])
                else:
                    flat[offset : offset + high - low].copy_(data[low:high], non_blocking=is_async)
                if is_async:
                    used.add(flat.device)
            elif leaf.name in self._on_host:
                _move(self._on_host[leaf.name], offset, address + low, high - low)
            elif leaf.name in self._woven:
                woven = self._woven[leaf.name]
                _weave(woven, offset, data[low:high])
                if woven.device in self._streams:
                    used.add(woven.device)
        for device in used:
            self._events[turn][device].record(self._streams[device])

    def _queue(self, target: int, source: int, nbytes: int, stream: int) -> None:
        status = self._copy(target, source, nbytes, HOST_TO_DEVICE, stream)
        if status:
            forget_error()
            raise RuntimeError(f"CUDA refused to copy restored bytes to the device (error {status})")

    def close(self) -> None:
        try:
            for stream in self._streams.values():
                stream.synchronize()
        finally:
            if self._streams:
                device, streams = self._before
                for stream in streams:
                    torch.cuda.set_stream(stream)
                torch.cuda.set_device(device)
            self._bytes.clear()
            self._idle.append(self._staging)
