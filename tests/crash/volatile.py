"""A disk that forgets: what is written is volatile until it is synced, and a power cut drops any part of that.

The model is what POSIX promises and no more:
    bytes of a file      durable after fsync of the file
    names in a directory durable after fsync of the directory; a rename is one change, not two
Without a sync each change may or may not have reached the disk when the power goes, in any combination.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PAGE = 4096
Mode = Literal["nothing", "prefix", "any", "everything"]
"""What survives of the changes that were not synced: none, each object's first few, any of them, all."""
Edit = tuple[str, "Node | None"]
Write = tuple[int, bytes]


@dataclass(eq=False)
class File:
    """Bytes now, bytes as of the last sync, and the writes in between (offset -1: the size was set)."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    writes: list[Write] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        _apply(self.data, (offset, data))
        for start in range(0, len(data), PAGE):  # pages reach the disk one by one
            self.writes.append((offset + start, data[start : start + PAGE]))

    def resize(self, nbytes: int) -> None:
        change = (-1, nbytes.to_bytes(8, "little"))
        _apply(self.data, change)
        self.writes.append(change)

    def sync(self) -> None:
        self.synced, self.writes = bytes(self.data), []


@dataclass(eq=False)
class Directory:
    """Names now, names as of the last sync, and the changes in between, each a few edits that happen together."""

    names: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[list[Edit]] = field(default_factory=list)

    def change(self, *edits: Edit) -> None:
        _edit(self.names, list(edits))
        self.changes.append(list(edits))

    def sync(self) -> None:
        self.synced, self.changes = dict(self.names), []


Node = File | Directory


def _apply(data: bytearray, write: Write) -> None:
    offset, payload = write
    if offset < 0:
        nbytes = int.from_bytes(payload, "little")
        del data[nbytes:]
        data.extend(bytes(nbytes - len(data)))
        return
    data.extend(bytes(max(0, offset - len(data))))
    data[offset : offset + len(payload)] = payload


def _edit(names: dict[str, Node], edits: list[Edit]) -> None:
    for name, node in edits:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def survivors(root: Directory, target: Path, mode: Mode, seed: int) -> None:
    """Write what a power cut would leave to a plain directory."""
    chance = random.Random(seed)
    contents: dict[int, bytes] = {}  # a file with two names has one content

    def chosen(count: int) -> Callable[[int], bool]:
        if mode == "prefix":
            limit = chance.randint(0, count)
            return lambda number: number < limit
        if mode == "any":
            picks = [chance.random() < 0.5 for _ in range(count)]
            return lambda number: picks[number]
        return lambda number: mode == "everything"

    def write_out(directory: Directory, path: Path) -> None:
        path.mkdir()
        names, keep = dict(directory.synced), chosen(len(directory.changes))
        for number, edits in enumerate(directory.changes):
            if keep(number):
                _edit(names, edits)
        for name, node in names.items():
            if isinstance(node, Directory):
                write_out(node, path / name)
                continue
            if id(node) not in contents:
                data, keep_write = bytearray(node.synced), chosen(len(node.writes))
                for number, write in enumerate(node.writes):
                    if keep_write(number):
                        _apply(data, write)
                contents[id(node)] = bytes(data)
            (path / name).write_bytes(contents[id(node)])

    write_out(root, target)


class Disk:
    """The tree, the count of operations that change or sync something, and the moment when the power goes."""

    def __init__(self) -> None:
        self.root = Directory()
        self.count = 0
        self.cut_at = 0
        self.is_off = False

    def arm(self, cut_at: int) -> None:
        """Switch the power on, and off again at the nth operation from now (0: never)."""
        self.count, self.cut_at, self.is_off = 0, cut_at, False

    def operation(self) -> None:
        """Count one; raises EIO from the moment on when the power is gone."""
        self.check()
        self.count += 1
        if self.count == self.cut_at:
            self.is_off = True
            self.check()

    def check(self) -> None:
        if self.is_off:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def find(self, path: str) -> Node:
        self.check()
        node: Node = self.root
        for part in path.split("/"):
            if part:
                if not isinstance(node, Directory):
                    raise OSError(errno.ENOTDIR, path)
                if part not in node.names:
                    raise OSError(errno.ENOENT, path)
                node = node.names[part]
        return node

    def directory(self, path: str) -> Directory:
        node = self.find(path)
        if not isinstance(node, Directory):
            raise OSError(errno.ENOTDIR, path)
        return node

    def parent(self, path: str) -> tuple[Directory, str]:
        above, _, name = path.rpartition("/")
        return self.directory(above), name
