"""Records applied by many threads, a tile at a time: the same bits; and what they are read with."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from stepwell.errors import DamagedError
from stepwell.storage.chain import apply, apply_on_device, replay
from stepwell.storage.chain.apply_threads import Ahead, Crew
from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs import parts, zstd_frames
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import LC, Spec
from stepwell.storage.codecs.signature import COLUMNS, signature
from tests.storage.codecs.device_walks import SPECS, check_records_are_applied
from tests.storage.codecs.walks import LEAVES, Arrays, assert_is, fill, walk

SIZES = {"a": 5000, "b": 30, "c": 1500, "d": 40}
"""b and d share a table."""
BROKEN = {3: ("a", 777), 6: ("d", 39), 7: ("c", 1499), 8: ("a", 0)}
"""Records in which a leaf holds NaN, and where."""


@pytest.mark.parametrize("tile", [1, 700, 1 << 26])
@pytest.mark.parametrize("bits", [2, 3])
def test_values_that_cannot_be_coded_among_others(
    bits: int, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the place of whatever records before them made of a leaf, and later ones go on from there."""
    monkeypatch.setattr(parts, "_SHARED_NBYTES", 1)
    monkeypatch.setattr(parts, "all_threads", lambda: 3)
    monkeypatch.setattr(apply, "PIECE", 512)
    monkeypatch.setattr(apply, "_TILE_NBYTES", tile)
    rng = np.random.default_rng(0)
    leaves = [CodedLeaf(name, "float32", (size,), "parameter") for name, size in SIZES.items()]
    state = {name: rng.standard_normal(size).astype(np.float32) for name, size in SIZES.items()}
    deltas = Deltas(parameters=LC(bits=bits), small="pool", small_below=1000, skip_every=0)
    with ChainWriter.start(tmp_path / "chain", leaves, state, step=10, deltas=deltas) as chain:
        known = [chain.state()]
        for number in range(1, 13):
            if number != 5:  # in which nothing changes
                state = {name: value + rng.standard_normal(value.size).astype(np.float32) for name, value in
                         state.items()}  # fmt: skip
            given = {name: np.array(value) for name, value in state.items()}
            if number in BROKEN:
                name, at = BROKEN[number]
                given[name][at] = np.nan
            done = chain.append(10 + number, given)
            assert bool(done.exact_groups) == (number in BROKEN or number - 1 in BROKEN), "and the one that mends it"
            known.append(chain.state())
    for until in range(13):
        assert_is(restore(tmp_path / "chain", until=until), until, known)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_on_a_device_to_the_same_bits(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for it here; `tests/gpu/test_device_coder.py` has one."""
    check_records_are_applied(spec, "cpu", tmp_path, monkeypatch)


def test_without_room_on_the_device_the_host_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, tried = walk(), []

    def full(*arguments: object) -> None:
        tried.append(arguments)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(parts, "_SHARED_NBYTES", 1)
    monkeypatch.setattr(apply_on_device, "move_on", full)
    monkeypatch.setattr(replay, "_device", lambda about: torch.device("cpu"))
    with ChainWriter.start(tmp_path / "chain", LEAVES, next(states), step=10, deltas=Deltas(small="pool")) as chain:
        known = [chain.state()]
        for number in range(1, 4):
            chain.append(10 + number, next(states))
            known.append(chain.state())
    assert_is(restore(tmp_path / "chain"), 3, known)
    assert tried


@pytest.mark.parametrize("bad", [None, 1, 4])
def test_a_base_is_read_to_where_records_are_applied(
    bad: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one state in memory. If something is wrong the base is asked for again, into the same place."""
    states, deltas = walk(), Deltas(small="pool", skip_every=16)
    base = next(states)
    with ChainWriter.start(tmp_path / "chain", LEAVES, base, step=10, deltas=deltas, base=lambda: base) as chain:
        known = [chain.state()]
        for number in range(1, 7):
            chain.append(10 + number, next(states))
            known.append(chain.state())
    given: list[Arrays] = []
    check, real, at = replay._check_place, parts.read, 0

    def fill_and_note(leaves: Arrays) -> None:
        given.append(leaves)
        fill(base)(leaves)

    def look(about: object, head: object, expected: int, *rest: object) -> None:
        nonlocal at
        at = expected
        check(about, head, expected, *rest)  # type: ignore[arg-type]

    def spoil(part: parts.Part, data: memoryview, memory: parts.Memory) -> parts.Move:
        move = real(part, data, memory)
        if at == bad and isinstance(move, parts.DeltaMove):
            move.exact[0] = memoryview(bytes(4 * 6000))
            move.coded.clear()
        return move

    monkeypatch.setattr(replay, "_check_place", look)
    monkeypatch.setattr(replay, "read", spoil)
    found = restore(tmp_path / "chain", base=fill_and_note)
    assert_is(found, 6 if bad is None else bad - 1, known)
    assert len(given) == (1 if bad is None else 3), "again to find the record, and without it"
    for leaves in given:
        assert all(np.shares_memory(value, leaves[name]) for name, value in found.leaves.items() if value.size)


def test_a_frame_in_pieces() -> None:
    data = np.random.default_rng(0).integers(0, 3, 300_000, np.uint8).tobytes()
    packed = zstd_frames.compress(data)
    frame, room = zstd_frames.ZstdFrame(packed, len(data)), bytearray(len(data))
    for start in range(0, len(data), 77_777):
        frame.fill(memoryview(room)[start : start + 77_777])
    assert room == data


def test_a_frame_that_is_not_what_it_says() -> None:
    data = np.random.default_rng(0).integers(0, 3, 300_000, np.uint8).tobytes()
    packed = zstd_frames.compress(data)
    with pytest.raises(DamagedError, match="does not hold"):
        zstd_frames.ZstdFrame(packed, len(data) + 1)
    with pytest.raises(DamagedError):
        zstd_frames.ZstdFrame(b"nothing like it", 100)
    with pytest.raises(DamagedError):
        zstd_frames.ZstdFrame(packed[: len(packed) // 2], len(data)).fill(memoryview(bytearray(len(data))))
    broken = bytearray(packed)
    broken[20:40] = bytes(20)
    with pytest.raises(DamagedError):
        zstd_frames.ZstdFrame(bytes(broken), len(data)).fill(memoryview(bytearray(len(data))))
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    large = zstandard.ZstdCompressor(compression_params=wide).compress(bytes(20 << 20))
    with pytest.raises(DamagedError):  # it asks for more room than any of ours
        zstd_frames.ZstdFrame(large, 20 << 20).fill(memoryview(bytearray(1 << 20)))


@pytest.mark.parametrize("rows", [0, 3, 256, 600])
def test_a_signature_by_many_threads(rows: int) -> None:
    data = np.random.default_rng(rows).integers(0, 256, 4 * COLUMNS * rows + 5, np.uint8)
    assert signature(data, threads=3).tolist() == signature(data).tolist()


def test_a_crew_keeps_the_order() -> None:
    for threads in (1, 3):
        with Crew(threads) as crew:
            assert list(crew.each(lambda number: -number, range(50))) == [-number for number in range(50)]
            assert crew.submit(max, 3, 4).result() == 4


def numbers(made: list[int], fails_at: int = -1) -> Generator[int]:
    for number in range(20):
        if number == fails_at:
            raise DamagedError("here")
        made.append(number)
        yield number


def test_what_is_made_ahead() -> None:
    """In order, never more than it may be; an error comes where the item would have been."""
    made: list[int] = []
    with Ahead(numbers(made), lambda _: 10, 35) as ahead:
        for number in ahead:
            assert made[-1] <= number + 5
    assert made == list(range(20))
    taken = []
    with pytest.raises(DamagedError, match="here"), Ahead(numbers([], 7), lambda _: 1, 3) as ahead:
        for number in ahead:
            taken.append(number)
    assert taken == list(range(7))


def test_without_a_thread_to_spare_nothing_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Crew, "submit", none_left)
    made: list[int] = []
    with Ahead(numbers(made), lambda _: 1, 9) as ahead:
        for number in ahead:
            assert made[-1] == number
    assert made == list(range(20))


def test_who_stops_early_leaves_nothing_behind() -> None:
    made: list[int] = []
    items = numbers(made)
    with Ahead(items, lambda _: 1, 2) as ahead:
        assert next(iter(ahead)) == 0
    assert len(made) < 6 and next(items, None) is None
    with pytest.raises(KeyError), Ahead(numbers([]), lambda _: 1, 2):
        raise KeyError
