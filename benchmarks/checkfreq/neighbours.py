"""Other jobs on the machine: one that hammers the disk, one on every core, one on the GPU.

    python neighbours.py KIND FOLDER BYTES BLOCK     KIND: disk, cpu, gpu; BYTES of each file on the disk, by BLOCK

Each makes itself ready and stops itself (SIGSTOP); the parent lets it run and stops it again. It dies with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FILE_BYTES, QUICK_BYTES, BLOCK_BYTES, WRITERS = 1 << 28, 1 << 24, 1 << 22, 4


class Neighbours:
    """The parent's side."""

    def __init__(self, kind: str, folder: Path, *, quick: bool, block_bytes: int = BLOCK_BYTES) -> None:
        from record import HERE, environment

        count = (os.cpu_count() or 1) if kind == "cpu" else 1
        command = [
            sys.executable,
            str(HERE / "neighbours.py"),
            kind,
            str(folder),
            str(QUICK_BYTES if quick else FILE_BYTES),
            str(block_bytes),
        ]
        self._jobs = [subprocess.Popen(command, env=environment()) for _ in range(count)]
        for job in self._jobs:
            while job.poll() is None and _status(job.pid) != "T":
                time.sleep(0.01)

    def on(self) -> None:
        self._tell(signal.SIGCONT)

    def off(self) -> None:
        self._tell(signal.SIGSTOP)

    def end(self) -> None:
        self._tell(signal.SIGKILL)
        for job in self._jobs:
            job.wait()

    def _tell(self, number: signal.Signals) -> None:
        for job in self._jobs:
            if job.poll() is None:
                job.send_signal(number)


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for_the_word() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hammer_the_disk(folder: Path, file_bytes: int, block_bytes: int) -> None:
    """Large files, written and synced again and again."""
    noise = os.urandom(block_bytes)
    wait_for_the_word()

    def write(path: Path) -> None:
        while True:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for _ in range(max(1, file_bytes // block_bytes)):
                os.write(fd, noise)
            os.fsync(fd)
            os.close(fd)

    threads = [threading.Thread(target=write, args=(folder / f"neighbour-{n}",)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    threads[0].join()


def burn_a_core() -> None:
    wait_for_the_word()
    while True:
        sum(range(10_000))


def load_the_gpu() -> None:
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)
    torch.cuda.synchronize()
    wait_for_the_word()
    while True:
        for _ in range(4):
            torch.mm(a, a)
        torch.cuda.synchronize()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; `record` would import torch for this
    if sys.argv[1] == "disk":
        hammer_the_disk(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "cpu":
        burn_a_core()
    else:
        load_the_gpu()
