"""The user's command as a set of processes: started, watched, killed, and never left behind.

Owns:    the environment of a trial's run, and every process that carries its mark in that environment: trainer, agent,
         loader workers, and whatever wrapper (`bash -c ...`) stands around them.
Holds:   only marked processes are signalled, through a pidfd taken before the mark was checked: a pid that was
         used again belongs to somebody else. After `end_all` no marked process is alive.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError

_MARK: Final = "STEPWELL_PROVE"
_EXIT_SECONDS: Final = 30.0
_TAIL_LINES: Final = 25
_TAIL_BYTES: Final = 64 << 10
OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1 for torchrun: else the ranks that it starts again share the store of the dead, find their addresses there,
and cannot connect (torch 2.13, gloo and NCCL).
"""


class Command:
    """Starts the user's command again and again in one run directory. Constructing only assigns."""

    def __init__(self, words: Sequence[str], *, where: Path, output: Path) -> None:
        self._words = list(words)
        self._where = where
        self._output = output
        self._mark = f"{_MARK}={secrets.token_hex(8)}".encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._output_start = 0

    def start(self) -> None:
        """Start it once more. Its output is appended to the file. Raises ConfigError if there is no such program."""
        with self._output.open("ab") as output:
            self._output_start = output.tell()
            try:
                # A session of its own: Ctrl-C here must not reach the trainer as SIGINT, we end it ourselves.
                self._process = subprocess.Popen(
                    self._words,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"{self._words[0]}: cannot start it: {error.strerror}; give the training command after `--`"
                ) from error

    def _environment(self) -> dict[str, str]:
        """What both runs of a trial share. Settings that the user made stay as they are."""
        name, _, token = self._mark.decode().partition("=")
        return {
            "PYTHONHASHSEED": "0",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            "STEPWELL_VERIFY": "1",
            OWN_STORE: "1",
            **os.environ,
            "STEPWELL_WHERE": str(self._where),
            name: token,
        }

    def poll(self) -> int | None:
        """Exit status of the present attempt, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def kill(self, pids: Sequence[int], *, spare: Collection[int]) -> bool:
        """SIGKILL these processes in this order, then all others of the command but `spare`. False: none was left.

        The others are what a dead node takes with it: loader workers, and wrappers that would start it again. An agent
        that the trainer had started as a replacement within these microseconds goes with them, unless it is spared.
        """
        if not self.strike(pids):
            return False
        self.finish(spare=spare)
        return True

    def strike(self, pids: Sequence[int]) -> bool:
        """SIGKILL these processes in this order, and no other. False: one of them was gone, and nothing was done."""
        with contextlib.ExitStack() as stack:
            handles = [handle for pid in pids if (handle := self._open(pid, stack)) is not None]
            if len(handles) < len(pids):
                return False
            for handle in handles:
                _signal(handle)
            for handle in handles:
                _await_end(handle)
        return True

    def finish(self, *, spare: Collection[int]) -> None:
        """End what is left of this attempt but `spare`, so that the next one can be started."""
        assert self._process is not None
        self.end_all(spare=spare)
        self._process.wait(_EXIT_SECONDS)

    def end_all(self, *, spare: Collection[int] = ()) -> None:
        """SIGKILL every process of the command and wait until all are gone."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline:
            with contextlib.ExitStack() as stack:
                pids = [pid for pid in self._pids() if pid not in spare]
                handles = [handle for pid in pids if (handle := self._open(pid, stack)) is not None]
                if not handles:
                    return
                for handle in handles:
                    _signal(handle)
                for handle in handles:
                    _await_end(handle)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever happened: an error here, Ctrl-C, a lingering agent."""
        self.end_all()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)

    def last_lines(self) -> list[str]:
        """The end of what the present attempt printed."""
        with self._output.open("rb") as output:
            end = output.seek(0, os.SEEK_END)
            output.seek(max(self._output_start, end - _TAIL_BYTES))
            return output.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def _pids(self) -> Iterator[int]:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and self._is_ours(int(name)):
                yield int(name)

    def _is_ours(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # ended (a zombie reads as empty), or another user's
            return False

    def _open(self, pid: int, stack: contextlib.ExitStack) -> int | None:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return None
        stack.callback(os.close, handle)
        return handle if self._is_ours(pid) else None


def _signal(handle: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def _await_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(_EXIT_SECONDS * 1000)
