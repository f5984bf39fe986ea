"""One checkpoint, from the state to the agent: state -> snapshot -> arena -> agent.

Owns:    the order of these for one save, its id, and what is said when it comes to nothing.
Not:     when (schedule, ranks.agreement), copying (snapshot), writing (agent).
Holds:   a save that was not asked for never raises. With many ranks every save has the same id on all of them, whatever
         became of it on one; a rank that has no part in it says so.
"""

from __future__ import annotations

import enum
import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stepwell.errors import AgentError, PersistError, StateError
from stepwell.events import journal, run_events
from stepwell.events.chain_events import DeltaSkipped
from stepwell.events.rank_events import SavedAlone
from stepwell.events.snapshot_events import SnapshotRefused
from stepwell.handover.client import AgentClient
from stepwell.handover.message import Encoded
from stepwell.handover.protocol import NoPart
from stepwell.ranks.member import Together
from stepwell.training.data.steps import StepCounter
from stepwell.training.loop.outcomes import Outcomes
from stepwell.training.loop.run_state import OwnState
from stepwell.training.loop.save_handle import SaveHandle, has_failed
from stepwell.training.loop.schedule import Schedule
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.snapshot.refusal import StateRefusal
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.training.state.capture import Capture
from stepwell.types import SaveRequest

_APART: Final = 1000
"""With many ranks, repeats of a step count from here, and from multiples of it, for saves that are not of the policy's
own kind: one that a single rank takes, or misses, must not shift the numbers of those that all ranks take.
"""
_REMEMBERED: Final = 64


class _Kind(enum.Enum):
    """Who says that a save is due."""

    COUNTED = "a policy by which every rank counts separately"
    PLANNED = "rank 0"
    ASKED = "the user"
    LAST = "the end of the run"


_NOT_AGREED: Final = "the ranks have not agreed yet on who stores what"


