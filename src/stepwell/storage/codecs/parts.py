"""A part of quantised differences as bytes: tables of its groups, symbols, and groups that are stored as they are.

Owns:    the section of a record that belongs to one part, for the codecs `lc`, `ternary` and `uniform`; and `code` and
         `apply`, which find the right codec for any part.
Holds:   what cannot be coded (NaN, infinity, differences near the end of the range) is stored exactly, and the next
         record goes on from there; a group in which nothing changed takes one byte. Tables are used again only from
         records that a reader must have read: a base or a skip record forgets them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from stepwell.errors import DamagedError
from stepwell.events.run_events import logger
from stepwell.storage.chain.apply import MOST_NBYTES, Symbols, Unpacked, move_on
from stepwell.storage.chain.apply_threads import all_threads
from stepwell.storage.chain.chain_record import Pieces
from stepwell.storage.codecs import huffman, lossless, zstd_frames
from stepwell.storage.codecs.assignment import CodedPart, CodedSlot
from stepwell.storage.codecs.codec_spec import LC, Spec, Top
from stepwell.storage.codecs.coding_groups import AGAIN, EXACT, FRESH, SAME, Coded, Facts, KeptGroups, group_nbytes
from stepwell.storage.codecs.floats import AnyArray, Bytes, Floats
from stepwell.storage.codecs.histogram import Piece, measure
from stepwell.storage.codecs.quantise import Outcome, encode, unpack
from stepwell.storage.codecs.sparse import LEAST_NBYTES, Filler, Sparse, marks_nbytes, thin
from stepwell.storage.codecs.tables import (
    QuantiserTable,
    make_table,
    most_heads,
    read_table,
    stored_bits,
    wanted_ranges,
)

if TYPE_CHECKING:
    import torch

HUFFMAN, OLD_CODES, NEW_DICTIONARY, DICTIONARY, SPARSE = 1, 2, 4, 8, 16
_KNOWN_FLAGS: Final = (0, HUFFMAN, HUFFMAN | OLD_CODES, DICTIONARY, DICTIONARY | NEW_DICTIONARY, SPARSE)
_DICTIONARY_SAMPLES: Final = 8
_SHARED_NBYTES: Final = 4 << 20
"""From so many bytes of symbols on, a restore applies them with several threads."""


@dataclass
class Memory:
    """What one record leaves for the next ones, of one part; a writer's and a reader's agree on what both use."""

    tables: dict[int, KeptGroups] = field(default_factory=dict)
    lengths: huffman.Lengths | None = None
    dictionary: bytes = b""
    samples: list[bytes] = field(default_factory=list)


def code(part: CodedPart, values: Sequence[AnyArray], state: AnyArray, memory: Memory, *,
         reuse: bool = False, dictionary_bytes: int = 0) -> tuple[Pieces, Facts]:  # fmt: skip
    """Bytes of a part, and the state moved on to what a reader of them has."""
    if part.is_held:
        return [], Facts()
    if part.spec.is_delta:
        coded = make_symbols(part, cast("Sequence[Floats]", values), state, memory, reuse)
        return seal(part, coded, memory, reuse=reuse, dictionary_bytes=dictionary_bytes), coded.facts
    if isinstance(part.spec, Top):
        return [lossless.encode_top(part, values, state)], Facts()
    return [lossless.encode_bytes(part, values, state)], Facts()


class Move:
    """What a record does to a part of a reader's state. `nbytes`: of memory that it takes to apply it."""

    nbytes = 0

    def __init__(self, part: CodedPart, data: memoryview) -> None:
        self._part, self._data = part, data
        if part.is_held:
            _Reader(data).end()

    def apply(self, state: AnyArray) -> None:
        """Move the state on. Raises DamagedError; what it holds then is of no use."""
        if isinstance(self._part.spec, Top):
            lossless.decode_top(self._part, self._data, state)
        elif not self._part.is_held:
            lossless.decode_bytes(self._part, self._data, state)


def read(part: CodedPart, data: memoryview, memory: Memory) -> Move:
    """What the section of a record says, as far as it needs those before it. Raises DamagedError."""
    return _read_deltas(part, data, memory) if part.spec.is_delta else Move(part, data)


def apply(part: CodedPart, moves: Sequence[Move], state: AnyArray, device: torch.device | None = None) -> None:
    """What records one after the other do to a part; if they do much, on the device. Raises DamagedError; what the
    state holds then is of no use.
    """
    if part.spec.is_delta:
        _apply_deltas(part, cast("Sequence[DeltaMove]", moves), state, device)
    else:
        for move in moves:
            move.apply(state)


def _apply_deltas(part: CodedPart, moves: Sequence[DeltaMove], state: Floats, device: torch.device | None) -> None:
    bits, is_large = stored_bits(part.spec), sum(move.symbols_nbytes for move in moves) >= _SHARED_NBYTES
    if device is not None and is_large:
        from stepwell.storage.chain import apply_on_device

        try:
            return apply_on_device.move_on(part, moves, state, bits, device, all_threads())
        except RuntimeError as error:  # no room there, most likely
            logger.info("records are applied on the host: %s", error)
    return move_on(part, moves, state, bits, all_threads() if is_large else 1)


