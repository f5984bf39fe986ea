"""Running the script and the commands as a person does, and spoiling runs as disks and crashes do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import read_progress
from stepwell.tools.cli.main import main
from tests.crash.harness import Server, Trainer, start_script

TRAINER = Path(__file__).with_name("trainer.py")
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def stepwell(*arguments: object) -> Answer:
    """Run a command in this process. An exception that is not turned into a sentence fails the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="stepwell")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def good(*arguments: object) -> Answer:
    """Run a command that must work."""
    answer = stepwell(*arguments)
    assert answer.code == 0, answer
    return answer


def begin(server: Server, where: Path, *arguments: object, script: Path = TRAINER, **env: str) -> Trainer:
    """Start the script, or a changed copy of it, with a log of its own."""
    where.parent.mkdir(parents=True, exist_ok=True)
    log = where.parent / f"{where.name}.{uuid.uuid4().hex}.log"
    return start_script(server, script, where, *arguments, log=log, **{"STEPWELL_LINGER": "0.1", **env})


def train(server: Server, where: Path, *arguments: object, code: int = 0, script: Path = TRAINER, **env: str) -> None:
    """Run the script, or a changed copy of it, to its end."""
    trainer = begin(server, where, *arguments, script=script, **env)
    assert trainer.wait(2 * DEADLINE_SECONDS) == code, trainer.log()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` gives something true; fail with `what` at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.005)
    return found


class Training:
    """The script as a running process, with its agent."""

    def __init__(self, server: Server, where: Path, *arguments: object, **env: str) -> None:
        self.paths = RunPaths(where)
        self.process = begin(server, where, *arguments, **{"STEPWELL_LINGER": "600", **env})
        lines = wait_for(lambda: re.findall(r"^open .*\n", self.process.log(), re.MULTILINE), "the run is open")
        self.agent_pid = int(lines[0].split()[2])
        self._agent = os.pidfd_open(self.agent_pid)
        self._agent_ended = False

    def step(self) -> int:
        progress = read_progress(self.paths.progress)
        return 0 if progress is None else progress.step

    def kill(self) -> None:
        """The trainer alone; its agent lingers."""
        self.process.kill()
        self.process.wait()

    def kill_agent(self) -> None:
        if not self._agent_ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._agent, signal.SIGKILL)
            self.wait_for_agent()

    def wait_for_agent(self) -> None:
        """Until the agent has ended."""
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        assert poll.poll(DEADLINE_SECONDS * 1000), f"agent {self.agent_pid} still runs"
        self._agent_ended = True

    def end(self) -> None:
        """No process is left, whatever the test did."""
        self.kill()
        self.kill_agent()
        os.close(self._agent)


def flip(path: Path, offset: int) -> None:
    """One bit of one byte, as a disk would."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def listing(root: Path) -> dict[str, int]:
    """Every file below a directory with its size."""
    return {str(path.relative_to(root)): path.lstat().st_size for path in sorted(root.rglob("*")) if path.is_file()}
