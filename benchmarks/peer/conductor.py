"""The parent's side of one row: start its children one after the other, measure them from outside, keep the answers.

saves -> (stepwell: kill it, restore from the lingering agent's memory) -> cold -> warm, damaged -> kill test
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer import disk
from peer.parent import VARIABLE
from peer.procs import MARK, Family, Sampler
from peer.rows import ROWS, row_class

KILL_AFTER_SECONDS, KILL_WAIT_SECONDS = 0.15, 30.0
HERE = Path(__file__).resolve().parent.parent


@dataclass
class Child:
    """A running child and what it said."""

    process: subprocess.Popen[bytes]
    sampler: Sampler
    family: Family
    log: Path
    answers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """What all children are told."""

    size: str
    loop: str
    device: str
    threads: int
    saves: int
    budget: float
    kills: int
    join_restores: bool
    scratch: Path
    progress: Callable[[str], None]


class Conductor:
    """Runs one row's children. A child that fails gives a reason, never an exception."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.where = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=settings.scratch))
        self.marks: list[Family] = []
        self.pids: list[int] = []

    def spec(self, phase: str, where: Path, **facts: Any) -> dict[str, Any]:
        s = self.settings
        common = {"size": s.size, "loop": s.loop, "device": s.device, "threads": s.threads, "row": self.name}
        return {"phase": phase, "where": str(where), "saves": s.saves, "budget": s.budget, **common, **facts}

    # -- one child ----------------------------------------------------------------------------------------------------

    def run(
        self,
        module: str,
        spec: dict[str, Any],
        on: dict[str, Callable[[Child, dict[str, Any]], str | None]] | None = None,
        *,
        timeout: float,
        leave: bool = False,
    ) -> tuple[dict[str, Any], Child]:
        """Start a child, answer what it asks, return its result. `leave`: its helpers live on."""
        result = Path(tempfile.mktemp(prefix="result-", suffix=".json", dir=self.settings.scratch))
        mark = uuid.uuid4().hex
        ours, theirs = socket.socketpair()
        environment = {**os.environ, MARK: mark, VARIABLE: str(theirs.fileno()), "PYTHONUNBUFFERED": "1"}
        paths = [str(HERE), os.environ.get("PYTHONPATH", ""), str(HERE.parent / "src")]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in paths if part)
        environment.setdefault("OMP_NUM_THREADS", str(self.settings.threads))
        log = result.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps({**spec, "result": str(result)})],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        family = Family(mark)
        self.marks.append(family)
        self.pids.append(process.pid)
        child = Child(process, Sampler(family), family, log)
        child.sampler.start()
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        try:
            self._talk(child, ours, on or {})
            process.wait()
        finally:
            late = not watchdog.is_alive()
            watchdog.cancel()
            child.sampler.stop()
            ours.close()
            if not leave:
                family.end()
        return self._result(child, result, "took too long" if late else None), child

    def _talk(self, child: Child, line: socket.socket, on: dict[str, Any]) -> None:
        answers: dict[str, Any] = {
            "sample": lambda c, m: c.sampler.begin(m["name"]),
            "stop": lambda c, m: c.sampler.finish(),
            **on,
        }
        buffer = b""
        line.settimeout(0.5)
        while True:
            try:
                received = line.recv(1 << 16)
            except TimeoutError:
                if child.process.poll() is not None:
                    return
                continue
            except OSError:
                return
            if not received:
                return
            buffer += received
            *lines, buffer = buffer.split(b"\n")
            for text in lines:
                message = json.loads(text)
                answer = answers[message["say"]](child, message) if message["say"] in answers else None
                with contextlib.suppress(OSError):
                    line.sendall(f"{'' if answer is None else answer}\n".encode())

    def _result(self, child: Child, result: Path, problem: str | None) -> dict[str, Any]:
        tail = child.log.read_text(errors="replace")[-1500:]
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
        else:
            found = {"error": problem or f"ended with status {child.process.returncode}", "tail": tail}
        if "error" in found:
            found.setdefault("tail", tail)
        result.unlink(missing_ok=True)
        child.log.unlink(missing_ok=True)
        return found

    # -- the row ------------------------------------------------------------------------------------------------------

    def measure(self) -> dict[str, Any]:
        """All phases of this row."""
        try:
            cls = row_class(self.name)
        except Exception as error:  # a peer that does not import is a row with a reason
            return {"label": ROWS[self.name][1], "error": f"{type(error).__name__}: {error}"[:300]}
        found: dict[str, Any] = {"label": cls.label, "is_async": cls.is_async, "fsyncs": cls.fsyncs}
        reason = cls.why_not(self.settings.device)
        if reason is not None:
            return {**found, "error": reason}
        try:
            self._measure(found, cls)
        finally:
            for family in self.marks:
                family.end()
            _sweep_shared(self.pids)
            shutil.rmtree(self.where, ignore_errors=True)
            self.where.with_suffix(".offset").unlink(missing_ok=True)
        return found

    def _measure(self, found: dict[str, Any], cls: Any) -> None:
        say, is_ours = self.settings.progress, self.name == "stepwell"
        run = self.where / "run"
        run.mkdir()
        on: dict[str, Any] = {"saved": lambda c, m: say(f"save {m['number']}")}
        if is_ours:
            on["finished"] = lambda c, m: c.process.kill()  # its agent lingers with the state in memory
        say("training")
        limit = self.settings.budget + 240
        saves, child = self.run("peer.trainer", self.spec("saves", run), on, timeout=limit, leave=is_ours)
        if "error" in saves:
            found.update(error=saves["error"], tail=saves.get("tail"), traceback=saves.get("traceback"))
            return
        found["saves"], found["memory"] = saves, child.sampler.memory
        found["cpu"], found["foreign_cores"] = _cpu_of_saves(saves, child.sampler), child.sampler.foreign_cores()
        steps, newest = saves["kept"], Path(saves["files"][-1])
        if is_ours:
            say("restore from memory")
            spec = self.spec("arena", run, steps=steps)
            found["arena"], _ = self.run("peer.restorer", spec, timeout=180)
            child.family.end()
        else:
            child.family.end()
        damage = [newest, Path(saves["files"][0])]
        on = {
            "cold": lambda c, m: f"{disk.drop_cache(newest)}",
            "flip": lambda c, m: str(disk.flip_bits(damage[m["number"] - 1])),
        }
        for phase in ("both",) if self.settings.join_restores else ("cold", "warm"):
            say(f"restore, {phase}")
            answer, _ = self.run("peer.restorer", self.spec(phase, run, steps=steps), on, timeout=240)
            found.update({phase: answer} if phase != "both" or "error" not in answer else {"cold": answer})
        found.update(found.pop("both", {}))
        shutil.rmtree(run, ignore_errors=True)
        run.with_suffix(".offset").unlink(missing_ok=True)
        if cls.is_async:
            found["kills"] = [self._kill(cls, number) for number in range(self.settings.kills)]

    def _kill(self, cls: Any, number: int) -> dict[str, Any]:
        """Kill the trainer alone, shortly after save() returned; give its helpers time; look what is there."""
        self.settings.progress(f"kill {number + 1}")
        where = self.where / f"kill{number}"
        where.mkdir()

        def returned(child: Child, message: dict[str, Any]) -> None:
            time.sleep(KILL_AFTER_SECONDS)
            os.kill(child.process.pid, signal.SIGKILL)
            child.answers.update(message)

        spec = self.spec("kill", where, budget=0)
        answer, child = self.run("peer.trainer", spec, {"returned": returned}, timeout=180, leave=True)
        if "step" not in child.answers:
            child.family.end()
            return {"error": answer.get("error", "never saved"), "tail": answer.get("tail")}
        step = child.answers["step"]
        row = cls(where, None)
        until = time.monotonic() + KILL_WAIT_SECONDS
        while time.monotonic() < until and not row.is_complete(step) and child.family.pids():
            time.sleep(0.1)
        time.sleep(0.5)
        child.family.end()
        outcome: dict[str, Any] = {"step": step, "state_bytes": child.answers["state_bytes"], "is_durable": False}
        if row.is_complete(step):
            spec = self.spec("check", where, steps=[step], kill=True)
            check, _ = self.run("peer.restorer", spec, timeout=180)
            outcome["is_durable"] = check.get("newest", {}).get("stamps") == [step]
            outcome["check"] = check
        shutil.rmtree(where, ignore_errors=True)
        where.with_suffix(".offset").unlink(missing_ok=True)
        return outcome


