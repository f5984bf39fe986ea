"""Runs a training script as a real process, again and again, until it is done."""

from __future__ import annotations

from pathlib import Path

from tests.crash.harness import Server, Trainer


class Script:
    """A script with its arguments, and what it wrote: each run has a file of its own."""

    def __init__(self, server: Server, folder: Path, *command: str) -> None:
        self._server, self._folder, self._command = server, folder, list(command)
        self._runs, self._log = 0, folder / "log"
        self.output = ""

    def start(self, **settings: str) -> Trainer:
        """One run; the caller waits for its end."""
        self._runs += 1
        self._log = self._folder / f"log.{self._runs}"
        env = {"STEPWELL_LINGER": "20", **settings}
        return Trainer(self._server, {"start": self._command, "env": env, "log": str(self._log), "namespace": 0})

    def run(self, **settings: str) -> int:
        """One run to its end; the exit status, negative for a signal."""
        status = self.start(**settings).wait()
        self.output = self._log.read_text()
        return status

    def last_line(self) -> str:
        return self.output.splitlines()[-1]
