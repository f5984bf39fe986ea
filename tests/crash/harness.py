"""Runs the trainer as real processes, kills them, starts them again, and checks what must hold afterwards.

Owns:    the fork server, one run directory with all processes that belong to it, and the invariants of a restart.
Not:     when and whom to kill (the tests).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.errors import DamagedError
from stepwell.events import journal
from stepwell.restore.from_disk import open_file
from stepwell.restore.verified_read import read_record_leaves
from stepwell.storage.format.record import Record
from stepwell.storage.store import catalog, files
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import read_progress

HERE = Path(__file__).parent
TRAINER = HERE / "trainer.py"
TOKEN = "STEPWELL_TEST_RUN"
DEADLINE_SECONDS = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Poll until `condition` gives something true and return it; fail with `what` at the deadline."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.002)
    return found


def report(line: str) -> None:
    """Say what a long test did; `make soak` shows it at the end (workers of xdist have no terminal)."""
    print(line)
    if path := os.environ.get("STEPWELL_SOAK_REPORT"):
        with open(path, "a") as file:
            file.write(f"{line}\n")


class Server:
    """The process that forks trainers. `modules`: what it imports for them, beside what every trainer needs."""

    def __init__(self, *modules: str) -> None:
        # One thread each: a forked child is then what a fresh process would be, and the bits do not depend on cores.
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), "stepwell-crash-server", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **single},
            text=True,
        )
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        assert line, "the fork server did not start; its error is above"

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        # Its end is not left to that of the pipe, which loader workers that this process forked may hold open.
        self._process.stdin.write(json.dumps({"end": True}) + "\n")
        self._process.stdin.close()
        self._process.wait(timeout=DEADLINE_SECONDS)
        self._process.stdout.close()


class Namespace:
    """A mount namespace: nothing outside sees what is mounted in it, and it ends with the last process in it."""

    def __init__(self, mount: str) -> None:
        """`mount` is a shell command. Raises OSError with its message if it is not permitted."""
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f"{mount}\necho done\nexec sleep 1d"]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = self._holder.pid
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "done\n":
            message = self._holder.stderr.read().strip()
            self.close()
            raise OSError(message)

    def seen(self, path: Path) -> Path:
        """A path in the namespace, from outside."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Process:
    """A process that is signalled through a pidfd, so never a stranger with the same number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def signal(self, number: int) -> bool:
        """False if it was dead already."""
        if self.has_ended():
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)
            return True
        return False

    def kill(self) -> bool:
        return self.signal(signal.SIGKILL)

    def has_ended(self, seconds: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def is_stopped(self) -> bool:
        return not self.has_ended() and _state(self.pid) == "T"

    def close(self) -> None:
        os.close(self._handle)


class Trainer(Process):
    """A forked trainer. `wait` gives its exit status, negative for a signal."""

    def __init__(self, server: Server, request: dict[str, Any]) -> None:
        super().__init__(server.ask(request)["pid"])
        self._server = server
        self._log = Path(request["log"])
        self._status: int | None = None

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        if self._status is None:
            assert self.has_ended(seconds), f"trainer {self.pid} still runs after {seconds:.0f} s:\n{self.log()}"
            self._status = self._server.ask({"reap": self.pid})["status"]
            self.close()
        return self._status

    def log(self) -> str:
        """What it and its agent wrote to the terminal."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def start_script(server: Server, script: Path, *words: object, log: Path, **env: str) -> Trainer:
    """An ordinary run of a script, without the seconds that its imports take."""
    start = [str(script), *map(str, words)]
    return Trainer(server, {"start": start, "env": env, "log": str(log), "namespace": 0})


@dataclass(frozen=True)
class Ending:
    """The final state of a run, as bytes and values, and the losses that were logged for each step, redone ones too."""

    step: int
    shards: dict[str, bytes]
    tree: Any
    losses: dict[int, set[float]]

    def difference(self, other: Ending, *, is_log_whole: bool = True) -> str | None:
        """The first thing that is not bit-identical, or None. A death, or a full disk, may leave gaps in the log."""
        if self.step != other.step:
            return f"step {self.step}, expected {other.step}"
        for name in sorted(self.shards.keys() | other.shards.keys()):
            if self.shards.get(name) != other.shards.get(name):
                return f"bytes of {name}"
        if self.tree != other.tree:
            return "tree of values"
        steps = [
            step
            for step, loss in other.losses.items()
            if self.losses.get(step) != loss and (is_log_whole or step in self.losses)
        ]
        return f"loss of step {steps[0]}" if steps else None


