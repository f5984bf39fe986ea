"""A training process that is going to be killed, and the parent's view of it.

    python trainer.py '{"network": ..., "run": ..., "notes": ..., ...}'
    python trainer.py nursery        forks one for each such line that it reads

A cold start imports all anew. A warm one is forked from a process (the nursery) that has imported torch and done
nothing with it, as a launcher could that keeps one ready: its restart is short.

Owns:    the notes: when each life of the run reached what (one line each), and the step it is at (24 bytes, rewritten
         after every step), both readable after a SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()
_STEP = struct.Struct("qdq")
BEGUN, IMPORTED, BUILT, RESTORED, FIRST = "begun", "imported", "built", "restored", "first step"


class Notes:
    """Both sides: the trainer writes, the parent reads."""

    def __init__(self, folder: Path) -> None:
        self._lines, self._at = folder / "lives.jsonl", folder / "step"
        self._fd = -1

    def say(self, what: str, *, moment: float | None = None, **facts: Any) -> None:
        line = {"pid": os.getpid(), "what": what, "time": moment or time.time(), **facts}
        with self._lines.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def step(self, number: int) -> None:
        if self._fd < 0:
            self._fd = os.open(self._at, os.O_RDWR | os.O_CREAT)
        os.pwrite(self._fd, _STEP.pack(number, time.time(), os.getpid()), 0)

    def now_at(self) -> tuple[int, float, int]:
        """Step, when, and whose."""
        try:
            return _STEP.unpack(self._at.read_bytes())
        except (OSError, struct.error):
            return 0, 0.0, 0

    def of(self, pid: int) -> dict[str, dict[str, Any]]:
        """What a life has reached so far."""
        try:
            lines = [json.loads(line) for line in self._lines.read_text().splitlines()]
        except (OSError, ValueError):
            return {}
        return {line["what"]: line for line in lines if line["pid"] == pid}


class Cold:
    """Processes that are started from nothing."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, what: dict[str, Any]) -> int:
        from record import HERE, environment

        command = [sys.executable, str(HERE / "trainer.py"), json.dumps(what)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
        return self._process.pid

    def is_alive(self, pid: int) -> bool:
        return self._process is not None and self._process.poll() is None


class Warm:
    """Processes that are forked from the nursery, which reaps them."""

    def __init__(self, log: Path) -> None:
        from record import HERE, environment

        command = [sys.executable, str(HERE / "trainer.py"), "nursery"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("ab") as out:
            self._nursery = subprocess.Popen(command, env=environment(), stderr=out, **pipes)
        assert self._nursery.stdout is not None
        self._nursery.stdout.readline()  # it has imported everything

    def start(self, what: dict[str, Any]) -> int:
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(what) + "\n")
        self._nursery.stdin.flush()
        return int(self._nursery.stdout.readline())

    def is_alive(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: Any) -> None:
        self._nursery.kill()
        self._nursery.communicate()


class Lives:
    """The parent's side: starts the run again and again."""

    def __init__(self, folder: Path, *, source: Cold | Warm | None = None, **what: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run, self.notes = folder / "run", Notes(folder)
        self._what = {**what, "run": str(self.run), "notes": str(folder)}
        self._log = folder / "trainer.log"
        self._source = source or Cold(self._log)
        self.pid = 0
        self.started = 0.0

    def start(self) -> int:
        """Another life. Returns its process id."""
        self.started = time.time()
        self.pid = self._source.start(self._what)
        return self.pid

    def is_alive(self) -> bool:
        return self.pid > 0 and self._source.is_alive(self.pid)

    def kill(self, *, agent: bool = False) -> None:
        """SIGKILL the trainer, and with `agent` the agent too: then only the disk is left."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        if agent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.agent_pid(), signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.001)

    def agent_pid(self) -> int:
        """Of the last life. Raises ProcessLookupError."""
        from trail import Trail

        starts = Trail(self.run).of("start")
        if not starts:
            raise ProcessLookupError
        pid = int(starts[-1]["agent_pid"])
        with contextlib.suppress(OSError):
            if b"stepwell" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise ProcessLookupError

    def error(self) -> str:
        """The last line of what the trainer said."""
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1] if lines else "the trainer said nothing"


def train(what: dict[str, Any], begun: float) -> None:
    """Until it is killed."""
    notes = Notes(Path(what["notes"]))
    notes.say(BEGUN, moment=begun)
    import record
    import torch
    from networks import build
    from peer.clock import Marks

    import stepwell

    record.die_with_parent()
    notes.say(IMPORTED)
    work = build(what["network"], device=what["device"], quick=what["quick"], precision=what["precision"])
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    notes.say(BUILT)
    seconds, mtbf = what.get("every_seconds"), what.get("mtbf")
    policy = stepwell.Every(seconds=seconds) if seconds else stepwell.Auto(mtbf=mtbf)
    ckpt = stepwell.Checkpointer(what["run"], policy=policy, model=work.model, optimizer=work.optimizer)
    ckpt.restore()
    marks, step = Marks(work.device), ckpt.status().step
    notes.say(RESTORED, step=step)
    work.iterate()
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    notes.say(FIRST, step=step + 1)
    while True:
        marks.mark()
        ckpt.step()
        step += 1
        notes.step(step)
        work.iterate()


def nursery() -> None:
    """Imports, then forks a trainer for each line. No operation, no CUDA here: they do not survive a fork."""
    import record
    import torch
    import torch._dynamo  # the first optimizer would
    from networks import NETWORKS  # noqa: F401

    import stepwell  # noqa: F401

    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401
        from transformers import BertForMaskedLM  # noqa: F401
    record.die_with_parent()
    assert not torch.cuda.is_initialized()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            begun = time.time()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(2, 1)
            train(json.loads(line), begun)
        print(pid, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        nursery()
    else:
        train(json.loads(sys.argv[1]), STARTED)
