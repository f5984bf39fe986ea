"""Parity: what is lost comes back to the byte exactly when theory says so, and is refused otherwise."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import ConfigError, DamagedError
from stepwell.levels.protect import erasure
from stepwell.levels.protect.erasure import StripeLayout, encode, rebuild, survives

PAGE = 4096


class Shards:
    """The members of a set, in memory. Checks what is asked of them, and keeps count."""

    def __init__(self, contents: Sequence[bytes], parity: int) -> None:
        self.contents = contents
        self.layout = StripeLayout(tuple(map(len, contents)), parity)
        self.parity = [self.encoded(position) for position in range(len(contents))]
        self.lost: Collection[int] = ()
        self.asked: list[tuple[str, int, int, int]] = []

    def read(self, member: int, start: int, nbytes: int, into: memoryview) -> None:
        self._give("data", self.contents[member], member, start, nbytes, into)

    def read_parity(self, member: int, start: int, nbytes: int, into: memoryview) -> None:
        self._give("parity", self.parity[member], member, start, nbytes, into)

    def _give(self, what: str, content: bytes, member: int, start: int, nbytes: int, into: memoryview) -> None:
        assert member not in self.lost
        assert len(into) == nbytes > 0
        assert 0 <= start <= start + nbytes <= len(content)
        into[:] = content[start : start + nbytes]
        self.asked.append((what, member, start, nbytes))

    def encoded(self, position: int) -> bytes:
        self.lost, self.asked, found = (), [], bytearray()

        def write(offset: int, data: memoryview) -> None:
            assert offset == len(found)
            found.extend(data)

        encode(self.layout, position, self.read, write)
        assert len(found) == self.layout.parity_bytes
        return bytes(found)

    def rebuilt(self, lost: Collection[int]) -> dict[int, bytes]:
        self.lost, self.asked = lost, []
        found = {member: bytearray(self.layout.lengths[member]) for member in lost}
        written = {member: bytearray(self.layout.lengths[member]) for member in lost}

        def write(member: int, offset: int, data: memoryview) -> None:
            assert len(data) > 0
            assert offset + len(data) <= self.layout.lengths[member]
            assert not any(written[member][offset : offset + len(data)])
            found[member][offset : offset + len(data)] = data
            written[member][offset : offset + len(data)] = b"\1" * len(data)

        rebuild(self.layout, lost, self.read, self.read_parity, write)
        assert all(all(marks) for marks in written.values())  # every byte once
        return {member: bytes(content) for member, content in found.items()}


def uneven(count: int) -> list[int]:
    """Lengths with an empty member, one of one byte, and none that fits a page."""
    return [0, 1, *(PAGE * 5 + 1 + 1237 * number for number in range(count - 2))]


def some(lengths: Sequence[int], seed: int = 0) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(length) for length in lengths]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few pages then have several slices, and a short one."""
    monkeypatch.setattr(erasure, "SLICE_BYTES", 2 * PAGE)


# The loss matrix


MATRIX = [(count, parity) for count in range(2, 10) for parity in (1, 2, 3) if parity < count]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("count", "parity"), MATRIX)
def test_every_loss(count: int, parity: int) -> None:
    shards = Shards(some(uneven(count)), parity)
    for number in range(min(count, parity + 1) + 1):
        for lost in combinations(range(count), number):
            assert survives(shards.layout, lost) == (number <= parity)
            if number <= parity:
                assert shards.rebuilt(lost) == {member: shards.contents[member] for member in lost}
            else:
                with pytest.raises(DamagedError, match="older checkpoint"):
                    shards.rebuilt(lost)
                assert shards.asked == []


