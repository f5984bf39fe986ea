"""Files of records, appended to and never changed: writing them durably, reading them as far as they are whole.

Owns:    `base.bin` and `00000001.seg`: one record after the other.
Holds:   `append` returns when the record is durable. After a failed write or fsync a file is never written again. A
         reader tells a torn tail (the last record, cut off or partly zeros: a crash) from damage before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from stepwell.errors import DamagedError, PersistError
from stepwell.faults import crash_point
from stepwell.storage.chain.chain_record import HEAD_NBYTES, Head, body_digest
from stepwell.storage.store import no_follow

BASE_NAME: Final = "base.bin"
_NAME: Final = re.compile(r"([0-9]{8,19})\.seg")
_MOST_RECORDS: Final = 256
"""In one file. A chain asks for a base long before."""
_PIECE: Final = 1 << 20
_PAGE: Final = 4096
"""What a file system writes at once."""
_ENDING_ZEROS: Final = 16
"""A good record may end in fewer: in those of a number."""


def segment_name(number: int) -> str:
    """Name of the file whose first record has this number."""
    return f"{number:08d}.seg"


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """Numbers of the first records and files, oldest first."""
    found = [(match, name) for name in _names(directory) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), directory / name) for match, name in found if segment_name(int(match[1])) == name)


def _names(directory: Path) -> list[str]:
    fd = no_follow.open_directory(directory)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


class Appender:
    """The writing side of one file, which must be new. Constructing opens nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def open(self) -> None:
        """Create the file. Raises PersistError, if it is there too: nothing is added to what an older process wrote."""
        try:
            self._fd = no_follow.open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except OSError as error:
            raise PersistError(f"{self.path}: cannot be made: {error.strerror}", path=str(self.path)) from error

    def append(self, *pieces: bytes) -> None:
        """Write a record and make it durable; of the first one the name too. Raises PersistError, then it is closed."""
        if self._fd < 0:
            raise PersistError(f"{self.path} is closed", path=str(self.path))
        try:
            is_first = os.lseek(self._fd, 0, os.SEEK_END) == 0
            for number, piece in enumerate(pieces):
                if number == 1:
                    crash_point("chain.writing")
                _write(self._fd, memoryview(piece))
            os.fsync(self._fd)
            if is_first:
                sync_directory(self.path.parent)  # before anything it replaces may go
        except OSError as error:
            self.close()  # the kernel may have dropped pages: what is in the file now is not known
            raise PersistError(
                f"{self.path}: a record could not be made durable ({error.strerror}); begin a new base",
                path=str(self.path),
            ) from error

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = no_follow.open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class SegmentRecord:
    """A record as it lies in a file; its body has the checksum that its head says."""

    head: Head
    body: memoryview


def read_records(path: Path, most_nbytes: int) -> Generator[SegmentRecord]:
    """The records of a file in order, each of at most so many bytes. Raises DamagedError at the first that is not
    whole, with `torn` in its fields: whether nothing follows it, as after a crash.
    """
    name = str(path)
    try:
        fd = no_follow.open_file(path, os.O_RDONLY)
    except OSError as error:
        raise DamagedError(f"{name}: cannot be opened: {error.strerror}", path=name, torn=False) from None
    with os.fdopen(fd, "rb") as file:
        left = os.fstat(fd).st_size
        if left > _MOST_RECORDS * most_nbytes:
            raise DamagedError(f"{name}: {left} bytes, more than records of this chain can have", path=name, torn=False)
        while left:
            data = file.read(min(HEAD_NBYTES, left))
            left -= len(data)
            if len(data) < HEAD_NBYTES or (not any(data) and _are_zeros(file)):
                raise DamagedError(f"{name}: the last record is cut off", path=name, torn=True)
            try:
                head = Head.load(data, path=name)
            except DamagedError as error:
                # With nothing but zeros behind it, a head that was not wholly written.
                raise DamagedError(str(error), path=name, torn=_are_zeros(file)) from None
            if head.body_nbytes > most_nbytes:  # before anything is allocated for it
                raise DamagedError(f"{name}: record {head.number} of {head.body_nbytes} bytes", path=name, torn=False)
            if head.body_nbytes > left:
                raise DamagedError(
                    f"{name}: record {head.number} is cut off: {left} of {head.body_nbytes} bytes", path=name, torn=True
                )
            start = file.tell()
            body = memoryview(file.read(head.body_nbytes))
            left -= head.body_nbytes
            if body_digest(body) != head.body_digest:
                torn = not left and _was_grown(body, start)
                raise DamagedError(f"{name}: record {head.number} does not have its checksum", path=name, torn=torn)
            yield SegmentRecord(head, body)


def _was_grown(body: memoryview, start: int) -> bool:
    """Whether the file got this length without all of its bytes: it ends in zeros, or has a page of them."""
    if not any(body[-_ENDING_ZEROS:]):
        return True
    first = -start % _PAGE
    return any(not any(body[page : page + _PAGE]) for page in range(first, len(body) - _PAGE + 1, _PAGE))


def _are_zeros(file: BinaryIO) -> bool:
    """Whether nothing else follows."""
    while data := file.read(_PIECE):
        if data.count(0) != len(data):
            return False
    return True
