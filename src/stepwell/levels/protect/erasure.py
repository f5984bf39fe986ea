"""Parity over the shards of a set: what its members store besides their own, and how lost ones come back from it.

Owns:    which bytes form a stripe, and the code over them.
Not:     who is in a set (sets), moving bytes (the caller reads and writes), checksums: what is read has to be verified
         before, or after; wrong bytes in are wrong bytes out.
Holds:   any `parity` members may be lost, and no more: that is refused before anything is read. A lost member is never
         read. The parity of a position depends only on the shards, not on versions of libraries.

The layout is that of SCR's redset. Of n members with m parity each shard is padded with zeros and cut into n - m chunks
of the same size. There are n stripes. In stripe t piece j of the data is chunk j of member t - 1 - j, and piece q of
the parity lies on member t + q (all modulo n); so every member gives n - m chunks and stores m, one of each row.

With m = 1 parity is XOR, by NumPy. With more it is Reed-Solomon over GF(2^8) with polynomial 0x11d: the coefficient of
data j in parity q is 1 / ((n - m + q) ^ j), ISA-L's Cauchy matrix, by pyeclib. Its Vandermonde matrix is as fast, but
some losses cannot be solved with it from m = 4 on (with 4 from n = 26, with 5 from n = 11); any square part of a Cauchy
matrix can be inverted.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from stepwell.errors import ConfigError, DamagedError

if TYPE_CHECKING:
    from pyeclib.ec_iface import ECDriver

SLICE_BYTES: Final = 1 << 20
"""Of each member this much is in memory at a time."""
MOST_MEMBERS: Final = 128
_ALIGNMENT: Final = 4096

Read = Callable[[int, int, int, memoryview], None]
"""Member, start, nbytes, into: fill `into`, which has nbytes, from what that member has. Never asked beyond its end.
`into` may not be kept."""
Write = Callable[[int, int, memoryview], None]
"""Member, start, data, which may not be kept."""


@dataclass(frozen=True)
class StripeLayout:
    """How the shards of a set are cut: their lengths in the order of the members, and how many members may be lost."""

    lengths: tuple[int, ...]
    parity: int

    def __post_init__(self) -> None:
        if not 2 <= self.members <= MOST_MEMBERS:
            raise ConfigError(f"a set has 2 to {MOST_MEMBERS} members, not {self.members}", members=self.members)
        if not 1 <= self.parity < self.members:
            raise ConfigError(
                f"a set of {self.members} can survive the loss of 1 to {self.members - 1} members, not {self.parity}",
                members=self.members,
                parity=self.parity,
            )
        if min(self.lengths) < 0:
            raise ConfigError(f"a shard cannot have {min(self.lengths)} bytes", lengths=self.lengths)

    @property
    def members(self) -> int:
        return len(self.lengths)

    @property
    def data(self) -> int:
        """Pieces of data in a stripe, and chunks of a shard."""
        return self.members - self.parity

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk, padded; a multiple of 4096."""
        return -(-max(self.lengths) // (self.data * _ALIGNMENT)) * _ALIGNMENT

    @property
    def parity_bytes(self) -> int:
        """What each member stores besides its own: row q of the parity begins at q * chunk_bytes."""
        return self.parity * self.chunk_bytes

    def owner(self, stripe: int, piece: int) -> int:
        """The member whose chunk `piece` is in a stripe."""
        return (stripe - 1 - piece) % self.members

    def holder(self, stripe: int, row: int) -> int:
        """The member that stores a row of the parity of a stripe."""
        return (stripe + row) % self.members

    @property
    def slice_bytes(self) -> int:
        """How much of a chunk is worked on at once; something even if there is nothing to do."""
        return min(SLICE_BYTES, max(_ALIGNMENT, self.chunk_bytes))

    def slices(self) -> Iterator[tuple[int, int]]:
        """Where in a chunk these begin, and their bytes; the last one may be shorter."""
        chunk_bytes = self.chunk_bytes
        return ((start, min(SLICE_BYTES, chunk_bytes - start)) for start in range(0, chunk_bytes, SLICE_BYTES))


def survives(layout: StripeLayout, lost: Collection[int]) -> bool:
    """Whether the shards of all lost members can be had from the others."""
    return len(set(lost)) <= layout.parity


def encode(layout: StripeLayout, position: int, read: Read, write: Callable[[int, memoryview], None]) -> None:
    """Compute the parity that the member at `position` stores: `write(offset, data)`, from the first byte to the last.

    Reads `parity` times as many bytes as a member has, from the others. What `write` is given may not be kept.
    """
    _check(layout, [position])
    coder = _coder(layout)
    for row in range(layout.parity):
        stripe = (position - row) % layout.members
        for start, nbytes in layout.slices():
            sources = {piece: _piece(layout, stripe, piece, start, nbytes, read) for piece in range(layout.data)}
            (data,) = coder.solve(sources, [layout.data + row])
            write(row * layout.chunk_bytes + start, data[:nbytes])


def rebuild(layout: StripeLayout, lost: Collection[int], read: Read, read_parity: Read, write: Write) -> None:
    """Compute the shards of the lost members: `write(member, offset, data)`, every byte once.

    In the order of the bytes if one is lost, in no order otherwise. Reads the survivors' part of each stripe that lost
    something, and as many rows of its parity as it lost pieces. What lost members stored as parity is made by `encode`
    when the shards are back. Raises DamagedError if too many are lost.
    """
    gone = sorted(set(lost))
    _check(layout, gone)
    if not survives(layout, gone):
        raise DamagedError(
            f"{len(gone)} of {layout.members} members of a set are lost ({', '.join(map(str, gone))}), and its parity "
            f"makes up for {layout.parity}; use an older checkpoint, or another level",
            lost=tuple(gone),
            parity=layout.parity,
        )
    if not any(layout.lengths[member] for member in gone):
        return
    coder = _coder(layout)
    for step in range(layout.members):
        _rebuild_stripe(layout, coder, (gone[0] + 1 + step) % layout.members, gone, read, read_parity, write)


def _rebuild_stripe(
    layout: StripeLayout, coder: _Coder, stripe: int, gone: Collection[int], read: Read, read_parity: Read, write: Write
) -> None:
    rows = [row for row in range(layout.parity) if layout.holder(stripe, row) not in gone]
    for start, nbytes in layout.slices():
        sources = {piece: _piece(layout, stripe, piece, start, nbytes, read) for piece in range(layout.data)}
        # Where a lost member has nothing but padding there is nothing to find: its zeros are known.
        wanted = {piece: part for piece, part in sources.items() if part.member in gone and part.nbytes}
        if not wanted:
            continue
        for piece, row in zip(wanted, rows, strict=False):  # enough of them: no more than `parity` are lost
            del sources[piece]
            offset = row * layout.chunk_bytes + start
            sources[layout.data + row] = _Part(read_parity, layout.holder(stripe, row), offset, nbytes)
        for part, data in zip(wanted.values(), coder.solve(sources, list(wanted)), strict=True):
            write(part.member, part.offset, data[: part.nbytes])


def _check(layout: StripeLayout, positions: Sequence[int]) -> None:
    if outside := [position for position in positions if not 0 <= position < layout.members]:
        raise ConfigError(f"a set of {layout.members} has no member at {outside[0]}", position=outside[0])


class _Part(NamedTuple):
    """A slice of a piece of a stripe: the bytes that are there. What follows them in the slice is zeros."""

    read: Read
    member: int
    offset: int
    nbytes: int

    def fill(self, room: memoryview) -> int:
        """Read it into the front of a room. Returns how much it is."""
        if self.nbytes:
            self.read(self.member, self.offset, self.nbytes, room[: self.nbytes])
        return self.nbytes


def _piece(layout: StripeLayout, stripe: int, piece: int, start: int, nbytes: int, read: Read) -> _Part:
    member, offset = layout.owner(stripe, piece), piece * layout.chunk_bytes + start
    return _Part(read, member, offset, max(0, min(nbytes, layout.lengths[member] - offset)))


class _Coder(Protocol):
    """The code, over slices. Pieces have numbers: first the data, then the rows of the parity."""

    def solve(self, sources: Mapping[int, _Part], wanted: Sequence[int]) -> Iterator[memoryview]:
        """From as many pieces as there are of data make others, each a whole slice, valid until the next one."""


def _coder(layout: StripeLayout) -> _Coder:
    if layout.parity == 1:
        return _Xor(layout.slice_bytes)
    return _ReedSolomon(layout.data, layout.parity, layout.slice_bytes)


class _Xor:
    """One row: each piece is the sum of all others."""

    def __init__(self, nbytes: int) -> None:
        self._sum, self._term = bytearray(nbytes), bytearray(nbytes)

    def solve(self, sources: Mapping[int, _Part], wanted: Sequence[int]) -> Iterator[memoryview]:
        try:
            import numpy
        except ImportError as error:
            raise _missing("numpy") from error
        total, term = (numpy.frombuffer(room, dtype=numpy.uint8) for room in (self._sum, self._term))
        first, *others = sources.values()
        total[first.fill(memoryview(self._sum)) :] = 0
        for part in others:
            nbytes = part.fill(memoryview(self._term))
            numpy.bitwise_xor(total[:nbytes], term[:nbytes], out=total[:nbytes])
        for _ in wanted:  # it is one
            yield memoryview(self._sum)


class _ReedSolomon:
    """Several rows. pyeclib wants each piece as bytes behind a header, which tells number and sizes but nothing of the
    content: headers are made once, from zeros, and never stored. It keeps the interpreter's lock, for a fraction of a
    millisecond at a time.
    """

    def __init__(self, data: int, parity: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._driver = _driver(data, parity)
        # Pieces of zeros, in rooms that can be written to and that pyeclib can read without a copy.
        self._rooms = [io.BytesIO(piece) for piece in self._driver.encode(bytes(data * nbytes))]

    def solve(self, sources: Mapping[int, _Part], wanted: Sequence[int]) -> Iterator[memoryview]:
        pieces = []
        for number, part in sources.items():
            room = self._rooms[number].getbuffer()[-self._nbytes :]
            nbytes = part.fill(room)
            if nbytes < self._nbytes:
                room[nbytes:] = bytes(self._nbytes - nbytes)
            del room  # what is open for writing would be copied
            pieces.append(self._rooms[number].getvalue())  # bytes: given anything else pyeclib ends the process
        for number in wanted:
            # This computes one piece only, and is several times as fast as pyeclib's `encode` and `decode`.
            (found,) = self._driver.reconstruct(pieces, [number])
            yield memoryview(found)[-self._nbytes :]


def _driver(data: int, parity: int) -> ECDriver:
    try:
        from pyeclib.ec_iface import ECDriver, ECDriverError
    except ImportError as error:
        raise _missing("pyeclib") from error
    try:
        return ECDriver(k=data, m=parity, ec_type="isa_l_rs_cauchy")
    except ECDriverError as error:
        raise ConfigError(f"pyeclib refuses to use ISA-L ({error}): pip install stepwell[parity]") from error


def _missing(name: str) -> ConfigError:
    return ConfigError(f"parity needs {name}, which is not installed: pip install stepwell[parity]", missing=name)
