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
from stepwell.codecs.events import DeltaSkipped
from stepwell.data.batches import Batches
from stepwell.data.steps import StepCounter
from stepwell.errors import AgentError, StateError
from stepwell.outcome import Outcomes
from stepwell.own import OwnState
from stepwell.pace import Pace
from stepwell.snapshot.inflight import Inflight
from stepwell.snapshot.snapshotter import Snapshotter
from stepwell.snapshot.uploads import SaveHandle, has_failed
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
    _last: SaveHandle | None = None
    """Of the last save that all ranks took by themselves, if this one did."""
    has_levels: bool = False
    """A save that nobody asked for may stay on the nodes."""
    has_deltas: bool = False
    """What only stays in memory goes into a chain too."""
    _asked_step: int = -1

    def __post_init__(self) -> None:
        self.together.find_still = self.capture.find_still
        self.together.on_lost = self.outcomes.on_rank_lost
        self.together.on_no_agent = self.outcomes.on_no_agent
        self.outcomes.on_lost, self.outcomes.on_unheard = self.together.tell_no_agent, self._on_unheard

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
        is_planned = is_planned and not self.together.is_alone
        if self.outcomes.why_lost is not None:
            if block:
                raise AgentError(self.outcomes.why_lost)
            return None
        repeat = self._repeat(step, is_planned=is_planned)
        was_due, self.outcomes.is_due_again = self.outcomes.is_due_again, self.outcomes.is_due_again and not durable
        taken: Inflight | str
        try:
            whole = self.capture.flatten(self.own.capture())
            self.pace.know(whole, step)
            meta = {"step": step, "repeat": repeat, "durable": durable, "created": time.time(), "tree": whole.tree}
            is_end = self.data.is_at_end or self.own.is_finished
            meta |= {"epoch_end": is_end, "finished": self.own.is_finished, "name": name, "files": files or {}}
            meta |= {"flush": block, "delta": self.has_deltas and not durable}
            flat = self.together.cut(whole, step, block=block)
            taken = _NOT_AGREED if flat is None else self.snapshotter.take(flat, meta, block=block)
        except Exception as error:
            taken = f"{type(error).__name__}: {error}"  # a failed checkpoint never stops training
            self.pace.restart(step, durable=durable, is_planned=is_planned)  # and the same at every step helps nobody
            if block:
                self.outcomes.is_due_again = was_due
                self._note(step, repeat, durable=durable, is_planned=is_planned, is_taken=False)
                self._void(step, repeat, taken, durable=durable)
                raise
        self._note(step, repeat, durable=durable, is_planned=is_planned, is_taken=not isinstance(taken, str))
        if isinstance(taken, str):
            self.outcomes.is_due_again = self.outcomes.is_due_again or was_due
            self._void(step, repeat, taken, durable=durable)
            kind = DeltaSkipped if self.has_deltas and not durable else events.SnapshotSkipped
            self.log.emit(kind(step=step, reason=taken))
            return None
        self.pace.waited(time.monotonic() - started)
        if not durable:
            return None
        self.pace.begin(taken.sequence, started, is_asked=block)
        handle = SaveHandle(step, taken.staged, self.outcomes.uploads.open(taken.sequence))
        self._last = self._last if is_planned else handle
        self._asked_step = step if block else self._asked_step
        return handle

    def prepare(self) -> None:
        """Get memory ready for the first save."""
        with contextlib.suppress(StateError):  # said again, with its path, by the first save
            flat = self.together.cut(self.capture.flatten(self.own.capture(is_draft=True)), self.steps.step)
            if flat is not None:
                self.snapshotter.prepare(flat)

    def look_again(self) -> None:
        """What the ranks share is not the same any more. All ranks at the same step."""
        self.outcomes.has_drifted = False
        self.together.look_again()

    def take_last(self, seconds: float) -> None:
        """Save the last step, unless it is saved."""
        if not self._is_done(seconds):
            self.take_surely(seconds)

    def take_surely(self, seconds: float) -> SaveHandle:
        """The last save of a run: one that turns out void is taken again, blocking."""
        try:
            handle = self.take(block=True)
            if handle is not None and self._holds(handle, seconds):
                return handle
        except Exception:
            if self.together.is_alone:
                raise
        self.look_again()  # that may be why: nothing comes after this one that could find out
        handle = self.take(block=True)
        assert handle is not None
        return handle

    def _holds(self, handle: SaveHandle, seconds: float) -> bool:
        """Whether it came to something: alone it is complete in memory, with many ranks all of them have written it."""
        if self.together.is_alone:
            return handle.staging_completion.exception() is None
        return not has_failed(handle, seconds)

    def _is_done(self, seconds: float) -> bool:
        """Whether this step was saved; with many ranks by all of them, in one way that all know of."""
        if self.has_levels and self.steps.step and self._asked_step != self.steps.step:
            return False
        if self.together.is_alone:
            return self.pace.step == self.steps.step and not self.outcomes.is_due_again
        if not self.steps.step or self._repeats.get(False, (0, 0))[0] != self.steps.step:
            return not self.steps.step
        return self._last is not None and self._holds(self._last, seconds)

    def _on_unheard(self, inflight: Inflight) -> None:
        """Any thread: no agent has this snapshot, so none says to the other ranks that it is void."""
        assert inflight.void is not None
        self._void(inflight.step, inflight.repeat, f"its snapshot is void: {inflight.void.seen_by}", durable=True)

    def on_late(self, step: int) -> None:
        """A plan was heard of too late."""
        self._void(step, self._first(is_planned=True), "it had passed this step when it heard of it", durable=True)

    def _repeat(self, step: int, *, is_planned: bool) -> int:
        """How often this step was saved before, in this way."""
        last, repeat = self._repeats.get(is_planned, (-1, 0))
        return repeat + 1 if last == step else self._first(is_planned=is_planned)

    def _first(self, *, is_planned: bool) -> int:
        return 0 if self.together.is_alone or is_planned != self.pace.is_counted else _APART

    def _note(self, step: int, repeat: int, *, durable: bool, is_planned: bool, is_taken: bool) -> None:
        """Count from here: alone if there is a snapshot, with many ranks whatever became of it on this one."""
        if self.together.is_alone and not is_taken:
            return
        self.pace.restart(step, durable=durable, is_planned=is_planned)
        if durable:
            self._repeats[is_planned] = (step, repeat)
            self._last = self._last if is_planned else None

    def _void(self, step: int, repeat: int, reason: str, *, durable: bool) -> None:
        """This rank has no part in a checkpoint of all."""
        if durable and not self.together.is_alone:
            message: dict[str, Any] = {"type": "void", "step": step, "repeat": repeat, "reason": reason}
            self.client.say_void(message)