@pytest.mark.parametrize("parity", [1, 2, 3])
def test_control_too_many_losses_would_be_seen(parity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal the matrix fails: a lost member would be read."""
    shards = Shards(some([PAGE * 8] * 6), parity)
    monkeypatch.setattr(erasure, "survives", lambda layout, lost: True)
    with pytest.raises(AssertionError, match="not in"):
        shards.rebuilt(range(parity + 1))


@pytest.mark.parametrize("parity", [1, 2])
def test_control_a_wrong_byte_of_parity_is_a_wrong_byte_of_what_is_rebuilt(parity: int) -> None:
    """The matrix compares what really came through the parity. (Checksums are the caller's.)"""
    shards = Shards(some([PAGE * 4] * 4), parity)
    holder = shards.layout.holder(1, 0)
    shards.parity[holder] = bytes([shards.parity[holder][0] ^ 1]) + shards.parity[holder][1:]
    (found,) = shards.rebuilt([0]).values()
    differing = [place for place, byte in enumerate(found) if byte != shards.contents[0][place]]
    assert differing == [0]


@pytest.mark.parametrize("parity", [1, 2, 3])
def test_sizes_at_the_edges(parity: int) -> None:
    slice_bytes = erasure.SLICE_BYTES
    for lengths in ([0] * 4, [1, 0, 0, 0], [slice_bytes, slice_bytes + 1, 1, 0], [PAGE, PAGE - 1, PAGE + 1, 2 * PAGE]):
        shards = Shards(some(lengths), parity)
        for lost in combinations(range(4), parity):
            assert shards.rebuilt(lost) == {member: shards.contents[member] for member in lost}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_lengths(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3 * PAGE), min_size=2, max_size=12))
    parity = data.draw(st.integers(1, len(lengths) - 1))
    shards = Shards(some(lengths, data.draw(st.integers(0, 9))), parity)
    lost = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=parity))
    assert shards.rebuilt(lost) == {member: shards.contents[member] for member in lost}


@pytest.mark.parametrize("parity", [1, 2, 127])
def test_the_largest_set(parity: int) -> None:
    shards = Shards(some([number * 50 for number in range(128)]), parity)
    lost = random.Random(parity).sample(range(128), parity)
    assert shards.rebuilt(lost) == {member: shards.contents[member] for member in lost}


@pytest.mark.parametrize(("count", "parity"), [(26, 4), (11, 5)])
def test_sets_where_the_vandermonde_matrix_fails(count: int, parity: int) -> None:
    shards = Shards(some([PAGE] * count), parity)
    for lost in random.Random(0).sample(list(combinations(range(count), parity)), 300 if count > 11 else 462):
        assert shards.rebuilt(lost) == {member: shards.contents[member] for member in lost}


# The layout, and the code: what is stored has to stay the same


def times(left: int, right: int) -> int:
    product = 0
    while right:
        product ^= left if right & 1 else 0
        left = (left << 1) ^ (0x11D if left & 0x80 else 0)
        right >>= 1
    return product


def inverse(value: int) -> int:
    return next(other for other in range(1, 256) if times(value, other) == 1)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("count", "parity"), [(2, 1), (5, 1), (3, 2), (6, 2), (7, 3)])
def test_parity_is_what_the_module_says(count: int, parity: int) -> None:
    """By another way: a table of each coefficient, and whole padded shards."""
    shards = Shards(some(uneven(count)), parity)
    chunk, data = shards.layout.chunk_bytes, count - parity
    assert chunk % PAGE == 0
    assert chunk * data >= max(shards.layout.lengths) > (chunk - PAGE) * data
    padded = [content.ljust(chunk * data, b"\0") for content in shards.contents]
    for stripe in range(count):
        for row in range(parity):
            expected = 0
            for piece in range(data):
                coefficient = 1 if parity == 1 else inverse((data + row) ^ piece)
                table = bytes(times(coefficient, value) for value in range(256))
                term = padded[(stripe - 1 - piece) % count][piece * chunk : (piece + 1) * chunk].translate(table)
                expected ^= int.from_bytes(term, "little")
            stored = shards.parity[(stripe + row) % count][row * chunk : (row + 1) * chunk]
            assert int.from_bytes(stored, "little") == expected


@pytest.mark.parametrize("count", range(2, 10))
def test_every_chunk_is_in_one_stripe_and_every_row_on_another_member(count: int) -> None:
    for parity in range(1, count):
        layout = StripeLayout((1,) * count, parity)
        chunks: Counter[tuple[int, int]] = Counter()
        rows: Counter[tuple[int, int]] = Counter()
        for stripe in range(count):
            owners = [layout.owner(stripe, piece) for piece in range(layout.data)]
            holders = [layout.holder(stripe, row) for row in range(parity)]
            assert sorted(owners + holders) == list(range(count))
            chunks.update(zip(owners, range(layout.data), strict=True))
            rows.update(zip(holders, range(parity), strict=True))
        assert set(chunks.values()) == set(rows.values()) == {1}
        assert (len(chunks), len(rows)) == (count * layout.data, count * parity)


