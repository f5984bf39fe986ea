"""The child that trains and saves: `python -m peer.trainer SPEC`, where SPEC is a JSON object.

saves   train without the peer, open it, then save again and again, each until durable and a few iterations more
kill    one save until durable, then another one, after which the parent kills this process
every   stepwell only: an in-memory snapshot at every iteration
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from peer import disk
from peer.clock import Marks
from peer.parent import Parent
from peer.rows import row_class
from peer.rows.base import Row, Saved
from peer.workload import Workload, build

WARM_ITERATIONS, CLEAN_ITERATIONS, GAP_ITERATIONS = 3, 8, 4
KEPT_CHECKPOINTS = 2


class Watch(threading.Thread):
    """Waits until a save is done, makes it durable where the peer did not, and notes both times."""

    def __init__(self, row: Row, step: int, saved: Saved) -> None:
        super().__init__(daemon=True)
        self._row, self._step, self._saved = row, step, saved
        self.done_at = self.durable_at = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._saved.wait_done()
            self.done_at = time.monotonic()
            if self._row.fsyncs != "all":
                disk.sync_tree(self._row.path(self._step))
            self.durable_at = time.monotonic()
        except BaseException as error:
            self.error = error


class Training:
    """The loop around one row."""

    def __init__(self, work: Workload, row: Row) -> None:
        self.work, self.row = work, row
        self.marks = Marks(work.device)
        self.saves: list[dict[str, Any]] = []
        self.disturbed: set[int] = set()  # iterations with our own housekeeping in them
        self.is_open = False
        self._staged: Saved | None = None
        self._kept: list[int] = []

    def iterate(self, *, tick: bool = True) -> None:
        """One iteration up to the mark; what belongs to the end of the loop's body counts to the next one."""
        self.work.compute()
        if self._staged is not None:
            started = time.monotonic()
            self._staged.wait_staged()
            self.saves[-1]["staging_wait"] = time.monotonic() - started
            self._staged = None
        started = time.monotonic()
        with self.row.guard() if self.is_open else contextlib.nullcontext():
            entered = time.monotonic()
            self.work.update()
        if self.saves and self.saves[-1]["mark"] == len(self.marks) - 1:
            self.saves[-1]["staging_wait"] += entered - started
        self.marks.mark()
        if tick and self.is_open:
            self.row.tick()

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            self.iterate()

    def save(self) -> Watch:
        """The end of an iteration that saves."""
        self.iterate(tick=False)
        step, started = self.work.steps_done, time.monotonic()
        saved = self.row.save(step)
        call = time.monotonic() - started
        self._staged = saved
        watch = Watch(self.row, step, saved)
        watch.start()
        facts = {"step": step, "mark": len(self.marks) - 1, "started": started, "call": call, "staging_wait": 0.0}
        self.saves.append(facts)
        return watch

    def save_until_durable(self, gap: int) -> None:
        """Save, train until it is durable, then some clean iterations."""
        watch = self.save()
        while watch.is_alive():
            self.iterate()
        if watch.error is not None:
            raise watch.error
        self.saves[-1].update(done=watch.done_at, durable=watch.durable_at)
        self._kept.append(self.saves[-1]["step"])
        self.disturbed.add(len(self.marks) - 1)
        while len(self._kept) > KEPT_CHECKPOINTS:
            self.row.forget(self._kept.pop(0))
        self.train(1 + gap)

    @property
    def kept(self) -> list[int]:
        return list(self._kept)


def sample(parent: Parent, name: str, work: Any) -> None:
    """Let the parent measure memory while `work` runs."""
    parent.ask("sample", name=name)
    work()
    parent.ask("stop")


