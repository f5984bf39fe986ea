"""The digest of a state: the same by its definition, in any order, and what it sees."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from stepwell.storage.chain import replay
from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs import parts
from stepwell.storage.codecs.assignment import Deltas, as_bytes
from stepwell.storage.codecs.codec_spec import LC
from stepwell.storage.codecs.signature import COLUMNS, FACTOR, MIX_BITS, part_digest, signature
from tests.storage.codecs.walks import assert_is, write


def by_definition(data: bytes) -> list[int]:
    """One word at a time, in a random order."""
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").tolist()
    rows = -(-len(words) // COLUMNS)
    sums, order = [0] * COLUMNS, list(range(len(words)))
    random.Random(0).shuffle(order)
    for at in order:
        row, column = divmod(at, COLUMNS)
        mixed = words[at] ^ words[at] >> MIX_BITS
        sums[column] = (sums[column] + mixed * pow(FACTOR, rows - 1 - row, 1 << 32)) % (1 << 32)
    return sums


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4 * COLUMNS - 1, 4 * COLUMNS, 4 * COLUMNS + 5, 4 * COLUMNS * 19 + 6])
def test_the_definition(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    assert signature(data).tolist() == by_definition(data.tobytes())


@pytest.mark.parametrize("cuts", [[0], [3], [4 * COLUMNS], [1, 2, 4 * COLUMNS + 1], [70_000, 70_000, 300_001, 300_002]])
def test_it_may_come_in_pieces(cuts: list[int]) -> None:
    data = np.random.default_rng(1).integers(0, 256, 4 * COLUMNS * 7 + 13, np.uint8)
    assert (signature(*np.split(data, cuts)) == signature(data)).all()


def test_the_factor() -> None:
    """Odd, so that no change of one word is lost, and of the longest period there is."""
    assert FACTOR % 8 == 5
    assert pow(FACTOR, 1 << 29, 1 << 32) != 1 == pow(FACTOR, 1 << 30, 1 << 32)


def test_what_it_sees() -> None:
    """A bit anywhere; and what plain sums would miss: signs of zeros and of ones, words that change places."""
    rows = 32
    plain = np.ones(rows * COLUMNS, np.float32)
    known = signature(as_bytes(plain)).tobytes()
    for at in (0, COLUMNS, 5 * COLUMNS + 3, plain.size - 1):
        for bit in range(32):
            changed = plain.copy()
            changed.view(np.uint32)[at] ^= np.uint32(1 << bit)
            assert signature(as_bytes(changed)).tobytes() != known
    assert signature(as_bytes(-plain)).tobytes() != known
    zeros = np.zeros_like(plain)
    assert signature(as_bytes(zeros)).tobytes() != signature(as_bytes(-zeros)).tobytes()
    for distance in (1, COLUMNS, 16 * COLUMNS):
        changed = plain.copy()
        changed[0] = 2
        other = np.roll(changed, distance)
        assert signature(as_bytes(changed)).tobytes() != signature(as_bytes(other)).tobytes()
    assert part_digest(4, signature(np.zeros(4, np.uint8))) != part_digest(5, signature(np.zeros(5, np.uint8)))


def test_a_restore_takes_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the base, and of the state at the end: not of those between."""
    known = write(tmp_path / "chain", 9, Deltas(small="pool", skip_every=16))
    taken: list[bytes] = []
    digest = ChainImage.digest

    def counted(image: ChainImage) -> bytes:
        taken.append(digest(image))
        return taken[-1]

    monkeypatch.setattr(ChainImage, "digest", counted)
    found = restore(tmp_path / "chain")
    assert_is(found, 9, known)
    assert taken[1:] == [found.digest]


@pytest.mark.parametrize("bad", [1, 4, 9])
def test_a_state_that_is_not_right_is_found_among_many(
    bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that goes wrong once: the result is the state before, however many records follow."""
    known = write(tmp_path / "chain", 9, Deltas(small="pool", skip_every=16))
    read, apply, seen, spoiled = parts.read, parts.apply, dict[bytes, int](), list[parts.Move]()

    def note(part: parts.Part, data: memoryview, memory: parts.Memory) -> parts.Move:
        move = read(part, data, memory)
        if part.spec == LC() and seen.setdefault(bytes(data), len(seen) + 1) == bad:
            spoiled.append(move)
        return move

    def wrong(part: parts.Part, moves: list[parts.Move], state: np.ndarray, device: object = None) -> None:
        apply(part, moves, state)
        if any(move in spoiled for move in moves):
            state[3] += np.float32(1)

    monkeypatch.setattr(replay, "read", note)
    monkeypatch.setattr(replay, "apply", wrong)
    found = restore(tmp_path / "chain")
    assert found.number == bad - 1 and f"record {bad}: " in str(found.stopped) and "digest" in str(found.stopped)
    assert_is(found, bad - 1, known)
