"""Told to leave: signals and notices. Real processes, real signals; the step that runs is finished and saved."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.events.journal import read_events
from stepwell.storage.store.learned import CLOSED, TOLD, read_history
from tests.crash.harness import Server, start_script, wait_for
from tests.ranks.conftest import soak
from tests.training.loop.small import Numbers, Small

SCRIPT = Path(__file__).with_name("leaver.py")


class Leaver:
    """The script, driven line by line."""

    def __init__(self, server: Server, where: Path, environment: dict[str, str] | None = None, **wishes: Any) -> None:
        self.where = where
        self._go = where.parent / "go"
        self._go.unlink(missing_ok=True)
        log = where.parent / f"{where.name}-{time.monotonic_ns()}.log"
        environment = {"STEPWELL_LINGER": "0", **(environment or {})}
        self.process = start_script(server, SCRIPT, where, json.dumps(wishes), log=log, **environment)

    @property
    def lines(self) -> list[str]:
        """What it has printed, up to the last line that is whole."""
        return self.process.log().rpartition("\n")[0].splitlines()

    def until(self, start: str) -> str:
        def found() -> str | None:
            has_ended = self.process.has_ended()  # asked first: what it printed is there then
            line = next((line for line in self.lines if line.startswith(start)), None)
            assert line or not has_ended, f"{start!r} never came:\n{self.process.log()}"
            return line

        return str(wait_for(found, start))

    def go_on(self) -> None:
        self._go.touch()

    def end(self) -> int:
        return self.process.wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.where / "events.jsonl") if event["kind"] == kind]

    def batches(self) -> dict[int, str]:
        found = [line.split(" ", 2) for line in self.lines if line.startswith("batch")]
        return {int(step): ids for _, step, ids in found}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"


def test_sigterm_in_the_middle_of_an_iteration_loses_nothing(server: Server, where: Path) -> None:
    """Grace of 5 s: the exit status says "start me again", and the next process goes on with the next batch."""
    leaver = Leaver(server, where, at=5, grace=5)
    leaver.until("middle")
    leaver.process.signal(signal.SIGTERM)
    leaver.go_on()
    assert leaver.end() == 75
    (told,) = leaver.events("told")
    (left,) = leaver.events("left")
    assert (told["by"], left["step"], left["durable"]) == ("SIGTERM", 5, True)
    assert max(leaver.batches()) == 5, "the iteration that ran was the last one"
    assert read_history(where / "history.json").ended == TOLD
    again = Leaver(server, where, at=0)
    assert again.until("restored") == "restored True 5"
    assert again.end() == 0
    assert min(again.batches()) == 6
    history = read_history(where / "history.json")
    assert (history.failures, history.ended) == (0, CLOSED), "announced: no failure"
    whole = Leaver(server, where.parent / "whole", at=0)
    assert whole.end() == 0
    assert whole.batches() == {**leaver.batches(), **again.batches()}


@pytest.mark.parametrize(("number", "status"), [soak(signal.SIGUSR1, 75), (signal.SIGINT, -signal.SIGINT)])
def test_other_signals(server: Server, where: Path, number: signal.Signals, status: int) -> None:
    leaver = Leaver(server, where, at=5)
    leaver.until("middle")
    leaver.process.signal(number)
    leaver.go_on()
    assert leaver.end() == status
    assert leaver.events("left")[0]["durable"] and leaver.events("commit")[-1]["step"] == 5


def test_ctrl_c_with_workers_ends_the_iteration_first_and_leaves_nobody(server: Server, where: Path) -> None:
    """A terminal sends it to the whole group; forked workers must not die of it before their batch is delivered."""
    leaver = Leaver(server, where, at=5, workers=2)
    leaver.until("middle")
    os.killpg(leaver.process.pid, signal.SIGINT)
    leaver.go_on()
    assert leaver.end() == -signal.SIGINT
    assert leaver.events("left")[0]["durable"] and leaver.events("commit")[-1]["step"] == 5
    with pytest.raises(ProcessLookupError):
        os.killpg(leaver.process.pid, 0)


def test_the_second_ctrl_c_leaves_at_once(server: Server, where: Path) -> None:
    leaver = Leaver(server, where, at=5)
    leaver.until("middle")
    leaver.process.signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while leaver.process.signal(signal.SIGINT) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leaver.end() == -signal.SIGINT
    assert max(event["step"] for event in leaver.events("commit")) == 3, "what was saved before stays"


@pytest.mark.parametrize("way", ["option", soak("environment")])
def test_a_notice_file(server: Server, where: Path, way: str) -> None:
    notice = where.parent / "notice"
    leaver = (
        Leaver(server, where, at=5, notice=str(notice))
        if way == "option"
        else Leaver(server, where, {"STEPWELL_NOTICE": str(notice)})
    )
    leaver.until("middle")
    notice.touch()
    time.sleep(1.2)  # it is looked for once a second
    leaver.go_on()
    assert leaver.end() == 75
    assert leaver.events("told")[0]["by"] == "notice" and leaver.events("left")[0]["durable"]


@pytest.mark.parametrize(("handler", "status"), [("notes", 75), soak("exits", 9)])
def test_a_handler_that_was_there_before_is_called(server: Server, where: Path, handler: str, status: int) -> None:
    """One that wants to exit does so, after the checkpoint."""
    leaver = Leaver(server, where, at=5, handler=handler)
    leaver.until("middle")
    leaver.process.signal(signal.SIGTERM)
    leaver.go_on()
    assert leaver.end() == status
    assert (where.parent / "handled").read_text() == "SIGTERM"
    assert leaver.events("left")[0]["durable"]


@pytest.mark.soak
def test_a_handler_below_python_is_left_alone(server: Server, where: Path) -> None:
    leaver = Leaver(server, where, at=5, handler="faulthandler")
    leaver.until("middle")
    leaver.process.signal(signal.SIGUSR1)
    leaver.go_on()
    assert leaver.end() == 0, "it wrote its traceback, and training went on"
    assert not leaver.events("told")


def test_an_iteration_that_does_not_end_is_left_when_the_time_is_over(server: Server, where: Path) -> None:
    """It waits for something that never comes. What was complete before is there."""
    leaver = Leaver(server, where, at=5, grace=1.5)
    leaver.until("middle")
    leaver.process.signal(signal.SIGTERM)
    assert leaver.end() == 75
    (left,) = leaver.events("left")
    assert not left["durable"] and "grace time is over" in left["reason"]
    assert max(event["step"] for event in leaver.events("commit")) == 3
    assert read_history(where / "history.json").ended == TOLD


def test_ctrl_c_in_an_iteration_that_does_not_end_becomes_an_exception(server: Server, where: Path) -> None:
    """A person is there: the interpreter lives on, as after any Ctrl-C."""
    leaver = Leaver(server, where, at=5, grace=1)
    leaver.until("middle")
    leaver.process.signal(signal.SIGINT)
    assert leaver.end() == -signal.SIGINT
    assert not leaver.events("left")[0]["durable"]


@pytest.mark.parametrize("has_notice", [soak(False), True])
def test_a_launcher_ends_everybody_when_one_dies(server: Server, where: Path, has_notice: bool) -> None:
    """Then there is nothing to save; with a notice it is a preemption."""
    notice = where.parent / "notice"
    if has_notice:
        notice.touch()
    leaver = Leaver(server, where, {"TORCHELASTIC_RUN_ID": "1"}, at=1 if has_notice else 5, notice=str(notice))
    leaver.until("middle")
    leaver.process.signal(signal.SIGTERM)
    leaver.go_on()
    assert leaver.end() == (75 if has_notice else 143)
    assert leaver.events("left")[0]["durable"] is has_notice
    assert leaver.events("told")[0]["saves"] is has_notice
    assert max(event["step"] for event in leaver.events("commit")) == (1 if has_notice else 3)


@pytest.mark.soak
def test_a_forked_child_that_is_told_to_leave_does_not_take_its_parent_along(server: Server, where: Path) -> None:
    leaver = Leaver(server, where, at=5, how="child")
    assert leaver.until("child") == "child -15"
    leaver.go_on()
    assert leaver.end() == 0
    assert not leaver.events("told")


def test_between_epochs_nothing_new_is_begun(where: Path) -> None:
    """The order came during an evaluation, say: the next request of a batch is where the process leaves."""
    small = Small(where, {"policy": stepwell.Never()})
    batches = []
    with pytest.raises(SystemExit) as left:
        for epoch in small.ckpt.epochs(2):
            for batch in small.ckpt.data:
                batches.append(epoch)
                small.update(batch)
            os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 75 and set(batches) == {0}
    assert small.events("commit")[-1]["step"] == 6
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "given back"


def test_workers_that_died_of_the_signal_do_not_hide_it(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(where, {"policy": stepwell.Never()})
    reads = 0

    def failing(self: Numbers, index: int) -> torch.Tensor:
        nonlocal reads
        reads += 1
        if reads > 8:
            os.kill(os.getpid(), signal.SIGUSR1)
            raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
        return torch.full((8,), float(index))

    monkeypatch.setattr(Numbers, "__getitem__", failing)
    with pytest.raises(SystemExit):
        small.train()
    assert small.events("left")[0]["durable"] and small.events("commit")[-1]["step"] == 2


def test_without_grace_signals_are_left_alone(server: Server, where: Path) -> None:
    leaver = Leaver(server, where, at=5, grace=None)
    leaver.until("middle")
    leaver.process.signal(signal.SIGTERM)
    assert leaver.end() == -signal.SIGTERM
    assert not leaver.events("told")