def make_symbols(part: CodedPart, values: Sequence[Floats], state: Floats, memory: Memory, reuse: bool) -> Coded:
    """Symbols of a part of differences, and the state moved on by them."""
    bits, coded, position = stored_bits(part.spec), Coded(), 0
    room = np.empty(group_nbytes(part.slots, bits), np.uint8)
    by_name = {slot.leaf.name: value for slot, value in zip(part.slots, values, strict=True)}
    for number, slots in enumerate(part.groups()):
        pieces = [(by_name[slot.leaf.name], _place(slot, state)) for slot in slots]
        out = room[position : position + group_nbytes(slots, bits)]
        kind, outcome = _code_group(part, number, pieces, memory, reuse, out)
        position += out.size
        kept = memory.tables.get(number)
        coded.add(kind, kept.table if kept else None, [] if kind != EXACT else [v.tobytes() for v, _ in pieces])
        coded.packed += [out] if kind in (FRESH, AGAIN) else []
        coded.facts.entries += sum(value.size for value, _ in pieces)
        coded.facts.kept += outcome.kept
    return coded


def _code_group(
    part: CodedPart, number: int, pieces: list[Piece], memory: Memory, reuse: bool, out: Bytes
) -> tuple[int, Outcome]:
    known = memory.tables.pop(number, None)
    is_new = known is None or not reuse or not known.is_good
    if is_new:
        found = measure(pieces, wanted_ranges(part.spec))
        if found.is_codable and found.is_empty:
            return SAME, Outcome()
        known = KeptGroups(make_table(part.spec, found), 0) if found.is_codable else None
    outcome = encode(pieces, known.table, stored_bits(part.spec), out) if known else Outcome(is_sound=False)
    if known is None or not outcome.is_sound:
        for value, place in pieces:
            place[:] = value
        return EXACT, outcome
    memory.tables[number] = known.used(outcome, is_new=is_new)
    return FRESH if is_new else AGAIN, outcome


def seal(part: CodedPart, coded: Coded, memory: Memory, *, reuse: bool, dictionary_bytes: int) -> Pieces:
    """The section of a part whose symbols are made. `memory` is that of the entropy code here."""
    if coded.is_same:
        return []
    if coded.sparse is not None:
        flags, symbols = SPARSE, _shrink_sparse(coded.sparse)
    else:
        packed = coded.packed[0] if len(coded.packed) == 1 else np.concatenate([np.empty(0, np.uint8), *coded.packed])
        flags, symbols = _shrink(part, packed, memory, reuse, dictionary_bytes)
    size = struct.pack("<Q", sum(map(len, symbols)))
    return [bytes([flags]), bytes(coded.heads), size, *symbols, *coded.exact]


def is_thinned(spec: Spec) -> bool:
    """Whether symbols may go as `Sparse`: not those that Huffman codes one by one."""
    return not (isinstance(spec, LC) and spec.entropy == "huffman")


def _shrink(part: CodedPart, packed: Bytes, memory: Memory, reuse: bool, dictionary_bytes: int) -> tuple[int, Pieces]:
    """How the symbols are coded, and the coded symbols."""
    if not is_thinned(part.spec):
        symbols = unpack(packed, stored_bits(part.spec))
        counts = np.bincount(symbols, minlength=huffman.SYMBOLS)
        if not symbols.size:
            return HUFFMAN | OLD_CODES, []
        memory.lengths, is_old = huffman.choose(counts, memory.lengths if reuse else None)
        table = b"" if is_old else huffman.dump_table(memory.lengths)
        return HUFFMAN | (OLD_CODES if is_old else 0), [table, huffman.encode(symbols, memory.lengths)]
    if (sparse := thin(packed)) is not None:
        return SPARSE, _shrink_sparse(sparse)
    flags, fresh = 0, b""
    if dictionary_bytes and packed.size <= LEAST_NBYTES and not memory.dictionary:
        memory.samples.append(packed.tobytes())
        if len(memory.samples) >= _DICTIONARY_SAMPLES:
            memory.dictionary = fresh = zstd_frames.train(
                memory.samples, min(dictionary_bytes, zstd_frames.MOST_DICTIONARY_BYTES)
            )
            memory.samples.clear()
    if memory.dictionary:
        flags = DICTIONARY | (NEW_DICTIONARY if fresh else 0)
    head = struct.pack("<I", len(fresh)) + fresh if fresh else b""
    return flags, [head, zstd_frames.compress(packed.data, dictionary=memory.dictionary)]


def _shrink_sparse(sparse: Sparse) -> Pieces:
    marks = zstd_frames.compress(sparse.marks.data)
    return [struct.pack("<Q", len(marks)), marks, zstd_frames.compress(sparse.values.data)]


