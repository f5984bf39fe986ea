"""One checkpoint, from the state to the agent: state -> snapshot -> arena -> agent.

Owns:    the order of these for one save, its id, and what is said when it comes to nothing.
Not:     when (pace, ranks.agreement), copying (snapshot), writing (agent).
Holds:   a save that was not asked for never raises. With many ranks every save has the same id on all of them, whatever
         became of it on one; a rank that has no part in it says so.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, Final

from stepwell import events, journal
from stepwell.agent.client import AgentClient
from stepwell.data.batches import Batches
from stepwell.data.steps import StepCounter
from stepwell.errors import AgentError, StateError, StepwellError
from stepwell.outcome import Outcomes
from stepwell.own import OwnState
from stepwell.pace import Pace
from stepwell.snapshot.inflight import Inflight
from stepwell.snapshot.snapshotter import Snapshotter
from stepwell.snapshot.uploads import SaveHandle
from stepwell.state.capture import Capture
from stepwell.together import Together

_APART: Final = 1000
"""With many ranks, repeats of a step count from here for saves that are not of the policy's own kind: a plan that one
rank hears of too late must not shift the numbers of those that all ranks take by themselves.
"""
_NOT_AGREED: Final = "the ranks have not agreed yet on who stores what"


@dataclass
class Saving:
    """Takes checkpoints of one run."""

    capture: Capture
    own: OwnState
    steps: StepCounter
    data: Batches
    pace: Pace
    snapshotter: Snapshotter
    outcomes: Outcomes
    together: Together
    client: AgentClient
    log: journal.EventLog
    _repeats: dict[bool, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.together.on_lost = self.outcomes.on_rank_lost

    def take(
        self,
        *,
        block: bool,
        durable: bool = True,
        is_planned: bool = False,
        name: str | None = None,
        files: dict[str, str] | None = None,
    ) -> SaveHandle | None:
        """Save now. None: put off (an event says why); asked again after the next step.

        is_planned:  rank 0 named this step; else all ranks save by themselves
        """
        step, started = self.steps.step, time.monotonic()
        if self.outcomes.is_lost:
            if block:
                raise AgentError("the agent died again and again; see the log above for its error")
            return None
        repeat = self._repeat(step, is_planned=is_planned)
        taken: Inflight | str
        try:
            whole = self.capture.flatten(self.own.capture())
            self.pace.know(whole, step)
            meta = {"step": step, "repeat": repeat, "durable": durable, "created": time.time(), "tree": whole.tree}
            is_end = self.data.is_at_end or self.own.is_finished
            meta |= {"epoch_end": is_end, "finished": self.own.is_finished, "name": name, "files": files or {}}
            flat = self.together.cut(whole, block=block)
            taken = _NOT_AGREED if flat is None else self.snapshotter.take(flat, meta, block=block)
        except Exception as error:
            taken = f"{type(error).__name__}: {error}"  # a failed checkpoint never stops training
            self.pace.restart(step, durable=durable)  # and the same at every step helps nobody
            if block:
                self._note(step, repeat, durable=durable, is_planned=is_planned, is_taken=False)
                self._void(step, repeat, taken, durable=durable)
                raise
        self._note(step, repeat, durable=durable, is_planned=is_planned, is_taken=not isinstance(taken, str))
        if isinstance(taken, str):
            self._void(step, repeat, taken, durable=durable)
            self.log.emit(events.SnapshotSkipped(step=step, reason=taken))
            return None
        self.pace.waited(time.monotonic() - started)
        if not durable:
            return None
        self.outcomes.is_due_again = False
        self.pace.begin(taken.sequence, started, is_asked=block)
        return SaveHandle(step, taken.staged, self.outcomes.uploads.open(taken.sequence))

    def prepare(self, *, look_again: bool) -> None:
        """Get memory ready for the first save; `look_again`: what the ranks share is not the same any more."""
        with contextlib.suppress(StateError):  # said again, with its path, by the first save
            whole = self.capture.flatten(self.own.capture(is_draft=True))
            if look_again:
                self.outcomes.has_drifted = False
                self.together.look_again()
            flat = self.together.cut(whole)
            if flat is not None:
                self.snapshotter.prepare(flat)

    def take_surely(self, seconds: float) -> SaveHandle:
        """The last save of a run: one that turns out void is taken again, blocking."""
        try:
            handle = self.take(block=True)
            if handle is not None and self._holds(handle, seconds):
                return handle
        except StepwellError:
            if self.together.is_alone:
                raise
        handle = self.take(block=True)
        assert handle is not None
        return handle

    def _holds(self, handle: SaveHandle, seconds: float) -> bool:
        """Whether it came to something: alone it is complete in memory, with many ranks all of them have written it."""
        if self.together.is_alone:
            return handle.staging_completion.exception() is None
        try:
            return handle.upload_completion.exception(seconds) is None
        except TimeoutError:
            return True  # storage is slow: whoever waits for it says so

    @property
    def is_done(self) -> bool:
        """Whether this step was saved; with many ranks by all of them, in one way that all know of."""
        if self.together.is_alone:
            return self.pace.step == self.steps.step and not self.outcomes.is_due_again
        return self._repeats.get(False, (0, 0))[0] == self.steps.step

    def on_late(self, step: int) -> None:
        """A plan was heard of too late."""
        self._void(step, self._first(is_planned=True), "it had passed this step when it heard of it", durable=True)

    def _repeat(self, step: int, *, is_planned: bool) -> int:
        """How often this step was saved before, in this way."""
        last, repeat = self._repeats.get(is_planned and not self.together.is_alone, (-1, 0))
        return repeat + 1 if last == step else self._first(is_planned=is_planned)

    def _first(self, *, is_planned: bool) -> int:
        return 0 if self.together.is_alone or is_planned != self.pace.is_counted else _APART

    def _note(self, step: int, repeat: int, *, durable: bool, is_planned: bool, is_taken: bool) -> None:
        """Count from here: alone if there is a snapshot, with many ranks whatever became of it on this one."""
        if self.together.is_alone:
            if not is_taken:
                return
            is_planned = False
        if not (is_planned and self.pace.is_counted):
            self.pace.restart(step, durable=durable)
        if durable:
            self._repeats[is_planned] = (step, repeat)

    def _void(self, step: int, repeat: int, reason: str, *, durable: bool) -> None:
        """This rank has no part in a checkpoint of all."""
        if durable and not self.together.is_alone:
            message: dict[str, Any] = {"type": "void", "step": step, "repeat": repeat, "reason": reason}
            self.client.send(message)