def _cpu_of_saves(saves: dict[str, Any], sampler: Sampler) -> list[float]:
    """CPU seconds that each save cost: those of its iterations beyond those of as many clean ones."""
    ends, disturbed = saves["ends"], set(saves["disturbed"])
    windows = [(save["mark"], last_iteration(save, ends)) for save in saves["saves"]]
    busy = {number for first, last in windows for number in range(first, last + 1)}
    calm = [n for n in range(saves["clean_from"], len(ends) - 1) if n not in busy and n not in disturbed]
    calm = [n for n in calm if n < windows[-1][1]]  # memory was looked at after the last save
    if not calm:
        return []
    each = sum(sampler.cpu_between(ends[n], ends[n + 1]) for n in calm) / len(calm)
    return [sampler.cpu_between(ends[a], ends[b + 1]) - each * (b + 1 - a) for a, b in windows]


def last_iteration(save: dict[str, Any], ends: list[float]) -> int:
    """The iteration in which a save became durable. Iteration n lies between marks n and n + 1."""
    number = int(save["mark"])
    while number + 2 < len(ends) and ends[number + 1] < save["durable"]:
        number += 1
    return number


def _sweep_shared(pids: list[int]) -> None:
    """Killed peers leave shared memory and sockets behind; they carry the child's process number in their names."""
    for pid in pids:
        for pattern in (f"/dev/shm/stepwell-bench-{pid}_*", f"/dev/shm/torch_{pid}_*"):
            for left in glob.glob(pattern):
                disk.remove(Path(left))
        shutil.rmtree(f"/tmp/ckpt_sock/stepwell-bench-{pid}", ignore_errors=True)  # DLRover's
