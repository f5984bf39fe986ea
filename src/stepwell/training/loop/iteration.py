"""The loop around a checkpoint: what ends an iteration, an epoch and the run, and what is due there.

Owns:    the order of things at each of these ends, and the saves that are asked for in the middle of a step.
Not:     counting (data.steps, data.usage), when (schedule), taking a checkpoint (save), leaving (preemption).
Holds:   a checkpoint is taken at one of three points (`run_state.RunPoint`), and a restart goes on from there: what the
         code after the inner loop did before a save, a `break` or the end counts as done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.errors import StateError
from stepwell.events import journal, loop_events
from stepwell.ranks.agreement import Action
from stepwell.ranks.member import Together
from stepwell.training.data.batches import Batches, Loop
from stepwell.training.data.refusals import second_pass
from stepwell.training.data.steps import StepCounter
from stepwell.training.loop.deferred_save import DeferredSave, Request
from stepwell.training.loop.forked_child import Home
from stepwell.training.loop.late_changes import Changes
from stepwell.training.loop.mailbox import Again
from stepwell.training.loop.outcomes import Outcomes
from stepwell.training.loop.preemption import Leave, Order
from stepwell.training.loop.run_state import OwnState, RunPoint
from stepwell.training.loop.save import Saving
from stepwell.training.loop.save_handle import SaveHandle
from stepwell.training.loop.schedule import Schedule
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.training.state.capture import Capture
from stepwell.training.state.gradients import Gradients
from stepwell.training.state.untracked import Untracked


@dataclass
class Iteration(Loop):
    """Follows the loop of one run. Used by the training thread only.

    wants_epochs: what the user asked for at the end of epochs
    ensure_open:  called when an iterator begins
    go:           told to leave, and an iteration is over: raises
    epochs:       how many the loop wants of `ckpt.epochs()`, if it iterates that
    """

    steps: StepCounter
    data: Batches
    own: OwnState
    gradients: Gradients
    capture: Capture
    pace: Schedule
    leave: Leave
    snapshotter: Snapshotter
    outcomes: Outcomes
    together: Together
    saving: Saving
    log: journal.EventLog
    home: Home
    untracked: Untracked
    wants_epochs: str | None
    ensure_open: Callable[[], None]
    on_step: Callable[[int], None]
    go: Callable[[Order], None] = lambda _: None
    epochs: int | None = None
    _is_in_optimizer: bool = False
    _is_unasked: bool = False
    """A save() has counted this step; the policies are asked when the iteration is over."""
    _put_off: DeferredSave = field(default_factory=DeferredSave)
    _is_epoch_done: bool = False
    """The end of this epoch was looked at by the policies."""
    _is_ended: bool = False
    _began_in: int = 0
    """The epoch in which a restart goes on, until something is said of it."""
    _has_said_again: bool = False

    def __post_init__(self) -> None:
        self._changes = Changes(self.steps, self.own, self.capture)

    def begin(self, go: Callable[[Order], None]) -> None:
        """The run is ours, and stands where it was."""
        self.go = go
        self._changes.note_saved()
        self._began_in = 0 if self.data.is_counted_only else self.own.at.epoch
        self.untracked.begin(lambda: self._is_in_optimizer)

    @property
    def is_over(self) -> bool:
        return self._is_ended and self.own.is_stopped

    # -- an iteration -------------------------------------------------------------------------------------------------

    def before_optimizer_step(self, optimizer: Any = None, *_: Any) -> None:
        """The gate: runs before every step of a tracked optimizer."""
        if not self.home.is_hooked():
            return
        if not self.steps.has_stepped:
            with contextlib.suppress(StateError):  # reported again, with its path, by the first save
                self.snapshotter.observe(self.capture.flatten())
        self.pace.waited(self.snapshotter.gate() + self.together.gate())
        usage = self.data.usage
        usage.note_trained(has_trained=not usage.is_newest_doubtful or self.gradients.have_changed())
        if optimizer is not None:
            self.gradients.note_step(optimizer)
            self._is_in_optimizer = True
        self.steps.on_optimizer_step()

    def after_optimizer_step(self, *_: Any) -> None:
        """The step has ended, and not by an exception."""
        if self.home.is_here:
            self._is_in_optimizer = False

    def on_start(self) -> None:
        self.ensure_open()
        self.own.begin_epoch()
        self._changes.forget(saved=False)

    def on_request(self) -> None:
        """Everything of the iteration before it is over, unless `step()` says that."""
        self.ensure_open()
        self.snapshotter.look()
        self.together.look()
        usage = self.data.usage
        usage.come_back(has_trained=usage.is_newest_trained or self.gradients.have_changed())
        if not self.steps.is_explicit:
            self.end()
        self.own.settle_generators(again=True)

    def on_delivered(self) -> None:
        self.steps.on_delivered()

    def step(self, batches: int | None) -> None:
        """The loop body is over, and has used so many batches."""
        self.snapshotter.look()
        self.together.look()
        if self.wants_epochs is not None and self.data.is_counted_only and self.epochs is None:
            self.log.emit(loop_events.NoEpochs(asked=self.wants_epochs))
            self.wants_epochs = None
        self.steps.on_call()
        self.own.tell(batches)
        self.own.settle_generators(again=False)
        self.end()

    def end(self) -> None:
        """Count the step, if it was one, and ask the policies."""
        has_stepped, order = self.count_step() or self._is_unasked, self.leave.order
        if order is not None and (order.is_for_peer or (self.together.is_alone and not self.steps.has_begun)):
            self.go(order)
        if not has_stepped:
            self._end_epoch_in_step()
            self._warn_if_idle()
            return
        if self._is_unasked:
            self._is_unasked = False
            self._save_again_in_body()
        self._take_put_off()
        costs = self.pace.end_iteration(self.steps.step)
        if costs is not None:
            self.together.tell_costs(costs)
        self._ask(is_epoch_end=self.own.is_epoch_end)
        self.together.tell_ready(self.snapshotter.pool.is_ready)

    def _save_again_in_body(self) -> None:
        """A save() counted the step that is over now. What the loop body did after it is of that step too."""
        changed: list[str] = []
        with contextlib.suppress(StateError):  # it cannot be saved now: the next save says why
            changed = self._changes.since_save()
        if changed:
            if not self._has_said_again:
                self._has_said_again = True
                self.log.emit(loop_events.SavedAgain(step=self.steps.step, changed=changed, where=loop_events.IN_BODY))
            self._take_between(is_same_everywhere=False)
        if not self.data.is_counted_only:  # there the code after the inner loop may be what comes now
            self._changes.forget(left=False)

    def count_step(self) -> bool:
        """Whether a step is over since this was asked before. Raises DataError if it is not known what it used."""
        self.log.flush(until=self.steps.step)  # a step late: a tensor of this one would make the host wait
        calls = self.steps.calls
        if not self.steps.end_iteration():
            return False
        if calls > 1 and self.data.is_unread and not self.steps.is_explicit:
            self.log.emit(loop_events.NotRead(step=self.steps.step, calls=calls))
        self.own.note_step()
        began_in, self._began_in = self._began_in, 0
        if began_in and self.epochs is None:
            self.log.emit(loop_events.OutsideEpochs(step=self.steps.step, epoch=began_in))
        self.gradients.end_iteration()
        self.on_step(self.steps.step)
        return True

    def _warn_if_idle(self) -> None:
        """Batches come and go, and no tracked optimizer steps, nor waits any gradient for its step."""
        if self.steps.has_optimizers and (batches := self.steps.note_idle()) and not self.gradients.are_unused():
            self.log.emit(loop_events.NoSteps(step=self.steps.step, batches=batches))

    def _ask(self, *, is_epoch_end: bool) -> None:
        """What is due now, by the policies and by what the ranks planned."""
        step, order = self.steps.step, self.leave.order
        self.outcomes.collect()
        sure, wished = self.pace.wishes(step, is_epoch_end=is_epoch_end, again=bool(self.outcomes.again))
        if Action.SAVE in sure or Action.SAVE in wished or self.pace.is_held(step):
            self.outcomes.watch.note_due(step)
        wished = ([Action.LOOK_AGAIN] if self.outcomes.has_drifted else []) + wished
        if order is not None:
            self.together.ask_to_leave()
            wished.append(Action.LEAVE)
        due = self.together.pass_step(step, wishes=wished, is_busy=self.outcomes.uploads.is_busy) | sure
        if Action.LEAVE in due:
            self.go(self.leave.take("another rank"))
        if Action.LOOK_AGAIN in due:
            self.saving.look_again()
        if what := next((what for what in (Action.SAVE, Action.MEMORY) if what in due), None):
            self._take_planned(durable=what is Action.SAVE, is_planned=what not in sure, is_epoch_end=is_epoch_end)
        elif Action.LOOK_AGAIN in due or self.snapshotter.is_unprepared:
            self.saving.prepare()

    def _take_planned(self, *, durable: bool, is_planned: bool, is_epoch_end: bool) -> None:
        handle = self.saving.take(block=False, durable=durable, is_planned=is_planned)
        if durable and handle is not None:
            self._changes.note_saved()
        # With many ranks it counts for all of them, whatever became of it here.
        self._is_epoch_done |= is_epoch_end and (handle is not None or not self.together.is_alone)

    # -- the end of an epoch ------------------------------------------------------------------------------------------

    def _end_epoch_in_step(self) -> None:
        """The epoch's last batch was used, and its gradients wait for a step of the next epoch."""
        if self._is_epoch_done or not (self.steps.has_begun and self.data.is_end(self.data.reached)):
            return
        with self.own.at_point(RunPoint.PART):
            for what in self.pace.due_at_epoch_end(self.steps.step):
                self._take_planned(durable=what is Action.SAVE, is_planned=False, is_epoch_end=True)

    def on_round(self) -> bool:
        """The end of an epoch, unless the loop has batches of it in its hands, or only looked at its one batch."""
        if self.epochs is not None:
            if not self.data.is_over and self.data.usage.is_newest_looked_at and not self.gradients.have_changed():
                return False
            raise second_pass(self.data.at.epoch)
        if not self.steps.is_open and (self.is_past_epoch or not self.steps.is_explicit):
            self.end_epoch()
        else:
            self._begin_epoch()
        return True

    def end_epoch(self) -> None:
        """Another epoch begins: the code after the inner loop is done."""
        if self.count_step():
            self._take_put_off()
        order = self.leave.order
        with self.own.at_point(RunPoint.EPOCH):
            if order is not None and self.together.is_alone:
                self.go(order)
            if changed := self._changes.since_save():
                self.log.emit(loop_events.SavedAgain(step=self.steps.step, changed=changed, where=loop_events.BETWEEN))
                self._take_between(is_same_everywhere=False)
            elif not self._is_epoch_done and self.pace.due_at_epoch_end(self.steps.step):
                self._take_between(is_same_everywhere=True)
        self._begin_epoch()

    def _take_between(self, *, is_same_everywhere: bool) -> None:
        """A save that nobody asked for, and whose moment does not come again: it waits for memory, and never raises."""
        if not (is_same_everywhere or self.together.is_alone):
            self.outcomes.again.add(Again.CHANGED)  # the other ranks may not have seen it: they all save soon
            return
        try:
            self.saving.take(block=True, is_counted=is_same_everywhere)
            self._note_saved()
        except Exception as error:
            self.log.emit(loop_events.SaveFailed(step=self.steps.step, reason=f"{type(error).__name__}: {error}"))

    def _begin_epoch(self) -> None:
        self._is_epoch_done = False
        self._changes.forget()
        self.pace.count_epoch()

    def on_left(self) -> None:
        if not self.home.is_here:
            return
        self.data.usage.is_newest_trained |= self.gradients.have_changed()
        with contextlib.suppress(Exception):  # state_dict() is the user's code, and this is the end of a generator
            self._changes.note_left()

    @property
    def is_past_epoch(self) -> bool:
        """Nothing is left of the epoch, and nothing of it waits in the hands of a loop that reads ahead."""
        usage = self.data.usage
        return self.data.is_over and (not self.steps.is_explicit or usage.is_empty or usage.is_part_only)

    # -- saves that are asked for -------------------------------------------------------------------------------------

    def save(self, name: str | None, files: dict[str, str]) -> SaveHandle:
        """Save now, or at the end of the step if one is under way."""
        if not self._end_early():
            self.log.emit(loop_events.PutOff(step=self.steps.step + 1))
            return self._put_off.add(self.steps.step + 1, name=name, files=files)
        with self.own.at_point(self._point()):
            return self._take_asked(name, files)

    @property
    def is_within_step(self) -> bool:
        """A step has begun, and its end is still to come."""
        return self.steps.has_begun and not (self.is_past_epoch or self.data.is_left)

    def _end_early(self) -> bool:
        """The loop body may be over before its `step()`, or the next request. False: it is in the middle of a step."""
        if self.data.usage.is_unclear and not self.data.is_over:
            return False  # the end of the iteration will tell, or refuse
        self.data.usage.is_newest_trained |= self.gradients.have_changed()
        self.own.tell_early()
        self._is_unasked |= self.count_step()
        return not self.is_within_step and not (self.data.is_counted_only and self.gradients.are_unused())

    def _take_asked(self, name: str | None, files: dict[str, str]) -> SaveHandle:
        handle = self.saving.take(block=True, name=name, files=files)
        self.snapshotter.copy_now()  # asked for: on return a kill of this process loses nothing that is on the CPU
        self._note_saved()
        assert handle is not None
        return handle

    def _take_put_off(self) -> None:
        for request in self._put_off.take():
            if (error := request.answer(self._take_asked)) is not None:
                self.log.emit(loop_events.SaveFailed(step=self.steps.step, reason=f"{type(error).__name__}: {error}"))

    def _note_saved(self) -> None:
        """There is a checkpoint of this moment. One outside of a step, or before its end, may not have all."""
        is_outside = self.own.point is not RunPoint.STEP or self.data.is_left or self.data.is_counted_only
        self._changes.note_saved(look=is_outside or self._is_unasked)

    # -- the end of the run -------------------------------------------------------------------------------------------

    def _point(self) -> RunPoint:
        """Where the loop is, when nothing more is to come of its iteration."""
        if self.is_past_epoch or (self.data.is_left and self.data.is_at_end and self._changes.since_left()):
            return RunPoint.EPOCH
        return RunPoint.PART if self.steps.has_begun or self.gradients.are_unused() else RunPoint.STEP

    def take_last(self, seconds: float) -> None:
        """The run ends here: save what is not saved."""
        self._end_early()
        point = self.own.point if self.own.point is RunPoint.EPOCH else self._point()
        with self.own.at_point(point):
            self._warn_of_tail(point)
            has_moved = self._changes.has_moved
            if self.together.is_alone:  # of many, another rank may not see it
                has_moved |= bool(self._changes.since_save())
            if requests := self._put_off.take():
                self._end_with(requests)
            else:
                self.saving.take_last(seconds, has_moved=has_moved)

    def _end_with(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (error := request.answer(self._take_asked)) is not None:
                raise error

    def _warn_of_tail(self, point: RunPoint) -> None:
        """The inner loop was left in the middle of the epoch, and the code after it ran: it will run again."""
        if point is not RunPoint.EPOCH and self.data.is_left and (changed := self._changes.since_left()):
            at = self.own.position
            self.log.emit(
                loop_events.LeftInEpoch(step=self.steps.step, epoch=at.epoch, batches=at.batches, changed=changed)
            )

    def tell_if_left(self) -> None:
        """The run ends in good order: was that the end of training?"""
        if self.epochs is not None and not self.own.is_finished:
            epoch = min(self.data.at.epoch, self.epochs - 1) + 1
            self.log.emit(loop_events.LeftEpochs(step=self.steps.step, epoch=epoch, epochs=self.epochs))

    def can_end(self, *, by_exit: bool) -> bool:
        """Whether the state is whole. `by_exit`: an exception ends the process, from wherever the loop is."""
        if self._is_in_optimizer:
            return False
        self._end_early()
        return not by_exit or self._point() is not RunPoint.PART

    def finish(self, seconds: float) -> None:
        """Save the end of the run, in any case."""
        self._end_early()
        with self.own.at_point(self._point()):
            handle = self.saving.take_surely(seconds)
            self._changes.note_saved()
        for request in self._put_off.take():
            request.follow(handle)
        handle.wait(seconds)

    def forget(self) -> None:
        """The run ends without another save."""
        self._is_ended = True
        self._put_off.fail_all("the run ended before that")
