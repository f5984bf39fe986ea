"""What a peer's request may name: one file of one checkpoint, and a range of it.

Holds:   a name leads to a file one directory deep, and through no link; everything else is refused with the reason.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stepwell.errors import DamagedError
from stepwell.levels.peers.peer_frames import Message
from stepwell.storage.format.record import check_file_name
from stepwell.types import CheckpointId


class RequestRefusal(Exception):
    """A request that gets an error for an answer. `kind` is what it is counted under."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def read_names(request: Message) -> tuple[str, str]:
    """Directory and file: one checkpoint's, and a plain name."""
    directory, name = request.get("directory"), request.get("name")
    if not isinstance(directory, str) or not isinstance(name, str):
        raise RequestRefusal("name", "directory and name are texts")
    if CheckpointId.parse(directory) is None:
        raise RequestRefusal("name", f"{directory[:100]!r} is not the directory of a checkpoint")
    try:
        return directory, check_file_name(name, path="request")
    except DamagedError as error:
        raise RequestRefusal("name", str(error)) from None


def read_count(request: Message, key: str) -> int:
    value = request.get(key)
    if type(value) is not int or value < 0:  # a boolean is an int to isinstance
        raise RequestRefusal("range", f"{key} is not a number of bytes")
    return value


def open_below(root: Path, directory: str, name: str) -> int:
    """Part by part, so that no link leads anywhere; and without waiting for a writer, as a pipe would.

    The root is opened anew each time: who cleans up a disk may remove it, and then it is made again.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with contextlib.ExitStack() as stack:
            outer = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, outer)
            inner = os.open(directory, flags | os.O_DIRECTORY, dir_fd=outer)
            stack.callback(os.close, inner)
            return os.open(name, flags, dir_fd=inner)
    except OSError as error:
        raise RequestRefusal("missing", f"{directory}/{name}: {error.strerror}") from None
