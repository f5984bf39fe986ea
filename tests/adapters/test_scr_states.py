"""SCR's state machine: every call in every state, and any order of calls against a model of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stepwell.adapters import scr
from stepwell.errors import StepwellError

UNINIT, IDLE, OUTPUT, RESTART = "uninit", "idle", "output", "restart"
CALLS: dict[str, Callable[[], Any]] = {
    "init": lambda: scr.init(),
    "finalize": lambda: scr.finalize(),
    "route_file": lambda: scr.route_file("here/a"),
    "have_restart": lambda: scr.have_restart(),
    "start_restart": lambda: scr.start_restart(),
    "complete_restart": lambda: scr.complete_restart(),
    "need_checkpoint": lambda: scr.need_checkpoint(),
    "start_output": lambda: scr.start_output("again", scr.FLAG_CHECKPOINT),
    "complete_output": lambda: scr.complete_output(),
    "should_exit": lambda: scr.should_exit(),
    "current": lambda: scr.current("one"),
    "delete": lambda: scr.delete("one"),
    "drop": lambda: scr.drop("one"),
    "config, to set": lambda: scr.config("SCR_FLUSH=3"),
    "config, to ask": lambda: scr.config("SCR_FLUSH"),
}
WHILE_IDLE = {"finalize", "have_restart", "need_checkpoint", "start_output", "should_exit", "current", "delete", "drop"}
LEGAL = {
    UNINIT: {"init", "route_file", "config, to set", "config, to ask"},
    IDLE: {*WHILE_IDLE, "route_file", "config, to ask"},  # start_restart: only after have_restart named one
    OUTPUT: {"route_file", "complete_output", "config, to ask"},
    RESTART: {"route_file", "complete_restart", "config, to ask"},
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here dies, so nothing has to be durable."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCR_PREFIX", str(tmp_path))
    monkeypatch.setenv("SCR_CACHE_BASE", str(tmp_path / "cache"))
    yield tmp_path
    end()


def end() -> None:
    """Leave, whatever the state."""
    if scr._program is not None:
        scr._program.state = scr.IDLE
        scr.finalize()
    scr._config = scr.Config()


def write(name: str, flags: int = scr.FLAG_CHECKPOINT, text: str = "") -> bool:
    scr.start_output(name, flags)
    Path(scr.route_file("here/a")).write_text(text or name)
    return scr.complete_output()


def enter(state: str) -> None:
    """From the start into a state, with one checkpoint there."""
    scr.init()
    write("one")
    if state == OUTPUT:
        scr.start_output("two", scr.FLAG_CHECKPOINT)
    elif state == RESTART:
        assert scr.have_restart() == "one"
        scr.start_restart()
    elif state == UNINIT:
        scr.finalize()


@pytest.mark.parametrize("state", LEGAL)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_every_state(place: Path, state: str, call: str) -> None:
    enter(state)
    before = scr._program and scr._program.state
    if call in LEGAL[state]:
        CALLS[call]()
        return
    with pytest.raises(RuntimeError, match=call.split(",")[0]) as caught:
        CALLS[call]()
    assert isinstance(caught.value, StepwellError)
    assert (scr._program and scr._program.state) == before, "a refused call changes nothing"
    if state == OUTPUT:
        Path(scr.route_file("here/a")).write_text("two")
        assert scr.complete_output()
    elif state == RESTART:
        assert Path(scr.route_file("here/a")).read_text() == "one"
        assert scr.complete_restart()


def test_a_restart_begins_only_after_one_was_named(place: Path) -> None:
    enter(IDLE)
    with pytest.raises(RuntimeError, match="have_restart"):
        scr.start_restart()
    assert scr.have_restart() == "one"
    assert scr.start_restart() == "one"


class Program(RuleBasedStateMachine):
    """Any order of calls: what is legal works and what it says is right, the rest is refused and changes nothing."""

    @initialize()
    def begin(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.state, self.whole, self.offered, self.count = UNINIT, [], None, 0  # type: ignore[var-annotated]
        self.texts: dict[str, str] = {}
        self.done = self.routed = False
        self.gone_on: str | None = None
        scr._config = scr.Config()

    def teardown(self) -> None:
        end()
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    def refused(self, call: Callable[[], Any]) -> None:
        with pytest.raises(RuntimeError):
            call()

    @rule()
    def init(self) -> None:
        if self.state != UNINIT:
            self.refused(scr.init)
            return
        scr.config(f"SCR_PREFIX={self.place}")
        scr.config(f"SCR_CACHE_BASE={self.place}/cache")
        scr.config("SCR_FLUSH=2")
        scr.init()
        self.state, self.offered, self.done, self.gone_on = IDLE, None, False, None

    @rule()
    def finalize(self) -> None:
        if self.state != IDLE:
            self.refused(scr.finalize)
            return
        scr.finalize()
        self.state = UNINIT

    @rule()
    def start_output(self) -> None:
        if self.state != IDLE:
            self.refused(lambda: scr.start_output("x", scr.FLAG_CHECKPOINT))
            return
        self.count += 1
        scr.start_output(f"set {self.count}", scr.FLAG_CHECKPOINT)
        self.state, self.routed, self.done, self.offered = OUTPUT, False, False, None
        if self.gone_on is not None:  # what is newer than that is another history from now on
            self.whole, self.gone_on = self.whole[: self.whole.index(self.gone_on) + 1], None

    @rule()
    def route(self) -> None:
        path = str(self.place / "sub" / "a")
        if self.state in (UNINIT, IDLE):
            assert scr.route_file(path) == path
        elif self.state == OUTPUT:
            Path(scr.route_file(path)).write_text(f"set {self.count}")
            self.routed = True
        elif self.texts.get(str(self.offered)):
            assert Path(scr.route_file(path)).read_text() == self.offered
        else:
            self.refused(lambda: scr.route_file(path))

    @rule()
    def complete_output(self) -> None:
        if self.state != OUTPUT:
            self.refused(scr.complete_output)
            return
        assert scr.complete_output() is True
        self.state = IDLE
        name = f"set {self.count}"
        self.whole.append(name)
        self.texts[name] = name if self.routed else ""

    @rule()
    def refuse_output(self) -> None:
        if self.state != OUTPUT:
            self.refused(lambda: scr.complete_output(False))
            return
        assert scr.complete_output(False) is False
        self.state = IDLE

    @rule()
    def have_restart(self) -> None:
        if self.state != IDLE:
            self.refused(scr.have_restart)
            return
        found = scr.have_restart()
        if self.offered is None and not self.done:
            self.offered = self.whole[-1] if self.whole else None
        assert found == self.offered

    @rule()
    def start_restart(self) -> None:
        if self.state != IDLE or self.offered is None:
            self.refused(scr.start_restart)
            return
        assert scr.start_restart() == self.offered
        self.state = RESTART

    @rule()
    def complete_restart(self) -> None:
        if self.state != RESTART:
            self.refused(scr.complete_restart)
            return
        assert scr.complete_restart() is True
        self.gone_on = self.offered
        self.state, self.offered, self.done = IDLE, None, True

    @precondition(lambda self: self.state == RESTART)
    @rule()
    def refuse_restart(self) -> None:
        assert scr.complete_restart(False) is False
        self.whole.remove(self.offered)
        self.state, self.offered, self.done = IDLE, None, False

    @rule()
    def ask(self) -> None:
        for call in (scr.need_checkpoint, scr.should_exit):
            if self.state == IDLE:
                assert call() is (call is scr.need_checkpoint)
            else:
                self.refused(call)


TestProgram = Program.TestCase
TestProgram.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
