"""Records applied together on a device: what `moving` does, where the process that restores has one anyway.

Owns:    the state of a part on the device while records are applied to it.
Before:  `parts` read what each record says of a part.   After: `replay` takes the digest of the state, on the host.
Holds:   the same sums in the same order, so the same bits as on the host. Until all records are applied the state on
         the host is as it was.

Threads of the host only decompress, a record each, in a few long calls: where they add too, they let go of the
interpreter's lock so often that sixteen of them mostly wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Protocol

import numpy as np
import torch

from stepwell.errors import DamagedError
from stepwell.storage.chain.apply import AppliedRecord
from stepwell.storage.chain.apply_threads import Crew
from stepwell.storage.codecs.assignment import CodedPart
from stepwell.storage.codecs.floats import Bytes, Floats
from stepwell.storage.codecs.quantise import look_up, packed_nbytes
from stepwell.storage.codecs.sparse import Filler, Sparse

_STRETCH: Final = 8 << 20
"""Packed symbols that are looked up at once: of two bits, 128 MiB of differences. A multiple of eight."""
_AHEAD_NBYTES: Final = 512 << 20
"""Packed symbols of records that are decompressed before they are applied. One always is."""
_MOST_THREADS: Final = 8


class Sized(AppliedRecord, Protocol):
    """symbols_nbytes: of all symbols, packed."""

    @property
    def symbols_nbytes(self) -> int: ...


def find_device() -> torch.device | None:
    """The one that holds most of what this process has on any; None: it has nothing there."""
    if not torch.cuda.is_initialized():
        return None
    held = {number: torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count())}
    most = max(held, key=held.__getitem__, default=0)
    return torch.device("cuda", most) if held.get(most) else None


def give_back(device: torch.device) -> None:
    """What was used, to the driver: others may need it."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def move_on(
    part: CodedPart, records: Sequence[Sized], state: Floats, bits: int, device: torch.device, threads: int
) -> None:
    """Apply records to a part. Raises DamagedError, or RuntimeError where the device has no room for it."""
    waiting, held = deque(records), 0
    ahead: deque[Future[Bytes | Sparse]] = deque()
    line = torch.from_numpy(state).to(device, copy=True)
    with Crew(min(threads, _MOST_THREADS)) as crew:
        for record in records:
            while waiting and (not ahead or held + waiting[0].symbols_nbytes <= _AHEAD_NBYTES):
                held += waiting[0].symbols_nbytes
                ahead.append(crew.submit(_unpack, waiting.popleft()))
            _move(part, record, _up(ahead.popleft().result(), device), line, bits)
            held -= record.symbols_nbytes
    torch.from_numpy(state).copy_(line)


def _unpack(record: Sized) -> Bytes | Sparse:
    symbols = record.open()
    if isinstance(symbols, Filler):
        return symbols.whole()
    room = np.empty(record.symbols_nbytes, np.uint8)
    if room.size:
        symbols.fill(room.data)
    return room


def _up(found: Bytes | Sparse, device: torch.device) -> torch.Tensor:
    """Packed symbols, on the device. Raises DamagedError."""
    if not isinstance(found, Sparse):
        return torch.from_numpy(found).to(device)
    marks, values = (torch.from_numpy(line).to(device) for line in (found.marks, found.values))
    packed = torch.zeros(8 * marks.numel(), dtype=torch.uint8, device=device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    before = 0
    for line, part in zip(packed.split(_STRETCH), marks.split(_STRETCH // 8), strict=True):
        found_here = ((part.unsqueeze(1) >> shifts) & 1).bool().view(-1)
        count = int(found_here.sum())
        if before + count <= values.numel():
            line.masked_scatter_(found_here, values[before : before + count])
        before += count
    if before != values.numel():
        raise DamagedError(f"{before} marks and {values.numel()} values", expected=before, found=values.numel())
    return packed


def _move(part: CodedPart, record: Sized, packed: torch.Tensor, line: torch.Tensor, bits: int) -> None:
    tables = list(record.coded)
    each = 8 // bits
    found = np.stack([look_up(record.coded[number], bits, each) for number in tables]) if tables else np.empty(0)
    lookups = dict(zip(tables, torch.from_numpy(found).to(line.device), strict=True))
    position = 0
    for number, slots in enumerate(part.groups()):
        exact = record.exact.get(number)
        for slot in slots:
            place = line[slot.start : slot.start + slot.leaf.count]
            if number in lookups:
                nbytes = packed_nbytes(slot.leaf.count, bits)
                for start in range(0, nbytes, _STRETCH):
                    words = packed[position + start : position + min(start + _STRETCH, nbytes)]
                    target = place[each * start : each * (start + words.numel())]
                    steps = lookups[number].index_select(0, words.int()).view(-1)
                    target.add_(steps[: target.numel()])
                position += nbytes
            elif exact is not None:  # whatever came before
                values = np.frombuffer(exact[: slot.leaf.nbytes], np.float32)
                place.copy_(torch.from_numpy(values.copy()))
                exact = exact[slot.leaf.nbytes :]