@dataclass
class Saving:
    """Takes checkpoints of one run."""

    capture: Capture
    own: OwnState
    steps: StepCounter
    pace: Schedule
    snapshotter: Snapshotter
    outcomes: Outcomes
    together: Together
    client: AgentClient
    log: journal.EventLog
    _repeats: dict[_Kind, tuple[int, int]] = field(default_factory=dict)
    _taken: dict[_Kind, SaveHandle | None] = field(default_factory=dict)
    """Of each kind the last save, if this rank took it."""
    _newest: SaveHandle | None = None
    """Of the last save, of many ranks only if all took it by themselves, and this one did."""
    has_levels: bool = False
    """A save that nobody asked for may stay on the nodes."""
    has_deltas: bool = False
    """What only stays in memory goes into a chain too."""
    _asked_step: int = -1
    _asked: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Saves that somebody asked for: step, repeat and sequence."""
    _ended: dict[tuple[int, int], int] = field(default_factory=dict)
    _failed_step: int = -1
    _refusal: StateRefusal = field(default_factory=StateRefusal)
    _draft_refusal: StateRefusal = field(default_factory=StateRefusal)

    def open(self, *, has_levels: bool, has_deltas: bool) -> None:
        """The run is ours."""
        self.has_levels, self.has_deltas = has_levels, has_deltas

    def take(
        self,
        *,
        block: bool,
        durable: bool = True,
        is_planned: bool = False,
        is_counted: bool = False,
        is_last: bool = False,
        name: str | None = None,
        files: dict[str, str] | None = None,
    ) -> SaveHandle | None:
        """Save now. None: put off (an event says why); asked again after the next step.

        is_planned:  rank 0 named this step; else all ranks save by themselves
        is_counted:  they all do so by the policy, also with `block`
        """
        step, started = self.steps.step, time.monotonic()
        kind = self._kind(block=block and not is_counted, is_planned=is_planned, is_last=is_last)
        if self.outcomes.why_lost is not None:
            if block:
                raise AgentError(self.outcomes.why_lost)
            return None
        repeat = self._repeat(step, kind)
        if kind is _Kind.ASKED:
            self.together.ask(step, repeat)
        self.outcomes.collect()
        wanted = frozenset(self.outcomes.again)
        if durable:
            self.outcomes.again.clear()
        taken: Inflight | str
        is_quiet = self._refusal.holds and not block
        try:
            wish = functools.partial(
                SaveRequest, step, repeat, name=name, files=files or {}, durable=durable,
                flush=block and not is_counted, delta=self.has_deltas and not durable,
            )  # fmt: skip
            taken = self._refusal.reason if is_quiet else self._begin(step, wish, block=block)
        except Exception as error:
            taken = f"{type(error).__name__}: {error}"  # a failed checkpoint never stops training
            self._failed_step = step
            if isinstance(error, StateError) and not block:
                is_quiet = True
                if self._refusal.note(error, started):
                    self.log.emit(SnapshotRefused(step=step, reason=taken))
            self._restart(step, kind, durable=durable)  # and the same at every step helps nobody
            if block:
                self.outcomes.again |= wanted
                self._note(step, repeat, kind, durable=durable, is_taken=False)
                self._void(step, repeat, taken, durable=durable)
                raise
        self._note(step, repeat, kind, durable=durable, is_taken=not isinstance(taken, str))
        if isinstance(taken, str):
            self.outcomes.again |= wanted
            if durable:
                self.outcomes.watch.note_reason(taken)
            self._void(step, repeat, taken, durable=durable)
            skipped = DeltaSkipped if self.has_deltas and not durable else run_events.SnapshotSkipped
            if not is_quiet:
                self.log.emit(skipped(step=step, reason=taken))
            return None
        self._refusal.clear()
        self._failed_step = -1
        self.pace.waited(time.monotonic() - started)
        if not durable:
            return None
        self.pace.begin(taken.sequence, started, is_asked=block)
        upload = self.outcomes.uploads.open(taken.sequence)
        handle = SaveHandle(step, taken.staged, upload)
        if kind is _Kind.ASKED:
            upload.explain, upload.slice_seconds = self.together.explain(step, repeat)
            self._asked.append((step, repeat, taken.sequence))
            if (missing := self._ended.get((step, repeat))) is not None:
                self.on_ended(step, repeat, missing)  # before it was taken here
        self._taken[kind] = handle
        self._newest = self._newest if kind is _Kind.PLANNED else handle
        self._asked_step = step if block and not is_counted else self._asked_step
        return handle

    def _begin(self, step: int, wish: Callable[..., SaveRequest], *, block: bool) -> Inflight | str:
        """Begin a snapshot of the state as it is. Returns it, or why it is put off. Raises StateError and others."""
        whole = self.capture.flatten(self.own.capture())
        self.pace.know(whole, step)
        created, is_epoch_end, is_finished = time.time(), self.own.is_epoch_end, self.own.is_finished
        request = wish(created=created, tree=Encoded(whole.text()), epoch_end=is_epoch_end, finished=is_finished)
        flat = self.together.cut(whole, step, block=block)
        return _NOT_AGREED if flat is None else self.snapshotter.take(flat, request, block=block)

    def prepare(self) -> None:
        """Get memory ready for the first save."""
        started = time.monotonic()
        if self._draft_refusal.holds:
            return
        try:
            flat = self.together.cut(self.capture.flatten(self.own.capture(is_draft=True)), self.steps.step)
            if flat is not None:
                self.snapshotter.prepare(flat)
        except StateError as error:
            self._draft_refusal.note(error, started)  # the first save says it

    def look_again(self) -> None:
        """What the ranks share is not the same any more. All ranks at the same step."""
        self.outcomes.collect()
        self.outcomes.has_drifted = False
        self.together.look_again()

    def take_last(self, seconds: float, *, has_moved: bool = False) -> None:
        """Save the last step, unless it is saved. `has_moved`: more was done than that step has."""
        self.together.end_asking()
        self._hurry(seconds)
        self.snapshotter.drain()  # or a copy that turns void in the shut-down would count as saved
        if has_moved or not self._is_done(seconds):
            self.take_surely(seconds)

    def _hurry(self, seconds: float) -> None:
        self.client.hurry(seconds)
        self.snapshotter.hurry(seconds)

    def take_surely(self, seconds: float) -> SaveHandle:
        """The last save of a run: one that turns out void is taken again, blocking."""
        self.together.end_asking()
        self._hurry(seconds)
        try:
            handle = self.take(block=True, is_last=True)
            if handle is not None and self._holds(handle, seconds):
                return handle
        except Exception:
            if self.together.is_alone:
                raise
        self.look_again()  # that may be why: nothing comes after this one that could find out
        handle = self.take(block=True, is_last=True)
        assert handle is not None
        return handle

    def _holds(self, handle: SaveHandle, seconds: float) -> bool:
        """Whether it came to something: alone it is complete in memory, with many ranks all of them have written it."""
        if self.together.is_alone:
            return handle.staging_completion.exception(seconds) is None
        return not has_failed(handle, seconds)

    def _is_done(self, seconds: float) -> bool:
        """Whether this step was saved; with many ranks by all of them, in one way that all know of."""
        if self.has_levels and self.steps.step and self._asked_step != self.steps.step:
            return False
        if self.together.is_alone:
            self.outcomes.collect()
            is_saved = self.pace.step == self.steps.step != self._failed_step
            return is_saved and not self.outcomes.again and self.failure is None
        if not self.steps.step:
            return True
        # What rank 0 planned a rank may have missed. Of the others all ranks find the same: what is counted is nobody's
        # choice, and the others come to nothing unless all took them.
        kinds = [_Kind.LAST, _Kind.ASKED] + ([] if self.has_levels else [_Kind.COUNTED])
        taken = [handle for kind in kinds if (handle := self._taken.get(kind)) is not None]
        return any(handle.step == self.steps.step and self._holds(handle, seconds) for handle in taken)

    @property
    def failure(self) -> BaseException | None:
        """Why the last save came to nothing, if that is known already."""
        future = None if self._newest is None else self._newest.upload_completion
        return future.exception(0) if future is not None and future.done() else None

    def on_unannounced(self, inflight: Inflight) -> None:
        """Any thread: no agent has this snapshot, so none says to the other ranks that it is void."""
        assert inflight.void is not None
        self._void(inflight.step, inflight.repeat, f"its snapshot is void: {inflight.void.seen_by}", durable=True)

    def on_late(self, step: int) -> None:
        """A plan was heard of too late."""
        self._void(step, self._first(_Kind.PLANNED), "it had passed this step when the message arrived", durable=True)

    def on_alone(self, step: int, repeat: int, by: int, missing: int) -> None:
        """Rank 0, any thread: not all ranks call save() after this step."""
        self.log.emit(SavedAlone(step=step, by=by, missing=missing))
        self._void(step, repeat, _alone(step, missing), durable=True)
        self.together.tell_ended(step, repeat, missing)

    def on_ended(self, step: int, repeat: int, missing: int) -> None:
        """Any thread: rank 0 ended a save that not all ranks asked for."""
        self._ended = {save: who for save, who in self._ended.items() if save[0] + 1 >= step} | {
            (step, repeat): missing
        }
        for asked_step, asked_repeat, sequence in list(self._asked):
            if (asked_step, asked_repeat) == (step, repeat):
                self.outcomes.uploads.fail(sequence, PersistError(_alone(step, missing), step=step))

    def _kind(self, *, block: bool, is_planned: bool, is_last: bool) -> _Kind:
        if self.together.is_alone:
            return _Kind.COUNTED
        if block:
            return _Kind.LAST if is_last else _Kind.ASKED
        return _Kind.PLANNED if is_planned else _Kind.COUNTED

    def _repeat(self, step: int, kind: _Kind) -> int:
        """How often this step was saved before, in this way."""
        last, repeat = self._repeats.get(kind, (-1, 0))
        return repeat + 1 if last == step else self._first(kind)

    def _first(self, kind: _Kind) -> int:
        if self.together.is_alone:
            return 0
        order = [_Kind.COUNTED, _Kind.PLANNED] if self.pace.is_counted else [_Kind.PLANNED, _Kind.COUNTED]
        return _APART * [*order, _Kind.ASKED, _Kind.LAST].index(kind)

    def _note(self, step: int, repeat: int, kind: _Kind, *, durable: bool, is_taken: bool) -> None:
        """Count from here: alone if there is a snapshot, with many ranks whatever became of it on this one."""
        if self.together.is_alone and not is_taken:
            return
        self._restart(step, kind, durable=durable)
        if durable:
            self._repeats[kind] = (step, repeat)
            self._taken[kind] = None
            self._newest = self._newest if kind is _Kind.PLANNED else None

    def _restart(self, step: int, kind: _Kind, *, durable: bool) -> None:
        self.pace.restart(step, durable=durable, is_apart=kind is not _Kind.COUNTED, is_epoch_end=self.own.is_epoch_end)

    def _void(self, step: int, repeat: int, reason: str, *, durable: bool) -> None:
        """This rank has no part in a checkpoint of all."""
        if durable and not self.together.is_alone:
            self.client.say_void(NoPart(step, repeat, reason))


def _alone(step: int, missing: int) -> str:
    return f"rank {missing} did not call save() after step {step}"
