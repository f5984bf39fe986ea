"""The forgetful disk as a file system (FUSE), and the process that serves it.

`python powerfs.py mountpoint` mounts, then obeys lines of JSON on stdin:
    {"arm": n}                                                 power on; off again at the nth operation
    {"state": true}                                            answers count and is_off
    {"dump": path, "of": "/name", "mode": "any", "seed": 1}    write what a cut right now would leave
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mfusepy

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.crash.volatile import Directory, Disk, File, survivors


class PowerFs(mfusepy.Operations):
    """Passes everything on to the model. Handles are numbers of open files, so a renamed file stays the same."""

    use_ns = True

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._open: dict[int, File] = {}
        self._handles = iter(range(1, 1 << 60))

    def _file(self, path: str, fh: int | None) -> File:
        self.disk.check()
        node = self._open[fh] if fh else self.disk.find(path)
        if not isinstance(node, File):
            raise mfusepy.FuseOSError(errno.EISDIR)
        return node

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        node = self._open[fh] if fh else self.disk.find(path)
        if isinstance(node, Directory):
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2, "st_ino": id(node)}
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": len(node.data), "st_ino": id(node)}

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        return iter([".", "..", *self.disk.directory(path).names])

    def open(self, path: str, flags: int) -> int:
        node = self._file(path, None)
        handle = next(self._handles)
        self._open[handle] = node
        return handle

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self.disk.operation()
        directory, name = self.disk.parent(path)
        node = File()
        directory.change((name, node))
        handle = next(self._handles)
        self._open[handle] = node
        return handle

    def release(self, path: str, fh: int) -> int:
        self._open.pop(fh, None)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._file(path, fh).data[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.disk.operation()
        self._file(path, fh).write(offset, data)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self.disk.operation()
        self._file(path, fh).resize(length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self.disk.operation()
        node = self._file(path, fh)
        node.resize(max(len(node.data), offset + size))
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.disk.operation()
        self._file(path, fh).sync()
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.disk.operation()
        self.disk.directory(path).sync()
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self.disk.operation()
        directory, name = self.disk.parent(path)
        directory.change((name, Directory()))
        return 0

    def rmdir(self, path: str) -> int:
        self.disk.operation()
        if self.disk.directory(path).names:
            raise mfusepy.FuseOSError(errno.ENOTEMPTY)
        directory, name = self.disk.parent(path)
        directory.change((name, None))
        return 0

    def unlink(self, path: str) -> int:
        self.disk.operation()
        directory, name = self.disk.parent(path)
        directory.change((name, None))
        return 0

    def link(self, target: str, source: str) -> int:
        self.disk.operation()
        directory, name = self.disk.parent(target)
        directory.change((name, self._file(source, None)))
        return 0

    def rename(self, old: str, new: str) -> int:
        self.disk.operation()
        directory, name = self.disk.parent(old)
        target, new_name = self.disk.parent(new)
        if target is directory:
            directory.change((name, None), (new_name, directory.names[name]))
        else:  # a cut may leave both names, or none: less than file systems promise
            target.change((new_name, directory.names[name]))
            directory.change((name, None))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return 0


def obey(disk: Disk) -> None:
    """Serve the control lines; the end of stdin is the end of the process. Nobody writes during a dump."""
    for line in sys.stdin:
        request = json.loads(line)
        if "arm" in request:
            disk.arm(request["arm"])
        elif "dump" in request:
            survivors(_surviving(disk, request["of"]), Path(request["dump"]), request["mode"], request["seed"])
        print(json.dumps({"count": disk.count, "is_off": disk.is_off}), flush=True)
    os._exit(0)  # the mount namespace, and the mount with it, end here


def _surviving(disk: Disk, path: str) -> Directory:
    """A directory right below the root; one whose name was lost is empty."""
    node = disk.root.synced.get(path.strip("/"))
    return node if isinstance(node, Directory) else Directory()


def main() -> None:
    disk = Disk()
    threading.Thread(target=obey, args=(disk,), daemon=True).start()
    fuse: Any = mfusepy.FUSE
    no_cache = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    fuse(PowerFs(disk), sys.argv[1], foreground=True, nothreads=True, hard_remove=True, **no_cache)


if __name__ == "__main__":
    main()