class DeltaMove(Move):
    """Of a part of differences. coded: tables of the groups, by number, that have symbols; exact: values of those that
    could not be coded. symbols_nbytes: of all symbols, packed.
    """

    def __init__(self, coded: dict[int, QuantiserTable], exact: dict[int, memoryview],
                 open_symbols: Callable[[], Symbols], symbols_nbytes: int, nbytes: int) -> None:  # fmt: skip
        self.coded, self.exact, self.open = coded, exact, open_symbols
        self.symbols_nbytes, self.nbytes = symbols_nbytes, nbytes


def _read_deltas(part: CodedPart, data: memoryview, memory: Memory) -> DeltaMove:
    if not data:
        return DeltaMove({}, {}, lambda: Unpacked(lambda: np.empty(0, np.uint8)), 0, 0)
    bits, reader = stored_bits(part.spec), _Reader(data)
    flags, groups = reader.take(1)[0], part.groups()
    coded: dict[int, QuantiserTable] = {}
    bad: list[int] = []
    position = 0
    for number, slots in enumerate(groups):
        kind = reader.take(1)[0]
        known = memory.tables.pop(number, None)
        if kind == FRESH:
            count = reader.take(1)[0]
            if not 1 <= count <= most_heads(part.spec):
                raise DamagedError(f"a quantiser table has {count} values", found=count)
            heads = struct.unpack(f"<{count}H", reader.take(2 * count))
            known = KeptGroups(read_table(part.spec, heads), 0)
        if kind in (FRESH, AGAIN):
            if known is None:
                raise DamagedError("a record uses a quantiser table that no record before it has")
            memory.tables[number] = known
            coded[number] = known.table
            position += group_nbytes(slots, bits)
        elif kind == EXACT:
            bad.append(number)
        elif kind != SAME:
            raise DamagedError(f"a group is of unknown kind {kind}", found=kind)
    symbols = _grow(part, flags, reader.take(int.from_bytes(reader.take(8), "little")), position, memory)
    exact = {number: reader.take(sum(slot.leaf.nbytes for slot in groups[number])) for number in bad}
    reader.end()
    is_stream = not flags & HUFFMAN
    return DeltaMove(coded, exact, symbols, position, min(position, MOST_NBYTES) if is_stream else position)


def _grow(part: CodedPart, flags: int, data: memoryview, nbytes: int, memory: Memory) -> Callable[[], Symbols]:
    """What gives the packed symbols, `nbytes` of them."""
    reader = _Reader(data)
    if flags not in _KNOWN_FLAGS:
        raise DamagedError(f"symbols with the flags {flags}: of a newer stepwell, or damaged", found=flags)
    if flags & HUFFMAN:
        bits = stored_bits(part.spec)
        if not nbytes:
            reader.end()
            return lambda: Unpacked(lambda: np.empty(0, np.uint8))
        if not flags & OLD_CODES:
            memory.lengths = huffman.load_table(reader.take(huffman.TABLE_NBYTES))
        if memory.lengths is None:
            raise DamagedError("a record uses a code table that no record before it has")
        lengths, coded = memory.lengths, reader.rest()
        return lambda: Unpacked(lambda: _grow_huffman(coded, nbytes, bits, lengths))
    if flags & SPARSE:
        marks = reader.take(int.from_bytes(reader.take(8), "little"))
        return partial(_open_sparse, marks, reader.rest(), nbytes)
    if flags & NEW_DICTIONARY:
        size = int.from_bytes(reader.take(4), "little")
        if size > zstd_frames.MOST_DICTIONARY_BYTES:
            raise DamagedError(f"a dictionary of {size} bytes", found=size)
        memory.dictionary = bytes(reader.take(size))
    if flags & DICTIONARY and not memory.dictionary:
        raise DamagedError("a record uses a dictionary that no record before it has")
    dictionary, frame = memory.dictionary if flags & DICTIONARY else b"", reader.rest()
    return lambda: zstd_frames.ZstdFrame(frame, nbytes, dictionary=dictionary)


def _open_sparse(marks: memoryview, values: memoryview, nbytes: int) -> Symbols:
    few = zstd_frames.ZstdFrame(values, zstd_frames.content_nbytes(values, nbytes))
    return Filler(nbytes, zstd_frames.ZstdFrame(marks, marks_nbytes(nbytes)), few)


def _grow_huffman(data: memoryview, nbytes: int, bits: int, lengths: huffman.Lengths) -> Bytes:
    symbols = huffman.decode(data, nbytes * 8 // bits, lengths)
    if symbols.max() >= 1 << bits:
        raise DamagedError("a symbol is out of range")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    joined: Bytes = np.bitwise_or.reduce(symbols.reshape(-1, 8 // bits) << shifts, axis=1, dtype=np.uint8)
    return joined


class _Reader:
    """Bytes from front to end, never beyond."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._data):
            raise DamagedError(f"a part ends {nbytes - len(self._data)} bytes too early", expected=nbytes)
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return taken

    def rest(self) -> memoryview:
        return self.take(len(self._data))

    def end(self) -> None:
        if self._data:
            raise DamagedError(f"{len(self._data)} bytes too many in a part", found=len(self._data))


def _place(slot: CodedSlot, state: Floats) -> Floats:
    return state[slot.start : slot.start + slot.leaf.count]