def test_headers_tell_nothing_of_the_content() -> None:
    """So they are not stored, and those of zeros serve for any content. And nothing but headers is left out."""
    driver = erasure._driver(4, 3)
    content = random.Random(0).randbytes(4 * PAGE)
    pieces, empty = driver.encode(content), driver.encode(bytes(4 * PAGE))
    assert [piece[:-PAGE] for piece in pieces] == [piece[:-PAGE] for piece in empty]
    assert b"".join(piece[-PAGE:] for piece in pieces[:4]) == content


@pytest.mark.usefixtures("small_slices")
def test_pieces_are_not_copied_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(some([20 * PAGE] * 4), 2)
    driver, seen = erasure._driver(2, 2), []

    class Watched:
        encode = staticmethod(driver.encode)

        @staticmethod
        def reconstruct(pieces: list[bytes], numbers: list[int]) -> list[bytes]:
            seen.append([id(piece) for piece in pieces])
            return driver.reconstruct(pieces, numbers)

    monkeypatch.setattr(erasure, "_driver", lambda data, parity: Watched)
    assert shards.encoded(0) == shards.parity[0]
    assert len(seen) == 2 * 5  # rows, slices
    assert all(places == seen[0] for places in seen)


# What is read


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("parity", [1, 2, 3])
def test_only_what_is_needed_is_read(parity: int) -> None:
    count, length = 8, PAGE * 60
    shards = Shards(some([length] * count), parity)
    data, chunk = count - parity, shards.layout.chunk_bytes
    for number in range(1, parity + 1):
        shards.rebuilt(range(number))
        assert max(Counter((what, member, start) for what, member, start, _ in shards.asked).values()) == 1
        touched = [
            stripe
            for stripe in range(count)
            if any(shards.layout.owner(stripe, piece) < number for piece in range(data))
        ]
        assert sum(nbytes for *_, nbytes in shards.asked) <= len(touched) * data * chunk
    shards.rebuilt([])
    assert shards.asked == []


def test_a_short_member_costs_little() -> None:
    shards = Shards(some([PAGE * 100, PAGE * 100, 10, 0]), 2)
    assert shards.rebuilt([2, 3]) == {2: shards.contents[2], 3: b""}
    assert sum(nbytes for *_, nbytes in shards.asked) <= 2 * shards.layout.chunk_bytes
    shards.rebuilt([3])
    assert shards.asked == []


def test_one_lost_member_comes_in_order() -> None:
    shards = Shards(some([5 * PAGE, 9 * PAGE, 7 * PAGE + 1, 3]), 1)
    offsets: list[int] = []
    rebuild(shards.layout, [2], shards.read, shards.read_parity, lambda member, offset, data: offsets.append(offset))
    assert offsets == sorted(offsets)


def test_what_a_read_raises_is_raised() -> None:
    shards = Shards(some([PAGE * 2] * 4), 2)

    def broken(member: int, start: int, nbytes: int, into: memoryview) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        rebuild(shards.layout, [0], broken, shards.read_parity, lambda *_: None)


# Beyond 4 GiB

PERIOD = 1_000_003
"""A prime: bytes that are a power of two apart differ."""
PATTERNS = [memoryview(content + content + content) for content in some([PERIOD] * 5, seed=4)]
LONG = (1 << 32) + 12_345


def synthesise(member: int, start: int, nbytes: int, into: memoryview) -> None:
    into[:] = PATTERNS[member][start % PERIOD :][:nbytes]


