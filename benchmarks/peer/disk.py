"""Files: make durable, push out of the page cache, damage, remove."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
from pathlib import Path


def files_under(path: Path) -> list[Path]:
    """All files of a checkpoint, which is a file or a folder."""
    if path.is_file():
        return [path]
    return sorted(found for found in path.rglob("*") if found.is_file())


def total_bytes(path: Path) -> int:
    return sum(found.stat().st_size for found in files_under(path))


def sync_tree(path: Path) -> None:
    """fsync every file and folder of a checkpoint, and the folder it lies in."""
    folders = {path.parent} | {found.parent for found in files_under(path)} | ({path} if path.is_dir() else set())
    for place in [*files_under(path), *folders]:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def drop_cache(path: Path) -> float:
    """Push files out of the page cache; returns the share that is still there.

    By file first, so that program code stays cached; the whole cache (root only) if that leaves something.
    """
    files = [found for found in files_under(path) if found.stat().st_size]
    for found in files:
        descriptor = os.open(found, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    left = cached_share(files)
    if left > 0.005:
        with contextlib.suppress(OSError):
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        left = cached_share(files)
    return left


def cached_share(files: list[Path]) -> float:
    """How much of the files lies in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    resident = pages = 0
    for found in files:
        size = found.stat().st_size
        with found.open("rb") as stream, mmap.mmap(stream.fileno(), size, mmap.MAP_PRIVATE) as view:
            count = -(-size // mmap.PAGESIZE)
            vector = ctypes.create_string_buffer(count)
            holder = ctypes.c_char.from_buffer(view)
            if libc.mincore(ctypes.addressof(holder), size, vector) == 0:
                resident += count - vector.raw[:count].count(0)
            del holder
            pages += count
    return resident / max(pages, 1)


def flip_bits(path: Path, count: int = 3) -> Path:
    """Flip bits inside the largest file, far from its ends. Returns the file."""
    target = max(files_under(path), key=lambda found: found.stat().st_size)
    size = target.stat().st_size
    with target.open("r+b") as stream:
        for number in range(1, count + 1):
            stream.seek(size * number // (count + 1))
            byte = stream.read(1)[0]
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte ^ 0x10]))
        stream.flush()
        os.fsync(stream.fileno())
    return target


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
