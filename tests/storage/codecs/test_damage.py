"""Flipped, missing, swapped and torn: the chain ends at the last good record, and says so."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from stepwell.errors import DamagedError
from stepwell.storage.chain.chain_record import HEAD_NBYTES, Head
from stepwell.storage.chain.replay import restore
from stepwell.storage.chain.segment import segment_name
from stepwell.storage.codecs.assignment import Deltas
from tests.storage.codecs.walks import Arrays, assert_is, write

DELTAS = Deltas(skip_every=4, small="pool", keep_segments=2)
RECORDS = 10
"""Records 5 to 8 lie in one segment and 9 and 10 in another; 5 and 9 are skip records. What was before is removed."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Arrays]]:
    directory = tmp_path_factory.mktemp("damage") / "chain"
    return directory, write(directory, RECORDS, DELTAS)


@pytest.fixture
def chain(written: tuple[Path, list[Arrays]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "chain"))


@pytest.fixture
def known(written: tuple[Path, list[Arrays]]) -> list[Arrays]:
    return written[1]


def records(path: Path) -> list[bytes]:
    """The bytes of each record of a file."""
    data, found = path.read_bytes(), []
    while data:
        nbytes = HEAD_NBYTES + Head.load(data[:HEAD_NBYTES], path="").body_nbytes
        found.append(data[:nbytes])
        data = data[nbytes:]
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


OLD, NEW = segment_name(5), segment_name(9)


def test_as_written(chain: Path, known: list[Arrays]) -> None:
    found = restore(chain)
    assert_is(found, RECORDS, known)
    assert found.stopped is None and found.replayed == 2
    assert sorted(path.name for path in chain.iterdir()) == [OLD, NEW, "base.bin", "chain.json"]


@pytest.mark.parametrize("number", [5, 6, 7, 8, 9, 10])
def test_a_flipped_bit_anywhere_in_a_record(number: int, chain: Path, known: list[Arrays]) -> None:
    """Once in every field of the head, and all over the body."""
    path = chain / (NEW if number >= 9 else OLD)
    if number < 9:
        (chain / NEW).unlink()
    lines = records(path)
    start = sum(len(line) for line in lines[: number - (9 if number >= 9 else 5)])
    nbytes = len(lines[number - (9 if number >= 9 else 5)])
    whole = path.read_bytes()
    for at in [*range(0, HEAD_NBYTES, 7), *range(HEAD_NBYTES, nbytes, max(1, nbytes // 12)), nbytes - 1]:
        path.write_bytes(whole)
        flip(path, start + at)
        found = restore(chain)
        # A skip record that is bad leads back to the segment before it, or to the base.
        assert_is(found, {5: 0}.get(number, number - 1), known)
        assert found.stopped is not None and f"record {number}" in found.stopped


def test_a_record_taken_out(chain: Path, known: list[Arrays]) -> None:
    lines = records(chain / OLD)
    (chain / NEW).unlink()
    for number in (6, 7):
        (chain / OLD).write_bytes(b"".join(line for i, line in enumerate(lines, 5) if i != number))
        found = restore(chain)
        assert_is(found, number - 1, known)
        assert f"record {number}: " in str(found.stopped) and not found.is_torn
    (chain / OLD).write_bytes(b"".join(lines[1:]))  # without its skip record
    assert_is(restore(chain), 0, known)


def test_records_in_another_order(chain: Path, known: list[Arrays]) -> None:
    lines = records(chain / OLD)
    (chain / NEW).unlink()
    for order in itertools.permutations(range(4)):
        (chain / OLD).write_bytes(b"".join(lines[i] for i in order))
        found = restore(chain)
        good = next((i for i, place in enumerate(order) if i != place), 4)
        assert_is(found, 4 + good if good else 0, known)
        assert (found.stopped is None) == (order == (0, 1, 2, 3))


def test_records_of_another_chain(chain: Path, known: list[Arrays], tmp_path: Path) -> None:
    """The same leaves, codecs and numbers, another run: only the digest of the state before it tells."""
    write(tmp_path / "other", RECORDS, DELTAS, seed=1)
    ours, others = records(chain / NEW), records(tmp_path / "other" / NEW)
    (chain / NEW).write_bytes(ours[0] + others[1])
    found = restore(chain)
    assert_is(found, 9, known)
    assert "another state" in str(found.stopped)
    (chain / NEW).write_bytes(b"".join(others))
    assert_is(restore(chain), 8, known)
    shutil.copy(tmp_path / "other" / "base.bin", chain / "base.bin")
    with pytest.raises(DamagedError, match="digest"):
        restore(chain)


def test_a_torn_tail_at_every_length(chain: Path, known: list[Arrays]) -> None:
    """A crash in the middle of an append: what was durable before is restored, and it is called torn."""
    whole = (chain / NEW).read_bytes()
    first = len(records(chain / NEW)[0])
    for nbytes in sorted({*range(0, first, 997), first - 1, *range(first + 1, len(whole), 499), len(whole) - 1}):
        end = first if nbytes < first else len(whole)
        for tail in (b"", bytes(end - nbytes)):  # the file system may have grown the file without its bytes
            if whole[:end] == whole[:nbytes] + tail:
                continue  # the record ends in zeros of its own
            (chain / NEW).write_bytes(whole[:nbytes] + tail)
            found = restore(chain)
            assert_is(found, 9 if nbytes > first else 8, known)
            assert found.is_torn and found.stopped is not None


def test_damage_before_the_end_is_not_called_torn(chain: Path) -> None:
    flip(chain / NEW, HEAD_NBYTES + 50)
    assert not restore(chain).is_torn


@pytest.mark.parametrize("at", [HEAD_NBYTES, HEAD_NBYTES + 50, -2])
def test_damage_in_the_last_record_is_not_called_torn(at: int, chain: Path, known: list[Arrays]) -> None:
    """It is there in its whole length: no crash leaves that, but for zeros."""
    lines = records(chain / NEW)
    flip(chain / NEW, len(lines[0]) + at if at > 0 else len(lines[0]) + len(lines[1]) + at)
    found = restore(chain)
    assert_is(found, 9, known)
    assert not found.is_torn and "checksum" in str(found.stopped)


def test_a_gap_between_segments_is_told(chain: Path, known: list[Arrays]) -> None:
    (chain / OLD).write_bytes(b"".join(records(chain / OLD)[:2]))
    flip(chain / NEW, 20)
    found = restore(chain)
    assert_is(found, 6, known)
    assert "records 7 to 8 are missing" in str(found.stopped)


@pytest.mark.parametrize("name", ["base.bin", "chain.json"])
def test_without_a_good_base_there_is_nothing(name: str, chain: Path) -> None:
    whole = (chain / name).read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 25)):
        (chain / name).write_bytes(whole)
        flip(chain / name, at)
        with pytest.raises(DamagedError):
            restore(chain)
    for content in (b"", whole[:-1], whole + b"\0"):
        (chain / name).write_bytes(content)
        with pytest.raises(DamagedError):
            restore(chain)
    (chain / name).unlink()
    with pytest.raises(DamagedError):
        restore(chain)


def test_a_forged_length_allocates_nothing(chain: Path, known: list[Arrays]) -> None:
    line = records(chain / NEW)[0]
    head = Head.load(line[:HEAD_NBYTES], path="")
    forged = Head(**{**head.__dict__, "body_nbytes": 1 << 60})
    (chain / NEW).write_bytes(forged.dump() + line[HEAD_NBYTES:])
    assert_is(restore(chain), 8, known)
    assert np.isfinite(restore(chain).leaves["weight"]).all()
