"""An agent as a process of the trainer: started with exec, so it never imports the user's script, and ended.

Holds:   an agent that does not end, whatever is done, is an error: two must not write the same files.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

from stepwell.errors import AgentError
from stepwell.handover.channel import Channel

_BOOT: Final = (
    "import sys; sys.path[:0] = sys.argv[2:]; del sys.argv[2:]; from stepwell.agent.process import main; main()"
)
_LOOK_SECONDS: Final = 0.02

Process = subprocess.Popen[bytes]
_left: deque[Process] = deque(maxlen=8)
"""Agents that outlive their client. Python warns when the object of a process that runs is collected."""


def start_process() -> tuple[Process, Channel]:
    """It and our end of its socket. Raises AgentError."""
    command = [sys.executable, "-I", "-S", "-c", _BOOT]
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), *_import_path()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd="/",
                )
            except BaseException:
                ours.close()
                raise
    except OSError as error:
        raise AgentError(f"cannot start the agent process: {error}", command=command[0]) from error
    return process, Channel(ours)


def has_died(process: Process | None, pid: int) -> bool:
    """Whether it has ended; without a process: that of a trainer before."""
    return process.poll() is not None if process is not None else not os.path.exists(f"/proc/{pid}")


def end_process(process: Process | None, pid: int, seconds: float) -> str:
    """Wait for its end, and kill it if that takes too long. Returns how it ended. Raises AgentError."""
    if not _wait_end(process, pid, seconds) and process is not None:
        process.kill()
    if not _wait_end(process, pid, seconds):
        raise AgentError(
            f"the agent (process {pid}) does not end, because its storage hangs; stepwell starts no other one", pid=pid
        )
    return "gone" if process is None else f"exit status {process.returncode}"


def leave_process(process: Process, seconds: float) -> bool:
    """Wait for its end. False: it goes on by itself, and nobody here waits for it any more."""
    if not _wait_end(process, process.pid, seconds):
        _left.append(process)
        return False
    return True


def _wait_end(process: Process | None, pid: int, seconds: float) -> bool:
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        return process.returncode is not None
    deadline = time.monotonic() + seconds
    while not has_died(None, pid) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return has_died(None, pid)


def _import_path() -> list[str]:
    """Where the isolated interpreter finds stepwell and what it needs, wherever the trainer found it."""
    import xxhash

    # Loaded by now if the run lies in a bucket, or has chains.
    needed = [xxhash, *map(sys.modules.get, ("obstore", "zstandard", "numpy"))]
    files = [Path(module.__file__) for module in needed if module is not None and module.__file__]
    found = [Path(__file__).resolve().parents[2], *(file.resolve().parents[1] for file in files)]
    return list(dict.fromkeys(map(str, found)))
