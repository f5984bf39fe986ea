"""Runs a training script as a real process, again and again, until it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.harness import Server, Trainer


@contextmanager
def fork_server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


class Script:
    """A script with its arguments, and what it wrote: each run has a file of its own."""

    def __init__(self, server: Server, folder: Path, *command: str) -> None:
        self._server, self._folder, self._command = server, folder, list(command)
        self._runs = 0
        self.output = ""

    def run(self, **settings: str) -> int:
        """One run to its end; the exit status, negative for a signal."""
        self._runs += 1
        log = self._folder / f"log.{self._runs}"
        request = {
            "start": self._command,
            "env": {"STEPWELL_LINGER": "20", **settings},
            "log": str(log),
            "namespace": 0,
        }
        status = Trainer(self._server, request).wait()
        self.output = log.read_text()
        return status

    def last_line(self) -> str:
        return self.output.splitlines()[-1]
