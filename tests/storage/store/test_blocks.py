"""Blocks that are compared with a record before they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.errors import DamagedError
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.record import FileEntry
from stepwell.storage.store.blocks import fill_from, verified_blocks

BLOCK = 4096


def described(data: bytes) -> FileEntry:
    blocks = tuple(block_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return FileEntry("rank-00000.safetensors", "safetensors", len(data), BLOCK, blocks)


def read(path: Path, file: FileEntry) -> bytes:
    with path.open("rb", buffering=0) as source:
        found = list[bytes]()
        for start, block in verified_blocks(file, fill_from(source, str(path)), str(path)):
            assert start == len(b"".join(found))
            found.append(bytes(block))
        return b"".join(found)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 7])
def test_whole_files_come_as_they_are(nbytes: int, tmp_path: Path) -> None:
    data = bytes(at % 251 for at in range(nbytes))
    (tmp_path / "x").write_bytes(data)
    assert read(tmp_path / "x", described(data)) == data


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut off": lambda data: data[: 2 * BLOCK],
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_not_in_the_record_is_not_given_on(how: str, tmp_path: Path) -> None:
    """Also of blocks that are all the same: what was read before does not stand in for what is missing."""
    data = bytes(3 * BLOCK)
    (tmp_path / "x").write_bytes(SPOILT[how](data))
    with pytest.raises(DamagedError) as raised:
        read(tmp_path / "x", described(data))
    assert raised.value.fields["path"] == str(tmp_path / "x")