class Run:
    """One run directory and every process that works on it."""

    script = TRAINER

    def __init__(self, server: Server, where: Path, log: Path, namespace: Namespace | None = None, **env: str) -> None:
        self.server = server
        self.where = where
        self.namespace = namespace
        self.paths = RunPaths(where if namespace is None else namespace.seen(where))
        self.token = uuid.uuid4().hex
        self.env = {"STEPWELL_LINGER": "30", "TRAIN_PACE": "0.003", TOKEN: self.token, **env}
        self.log = log
        self.trainers: list[Trainer] = []
        self._committed: dict[int, int] = {}

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, **env: str) -> Trainer:
        """Start the script once more, with what is committed verified. `env` holds for this trainer and its agents."""
        committed = self.check_newest()
        request = {
            "start": [str(self.script), str(self.where)],
            "env": {**self.env, **env},
            "log": str(self.log),
            "namespace": 0 if self.namespace is None else self.namespace.pid,
        }
        trainer = Trainer(self.server, request)
        self.trainers.append(trainer)
        self._committed[trainer.pid] = committed
        return trainer

    def agents(self) -> list[Process]:
        """All live agents of this run, found by what they inherited. The caller closes them."""
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            is_ours = f"{TOKEN}={self.token}".encode() in _read(pid, "environ").split(b"\0")
            if is_ours and _state(pid) not in ("Z", "X", ""):
                with contextlib.suppress(ProcessLookupError):
                    found.append(Process(pid))
        return found

    def agent(self) -> Process:
        """The one agent of the running trainer, once it is known to the run directory."""

        def find() -> Process | None:
            progress = read_progress(self.paths.progress)
            if progress is None or progress.pid != self.trainers[-1].pid or not progress.agent_pid:
                return None
            with contextlib.suppress(ProcessLookupError):
                return Process(progress.agent_pid)
            return None

        found: Process = wait_for(find, "agent known to the run")
        return found

    def wait_paused(self) -> None:
        """Until the trainer stands in its thirtieth step (TRAIN_END=wait), all its snapshots committed."""
        sign = self.where.with_name(f"{self.where.name}.waits.{self.trainers[-1].pid}")
        wait_for(sign.exists, "the trainer waits in its thirtieth step")

    def kill_agents(self) -> int:
        """SIGKILL every agent; returns how many there were."""
        agents = self.agents()
        killed = sum(agent.kill() for agent in agents)
        for agent in agents:
            assert agent.has_ended(DEADLINE_SECONDS)
            agent.close()
        return killed

    def end_everything(self) -> None:
        """For teardown: nothing of this run survives, whatever state the test is in."""
        for trainer in self.trainers:
            if trainer._status is None:
                trainer.kill()
                trainer.wait()
        self.kill_agents()

    def wait_gone(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Until no agent is left."""

        def is_gone() -> bool:
            agents = self.agents()
            for agent in agents:
                agent.close()
            return not agents

        wait_for(is_gone, "agents end", seconds)

    # -- what the run directory says ----------------------------------------------------------------------------------

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Of all ranks, as they came."""
        files = sorted(self.paths.desk.glob("events*.jsonl"))
        found = [event for path in files for event in journal.read_events(path)]
        chosen = [event for event in found if kind is None or event["kind"] == kind]
        return chosen if len(files) == 1 else sorted(chosen, key=lambda event: event["time"])

    def newest(self) -> catalog.Entry | None:
        """The newest live committed checkpoint."""
        return next((entry for entry in catalog.scan(self.paths) if entry.is_live and entry.is_committed), None)

    def newest_step(self) -> int:
        entry = self.newest()
        return 0 if entry is None else entry.id.step

    def verify(self, entry: catalog.Entry) -> Record:
        """Read a checkpoint whole, every byte checked."""
        assert entry.manifest is not None, f"{entry.id}: {entry.damage}"
        record = catalog.read_record(self.paths, entry.manifest)
        read_record_leaves(record, lambda file: open_file(entry.path / file.name), None, lambda *_: None)
        return record

    def check_newest(self) -> int:
        """The newest committed checkpoint verifies; returns its step (0: none yet)."""
        while (entry := self.newest()) is not None:
            try:
                self.verify(entry)
            except DamagedError:
                if entry.id != getattr(self.newest(), "id", None):
                    continue  # an agent that finishes its work committed newer ones and pruned this one meanwhile
                raise
            return entry.id.step
        return 0

    def good(self) -> list[catalog.Entry]:
        return [entry for entry in catalog.scan(self.paths) if entry.is_live and entry.is_good]

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """One more start, to the end."""
        trainer = self.start()
        assert trainer.wait() == 0, trainer.log()

    def opening(self, trainer: Trainer) -> dict[str, Any] | None:
        """How a trainer began: its `restore` or `fresh` event; None if it died before."""
        mine = [event for event in self.events() if event["process"] == trainer.pid]
        return next((event for event in mine if event["kind"] in ("restore", "fresh")), None)

    def check_resumes(self) -> None:
        """Every trainer began from what was committed before its start, or from newer memory."""
        for trainer in self.trainers:
            committed, began = self._committed[trainer.pid], self.opening(trainer)
            if committed and began is not None:
                assert began["kind"] == "restore", f"step {committed} was committed, but a restart began from nothing"
                assert began["step"] >= committed, f"resumed step {began['step']}, committed was {committed}"

    def ending(self) -> Ending:
        """The final state."""
        entry = self.newest()
        assert entry is not None and entry.manifest is not None and entry.manifest.finished
        record = self.verify(entry)
        losses: dict[int, set[float]] = {}
        for event in self.events("log"):
            losses.setdefault(event["step"], set()).add(event["values"]["loss"])
        shards = {file.name: files.get(entry.path / file.name) for file in record.files}
        return Ending(entry.id.step, shards, record.tree, losses)

    def check_identical(self, reference: Ending) -> None:
        """It ended with the same bits, and got there by resuming. Values are logged a step late: a kill loses some."""
        self.check_resumes()
        was_killed = any(trainer.wait() not in (0, 1, 3) for trainer in self.trainers)
        difference = self.ending().difference(reference, is_log_whole=not was_killed)
        assert difference is None, difference

    def check_nothing_left(self) -> None:
        """No process, no socket, no temporary file, no directory that is not a checkpoint."""
        self.wait_gone()
        self.check_no_sockets()
        left = [str(path) for path in self.paths.desk.rglob("*.tmp")]
        assert not left, left
        uncommitted = [str(entry.id) for entry in catalog.scan(self.paths) if not entry.is_committed]
        assert not uncommitted, uncommitted

    def check_no_sockets(self) -> None:
        """None of the agents this run ever had can be found any more (a process closes its sockets last)."""
        agents = {event["process"] for event in self.events() if event["who"] == "agent"}
        wait_for(lambda: not any(has_socket(pid) for pid in agents), "sockets are gone", 5)


def undisturbed(server: Server, folder: Path, **env: str) -> Ending:
    """How the run ends when nothing happens to it."""
    run = Run(server, folder / "run", folder / "log", **env)
    assert run.start().wait() == 0, run.trainers[0].log()
    run.wait_gone()
    return run.ending()


def children(pid: int) -> list[Process]:
    """Forked children of a process, agents (which run another program) left out. The caller closes them."""
    command = _read(pid, "cmdline")
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [Process(child) for child in found if _read(child, "cmdline") == command]


def has_socket(pid: int) -> bool:
    """Whether a successor finds this agent by an abstract address."""
    with open("/proc/net/unix", errors="replace") as table:
        return any(name.startswith("@stepwell/") and name.endswith(f"/{pid}") for name in map(_last_word, table))


def _last_word(line: str) -> str:
    return (line.split() or [""])[-1]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _state(pid: int) -> str:
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].strip()[:1]
