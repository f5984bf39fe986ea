"""Verified bytes: every block is checked before any of it is handed on.

Owns:    reading blocks from a file (direct) or from the arena by several threads, and comparing checksums.
Not:     where the bytes go (a function, or `place` for tensors).
Holds:   memory use is a few blocks for each thread, whatever the size of the state; nothing unverified is delivered; a
         shard whose own header tells another story than the record is damaged.

Each thread has a lane: room to read a block into, and the way on for what was verified. Threads take the next block
from one counter, so that a disk sees one nearly sequential reader with a deep queue, and no thread waits for another.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from stepwell.errors import DamagedError
from stepwell.restore.byte_sources import BlockSource, ReadBuffer
from stepwell.storage.format import dtypes, shard
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.record import FileEntry, LeafEntry, Record

Deliver = Callable[[LeafEntry, int, memoryview], None]
"""Called with a leaf, an offset inside it, and bytes. From several threads at once, for different ranges."""
Piece = tuple[LeafEntry, int, int, int]
"""Part of a leaf in one block: the leaf, the offset inside it, and where the block holds it: [low, high)."""
_LOOK_SECONDS: Final = 1.0
_UNIT_BYTES: Final = 4 << 20
"""What is read at once, where blocks are smaller."""
_ROOM_BYTES: Final = 64 << 20
"""For all lanes together; a record with larger blocks is read by fewer threads."""


class Lane(Protocol):
    """What one reading thread holds. Made, used and closed in that thread, which is then as it was."""

    def room(self) -> memoryview:
        """Memory for the next block, whose last content is not needed any more. May wait for that."""
        ...

    def deliver(self, block: memoryview, pieces: Sequence[Piece]) -> None:
        """Take over a verified block, which lies in the room given last."""
        ...

    def close(self) -> None:
        """Return when all that was delivered has arrived."""
        ...


@runtime_checkable
class Lanes(Protocol):
    """Where verified bytes go, when a function is not enough."""

    def lane(self, nbytes: int) -> Lane:
        """A lane for blocks of at most this size. Called in the thread that will use it."""
        ...


class _Handing:
    """A lane that calls a function."""

    def __init__(self, deliver: Deliver, nbytes: int) -> None:
        self._deliver = deliver
        self._room = ReadBuffer(nbytes)

    def room(self) -> memoryview:
        return self._room.view

    def deliver(self, block: memoryview, pieces: Sequence[Piece]) -> None:
        for leaf, offset, low, high in pieces:
            with block[low:high] as piece:
                self._deliver(leaf, offset, piece)

    def close(self) -> None:
        self._room.close()


def read_record_leaves(
    record: Record, open_source: Callable[[FileEntry], BlockSource], wanted: set[str] | None, deliver: Deliver | Lanes
) -> int:
    """Deliver leaves of a record (`wanted` None: all, and check every file whole). Returns the bytes read."""
    total = 0
    for number, file in enumerate(record.files):
        leaves = [leaf for leaf in record.leaves if leaf.file == number and (wanted is None or leaf.name in wanted)]
        if leaves or wanted is None:
            with contextlib.closing(open_source(file)) as source:
                total += read_file(source, file, leaves, deliver, check_all=wanted is None)
                if wanted is None and file.kind == "safetensors":
                    check_header(source, file, leaves)
    return total


def read_some(
    record: Record,
    open_source: Callable[[FileEntry], BlockSource],
    leaves: Sequence[LeafEntry],
    deliver: Deliver | Lanes,
) -> int:
    """Deliver leaves, or rows of leaves, of a record, and check the blocks they lie in. Returns the bytes read."""
    total = 0
    for number, file in enumerate(record.files):
        chosen = [leaf for leaf in leaves if leaf.file == number]
        if chosen:
            with contextlib.closing(open_source(file)) as source:
                total += read_file(source, file, chosen, deliver, check_all=False)
    return total


def check_header(source: BlockSource, file: FileEntry, leaves: Sequence[LeafEntry]) -> None:
    """Whether stock safetensors would find in this shard what the record says: all of its leaves, each in its place."""
    nbytes = min((leaf.start for leaf in leaves), default=file.nbytes)
    if nbytes > shard.MAX_HEADER_BYTES + 8:
        raise DamagedError(f"{source.label}: a header of {nbytes} bytes", path=source.label, found=nbytes)
    with mmap.mmap(-1, nbytes) as memory, memoryview(memory) as buffer, source.read(0, nbytes, buffer) as data:
        header = bytes(data)
    if shard.header_bytes(header, file.nbytes, path=source.label) != nbytes:
        raise DamagedError(f"{source.label}: the header does not end where the data begins", path=source.label)
    found = shard.parse_header(header, file.nbytes, path=source.label)
    for leaf in leaves:
        if found.pop(leaf.name, None) != (*dtypes.stored_as(leaf.dtype, leaf.shape), leaf.start, leaf.end):
            raise DamagedError(
                f"{source.label}: the header says otherwise about leaf {leaf.name!r} than the record",
                path=source.label,
                leaf=leaf.name,
            )
    if found:
        raise DamagedError(f"{source.label}: the record lacks leaf {min(found)!r}", path=source.label, leaf=min(found))


def read_file(
    source: BlockSource,
    file: FileEntry,
    leaves: Sequence[LeafEntry],
    deliver: Deliver | Lanes,
    *,
    check_all: bool,
    on_block: Callable[[int], None] | None = None,
) -> int:
    """Read and check blocks, and deliver the parts that belong to `leaves`. Returns the bytes read.

    Raises DamagedError, for the first of the blocks that were found damaged, or what `deliver` raised. No thread
    goes on after that.
    """
    pieces = _cut(leaves, file)
    units = _together(range(len(file.blocks)) if check_all else sorted(pieces), file, source.threads)
    room_bytes = min(file.nbytes, max((len(unit) for unit in units), default=1) * file.block_bytes)
    waiting, lock = iter(units), threading.Lock()
    errors: dict[int, BaseException] = {}
    shortages: list[Exception] = []
    done: list[int] = []

    def work() -> None:
        number = len(file.blocks)  # an error of the lane itself comes after those of blocks
        try:
            try:
                lane = deliver.lane(room_bytes) if isinstance(deliver, Lanes) else _Handing(deliver, room_bytes)
            except (OSError, MemoryError) as error:  # the threads that have one do the work
                shortages.append(error)
                return
            with contextlib.closing(lane):
                while not errors:
                    with lock:
                        unit = next(waiting, None)
                    if unit is None:
                        break
                    start, number = unit[0] * file.block_bytes, unit[0]
                    nbytes = min(len(unit) * file.block_bytes, file.nbytes - start)
                    with source.read(start, nbytes, lane.room()) as data:
                        for number in unit:
                            low = number * file.block_bytes - start
                            with data[low : low + file.block_bytes] as block:
                                _check(block, file, number, source)
                        lane.deliver(data, _shifted(pieces, unit, file.block_bytes))
                    done.append(nbytes)
                    if on_block is not None:
                        on_block(nbytes)
        except BaseException as error:  # raised again below, in the thread that asked
            errors[number] = error

    def stop(error: BaseException) -> None:
        errors[-1] = error

    _run(work, min(source.threads, len(units), max(1, _ROOM_BYTES // max(1, room_bytes))), stop)
    if errors:
        raise errors[min(errors)]
    if len(done) < len(units):
        raise shortages[0]
    return sum(done)


def _run(work: Callable[[], None], count: int, stop: Callable[[BaseException], None]) -> None:
    """Run `work` in so many threads and wait, however often the wait is interrupted: they use the caller's files.

    One needs no thread: where memory has run out, Python may wait for ever for a thread that never began.
    """
    if count == 1:
        return work()
    threads: list[threading.Thread] = []
    for number in range(count):
        thread = threading.Thread(target=work, name=f"stepwell-read-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit on processes or memory: fewer do, one has to
            if not threads:
                raise
            break
        threads.append(thread)
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join(_LOOK_SECONDS)
            except BaseException as error:  # Ctrl-C
                stop(error)
    return None


def _together(numbers: Sequence[int], file: FileEntry, threads: int) -> list[range]:
    """Blocks that follow each other, as many as are read at once; few enough that every thread has something to do."""
    most = max(1, min(_UNIT_BYTES // file.block_bytes, len(numbers) // (4 * threads)))
    units: list[range] = []
    for number in numbers:
        if units and units[-1].stop == number and len(units[-1]) < most:
            units[-1] = range(units[-1].start, number + 1)
        else:
            units.append(range(number, number + 1))
    return units


def _shifted(pieces: dict[int, list[Piece]], unit: range, block_bytes: int) -> list[Piece]:
    """What a unit holds, counted from its start."""
    shifts = [(piece, (number - unit[0]) * block_bytes) for number in unit for piece in pieces.get(number, ())]
    return [(leaf, offset, low + shift, high + shift) for (leaf, offset, low, high), shift in shifts]


def _cut(leaves: Sequence[LeafEntry], file: FileEntry) -> dict[int, list[Piece]]:
    """What each block holds of the leaves. Blocks that hold nothing are left out."""
    blocks: dict[int, list[Piece]] = {}
    for leaf in leaves:
        position = leaf.start
        while position < leaf.end:
            number, low = divmod(position, file.block_bytes)
            high = min(file.block_bytes, low + leaf.end - position)
            blocks.setdefault(number, []).append((leaf, position - leaf.start, low, high))
            position += high - low
    return blocks


def _check(block: memoryview, file: FileEntry, number: int, source: BlockSource) -> None:
    found = block_digest(block)
    if found != file.blocks[number]:
        start = number * file.block_bytes
        raise DamagedError(
            f"{source.label}: bytes {start} to {start + len(block)} have checksum {found}, the record says "
            f"{file.blocks[number]}",
            path=source.label,
            expected=file.blocks[number],
            found=found,
        )
