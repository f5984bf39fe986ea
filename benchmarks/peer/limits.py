"""What the machine allows, measured in the same run: disk, memory, host and device.

Write: from a memfd, in another process without torch, into a preallocated file of the state's size with direct I/O;
       from the first write to fsync of file and folder. Best of 1 to 16 threads and three block sizes.
Read:  the same file, out of the page cache, with direct I/O.

    python -m peer.limits FOLDER BYTES        prints the figures as JSON (used as a child; needs no torch for the disk)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = (1, 2, 4, 8, 16)
BLOCKS = tuple(mib << 20 for mib in (1, 4, 16))
PROBE_BYTES = 2_000_000_000
FULL_REPEATS, FULL_CELLS = int(os.environ.get("STEPWELL_BENCH_REPEATS", "3")), 3  # fewer where time is lent


def in_threads(threads: int, blocks: int, work: Callable[[int], None]) -> None:
    """Call `work` for every block number, from several threads that each take the next one."""
    numbers = iter(range(blocks))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                work(number)
        except BaseException as error:
            errors.append(error)

    crew = [threading.Thread(target=run) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]


def direct_flag(folder: Path) -> int:
    """O_DIRECT where the file system has it."""
    probe = folder / "direct-probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        return os.O_DIRECT
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)


def time_write(folder: Path, source: mmap.mmap, size: int, threads: int, block: int, flag: int) -> float:
    """Seconds for one whole write, up to both fsyncs."""
    path = folder / "limit"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flag)
    place = os.open(folder, os.O_RDONLY)
    view = memoryview(source)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.fsync(descriptor)

        def write(number: int) -> None:
            at = number * block
            end = min(at + block, size)
            while at < end:
                at += os.pwrite(descriptor, view[at:end], at)

        started = time.monotonic()
        in_threads(threads, -(-size // block), write)
        os.fsync(descriptor)
        os.fsync(place)
        return time.monotonic() - started
    finally:
        view.release()
        os.close(descriptor)
        os.close(place)


def time_read(folder: Path, target: mmap.mmap, size: int, threads: int, block: int, flag: int) -> float:
    """Seconds to read the file that the last write left, past the page cache."""
    descriptor = os.open(folder / "limit", os.O_RDONLY | flag)
    view = memoryview(target)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(number: int) -> None:
            at = number * block
            os.preadv(descriptor, [view[at : min(at + block, size)]], at)

        started = time.monotonic()
        in_threads(threads, -(-size // block), read)
        return time.monotonic() - started
    finally:
        view.release()
        os.close(descriptor)


def best_cells(measure: Callable[[int, int, int], float], size: int) -> dict[str, Any]:
    """All cells on part of the size, the best three on all of it."""
    part = min(size, PROBE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    whole = size // mmap.PAGESIZE * mmap.PAGESIZE
    matrix = [
        {"threads": threads, "block": block, "rate": part / measure(part, threads, block)}
        for threads in THREADS
        for block in BLOCKS
    ]
    chosen = sorted(matrix, key=lambda cell: -cell["rate"])[:FULL_CELLS]
    full: list[dict[str, Any]] = []
    for _ in range(FULL_REPEATS):  # one after the other, so that a bad moment does not hit one cell alone
        for cell in chosen:
            rate = whole / measure(whole, int(cell["threads"]), int(cell["block"]))
            full.append({**cell, "rate": rate})
    best = max(full, key=lambda cell: cell["rate"])
    rates = [cell["rate"] for cell in full]
    return {"best": best, "median_rate": statistics.median(rates), "full": full, "matrix": matrix, "bytes": whole}


def disk_limits(folder: Path, size: int, source: mmap.mmap) -> dict[str, Any]:
    """The whole matrix for writing and reading."""
    flag = direct_flag(folder)
    found: dict[str, Any] = {"direct": bool(flag)}
    found["write"] = best_cells(lambda n, t, b: time_write(folder, source, n, t, b, flag), size)
    time_write(folder, source, size // mmap.PAGESIZE * mmap.PAGESIZE, 4, BLOCKS[1], flag)
    found["read"] = best_cells(lambda n, t, b: time_read(folder, source, n, t, b, flag), size)
    (folder / "limit").unlink(missing_ok=True)
    return found


def again(folder: Path, size: int, source: mmap.mmap, cells: dict[str, Any]) -> dict[str, Any]:
    """One more probe of the best write and read cell: storage is not the same all the time."""
    flag = direct_flag(folder)
    whole = size // mmap.PAGESIZE * mmap.PAGESIZE
    write, read = cells["write"], cells["read"]
    found = {"write": whole / time_write(folder, source, whole, write["threads"], write["block"], flag)}
    found["read"] = whole / time_read(folder, source, whole, read["threads"], read["block"], flag)
    (folder / "limit").unlink(missing_ok=True)
    return found


def memory_limits(size: int = 1 << 30) -> dict[str, float]:
    """memcpy between warm buffers, bytes a second."""
    one, two = mmap.mmap(-1, size), mmap.mmap(-1, size)
    a = ctypes.addressof(ctypes.c_char.from_buffer(one))
    b = ctypes.addressof(ctypes.c_char.from_buffer(two))
    ctypes.memset(a, 1, size)
    ctypes.memset(b, 2, size)
    found = {}
    for threads in (1, 2):
        best = float("inf")
        part = size // threads
        for _ in range(3):
            started = time.monotonic()
            in_threads(threads, threads, lambda n, part=part: ctypes.memmove(a + n * part, b + n * part, part))
            best = min(best, time.monotonic() - started)
        found[f"memcpy_{threads}"] = size / best
    return found


def device_limits(size: int = 1 << 30) -> dict[str, float]:
    """Copies between page-locked memory and the device, and on the device, bytes a second. Empty without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return {}
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    pairs = {"host_to_device": (device, host), "device_to_host": (host, device), "device_to_device": (other, device)}
    found = {}
    for name, (target, source) in pairs.items():
        best = float("inf")
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        found[name] = size / best
    return found


def in_another_process(folder: Path, size: int, cells: dict[str, Any] | None = None) -> dict[str, Any]:
    """Fill a memfd here, and let a process without torch write it."""
    descriptor = os.memfd_create("limits")
    try:
        os.ftruncate(descriptor, size)
        noise = os.urandom(1 << 24)
        with mmap.mmap(descriptor, size) as view:
            for at in range(0, size, len(noise)):
                view[at : at + len(noise)] = noise[: size - at]
        arguments = [str(folder), str(size), str(descriptor), json.dumps(cells)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        command = [sys.executable, "-m", "peer.limits", *arguments]
        output = subprocess.run(command, pass_fds=[descriptor], env=environment, stdout=subprocess.PIPE, check=True)
        return json.loads(output.stdout)
    finally:
        os.close(descriptor)


def main() -> None:
    folder, size, descriptor, cells = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    with mmap.mmap(descriptor, size) as source, contextlib.suppress(BrokenPipeError):
        found = again(folder, size, source, cells) if cells else disk_limits(folder, size, source)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