def run_saves(spec: dict[str, Any], parent: Parent) -> dict[str, Any]:
    cls, where = row_class(spec["row"]), Path(spec["where"])
    cls.before_training(where)
    work = build(spec["size"], loop=spec["loop"], device=spec["device"])
    row = cls(where, work)
    training = Training(work, row)
    training.train(WARM_ITERATIONS)
    sample(parent, "baseline", lambda: training.train(2))
    many = 20 if work.is_dispatch else 1
    clean_from = len(training.marks)
    training.train(CLEAN_ITERATIONS * many)
    opened = time.monotonic()
    row.open()
    training.is_open = True
    open_seconds = time.monotonic() - opened
    settled = time.monotonic() + row.settle_seconds() * (0.25 if spec["size"] == "tiny" else 1)
    while time.monotonic() < settled:
        training.iterate()
    training.disturbed.update(range(clean_from + CLEAN_ITERATIONS * many - 1, len(training.marks)))
    until = time.monotonic() + spec["budget"]
    while len(training.saves) < spec["saves"] and (len(training.saves) < 2 or time.monotonic() < until):
        training.save_until_durable(GAP_ITERATIONS * many)
        parent.say("saved", number=len(training.saves))
    timed = len(training.saves)
    looks = 2 if training.saves[-1]["durable"] - training.saves[-1]["started"] < 4 else 1
    sample(parent, "peak", lambda: [training.save_until_durable(1) for _ in range(looks)])
    sample(parent, "kept", lambda: training.train(3 * many))
    return {
        "state_bytes": work.state_bytes(),
        "tensors": len(work.state()),
        "open_seconds": open_seconds,
        "clean_from": clean_from,
        "ends": training.marks.ends(),
        "saves": training.saves[:timed],
        "disturbed": sorted(training.disturbed),
        "kept": training.kept,
        "files": [str(row.path(step)) for step in training.kept],
        "file_bytes": disk.total_bytes(row.path(training.kept[-1])),
        "notes": row.notes + ([] if work.is_finite() else ["the training diverged"]),
        "facts": row.facts(),
    }


def run_kill(spec: dict[str, Any], parent: Parent) -> dict[str, Any]:
    cls, where = row_class(spec["row"]), Path(spec["where"])
    cls.before_training(where)
    work = build(spec["size"], loop=spec["loop"], device=spec["device"], kill=True)
    row = cls(where, work)
    training = Training(work, row)
    training.train(WARM_ITERATIONS)
    row.open()
    training.is_open = True
    settled = time.monotonic() + min(row.settle_seconds(), 4.0)
    while time.monotonic() < settled:
        training.iterate()
    training.save_until_durable(2)
    training.save()
    parent.say("returned", step=work.steps_done, state_bytes=work.state_bytes())
    until = time.monotonic() + 60
    while time.monotonic() < until:
        training.iterate()
    return {}


def run_every(spec: dict[str, Any], parent: Parent) -> dict[str, Any]:
    """Clean iterations, then as many with a snapshot at each."""
    stepwell = __import__("stepwell")
    work = build(spec["size"], loop=spec["loop"], device=spec["device"])
    row: Any = row_class("stepwell")(Path(spec["where"]), work)
    training = Training(work, row)
    training.train(WARM_ITERATIONS)
    count = spec["iterations"]
    clean_from = len(training.marks)
    training.train(count)
    try:
        row.open(memory=stepwell.Every(steps=1))
    except (TypeError, stepwell.ConfigError) as error:
        return {"why_not": f"{type(error).__name__}: {error}"}
    training.is_open = True
    settled = time.monotonic() + row.settle_seconds()
    while time.monotonic() < settled:
        training.iterate()
    every_from = len(training.marks)
    training.train(count)
    every_to = len(training.marks)
    row.close()
    training.is_open = False
    training.train(2)
    again_from = len(training.marks)
    training.train(max(count // 2, 5))
    ends = training.marks.ends()
    length = [b - a for a, b in pairwise(ends)]
    clean, again = length[clean_from : clean_from + count - 1], length[again_from:]
    every = length[every_from : every_to - 1]
    return {
        "clean": clean,
        "clean_after": again,
        "every": every,
        "overhead_percent": 100 * (statistics.median(every) / statistics.median(clean + again) - 1),
        "state_bytes": work.state_bytes(),
        "snapshots": len(row.events("snapshot")),
        "void": len(row.events("snapshot-void")),
        "skipped": len(row.events("snapshot-skipped")),
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    parent = Parent()
    torch.set_num_threads(spec["threads"])
    try:
        result = {"saves": run_saves, "kill": run_kill, "every": run_every}[spec["phase"]](spec, parent)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    Path(spec["result"]).write_text(json.dumps(result))
    parent.ask("finished")  # the parent may kill us here


if __name__ == "__main__":
    main()