@pytest.mark.parametrize(("count", "parity"), [(2, 1), (4, 1), (5, 2)])
def test_shards_beyond_4_gib_in_a_few_places(count: int, parity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 10 to 40 GiB, of whose chunks only the first slices, the last ones and some between are worked on."""
    lengths = (*(2 * LONG * (count - parity) - number * (LONG + 1) for number in range(count - 1)), 1)
    layout = StripeLayout(lengths, parity)
    assert layout.chunk_bytes > 1 << 33
    every = layout.chunk_bytes // erasure.SLICE_BYTES

    def slices(self: StripeLayout) -> Iterator[tuple[int, int]]:
        for number in (0, 1, 4095, 4096, LONG // erasure.SLICE_BYTES, every - 1, every):
            start = number * erasure.SLICE_BYTES
            if start < self.chunk_bytes:
                yield start, min(erasure.SLICE_BYTES, self.chunk_bytes - start)

    monkeypatch.setattr(StripeLayout, "slices", slices)
    parities: dict[tuple[int, int], bytes] = {}

    for member in range(count):
        encode(layout, member, synthesise, lambda at, data, own=member: parities.update({(own, at): bytes(data)}))
    assert max(at for _, at in parities) > 1 << 32

    def read_parity(member: int, start: int, nbytes: int, into: memoryview) -> None:
        into[:] = parities[member, start]

    ends = []

    def write(member: int, offset: int, data: memoryview) -> None:
        expected = bytearray(len(data))
        synthesise(member, offset, len(data), memoryview(expected))
        assert data == expected
        ends.append(offset + len(data))

    for lost in combinations(range(count), parity):
        rebuild(layout, lost, synthesise, read_parity, write)
    assert max(ends) == lengths[0]  # the very end was one of the places


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_shard_beyond_4_gib() -> None:
    """All of it, in a set of two: there the parity of one is the other, and need not be kept."""
    layout = StripeLayout((LONG, LONG // 2), 1)
    total = 0

    def write(member: int, offset: int, data: memoryview) -> None:
        nonlocal total
        assert (member, offset) == (0, total)
        expected = bytearray(len(data))
        read_parity(1, offset, len(data), memoryview(expected))
        assert data == expected
        total += len(data)

    def read_parity(member: int, start: int, nbytes: int, into: memoryview) -> None:
        has = min(nbytes, max(0, LONG - start))
        synthesise(0, start, has, into[:has])
        into[has:] = bytes(nbytes - has)

    encode(layout, 1, synthesise, lambda offset, data: write(0, offset, data))
    assert total == layout.parity_bytes
    total = 0
    rebuild(layout, [0], synthesise, read_parity, write)
    assert total == LONG


# What is refused


@pytest.mark.parametrize(
    ("lengths", "parity", "message"),
    [
        ((), 1, "2 to 128 members, not 0"),
        ((5,), 1, "2 to 128 members, not 1"),
        ((5,) * 129, 1, "2 to 128 members, not 129"),
        ((5, 5), 0, "not 0"),
        ((5, 5), 2, "loss of 1 to 1 members, not 2"),
        ((5, -1), 1, "-1 bytes"),
    ],
)
def test_a_set_that_cannot_be(lengths: tuple[int, ...], parity: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StripeLayout(lengths, parity)


def test_members_that_are_not_there() -> None:
    shards = Shards(some([PAGE] * 4), 2)
    for position in (-1, 4):
        with pytest.raises(ConfigError, match="no member"):
            encode(shards.layout, position, shards.read, lambda *_: None)
        with pytest.raises(ConfigError, match="no member"):
            rebuild(shards.layout, [0, position], shards.read, shards.read_parity, lambda *_: None)


def test_a_member_that_is_named_twice_is_lost_once() -> None:
    shards = Shards(some([PAGE] * 3), 1)
    rebuild(shards.layout, [1, 1], shards.read, shards.read_parity, lambda member, _, data: None)
    assert survives(shards.layout, [1, 1])


@pytest.mark.parametrize(("parity", "name"), [(1, "numpy"), (2, "pyeclib")])
def test_a_library_that_is_missing_is_named(parity: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(some([PAGE] * 4), parity)
    for module in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}.*pip install stepwell\[parity\]") as raised:
        encode(shards.layout, 0, shards.read, lambda *_: None)
    assert raised.value.fields == {"missing": name}


def test_a_pyeclib_without_isa_l_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyeclib import ec_iface

    def refuse(**_: object) -> None:
        raise ec_iface.ECBackendInstanceNotAvailable("no such library")

    monkeypatch.setattr(ec_iface, "ECDriver", refuse)
    with pytest.raises(ConfigError, match=r"ISA-L.*no such library"):
        encode(StripeLayout((1, 1, 1), 2), 0, lambda *_: None, lambda *_: None)
