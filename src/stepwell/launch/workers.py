"""The workers that torchrun started below this process, as the system sees them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_workers(job: str) -> int:
    """SIGKILL the children of this process that are workers of the job; returns how many lived.

    A child is told by the run id torchrun gave it: nothing else that this process started is touched. stepwell's own
    agents are not: they are no children of ours, and finish what is complete.
    """
    mark, killed = f"TORCHELASTIC_RUN_ID={job}".encode(), 0
    for pid in _children():
        with contextlib.suppress(OSError):  # it ended in between
            handle = os.pidfd_open(pid)
            try:
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):  # empty once it has ended
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed += 1
            finally:
                os.close(handle)
    return killed


def _children() -> set[int]:
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (thread / "children").read_text().split()}
    return found
