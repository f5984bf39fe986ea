"""How a run ends in this process: closed, told to leave, by an error, or with the interpreter.

Owns:    the order in which everything is shut down, whether the last step is saved, and what is logged of it.
Not:     the last checkpoint itself (iteration, save), signals (preemption).
Holds:   an orderly end saves the last step. After an error nothing is saved: the state may be half changed, and what is
         on disk is better than what is in memory.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle

from stepwell.errors import ConfigError, PersistError
from stepwell.escape import shown
from stepwell.events import journal, loop_events
from stepwell.handover.client import AgentClient
from stepwell.ranks.member import Together
from stepwell.storage.store.learned import CLOSED, TOLD
from stepwell.storage.store.progress import ProgressFile
from stepwell.training.loop.completion import finish_callbacks
from stepwell.training.loop.forked_child import Home
from stepwell.training.loop.iteration import Iteration
from stepwell.training.loop.outcomes import Outcomes
from stepwell.training.loop.preemption import Leave, Order
from stepwell.training.loop.save import Saving
from stepwell.training.loop.schedule import Schedule
from stepwell.training.snapshot.snapshotter import Snapshotter

_SHORT_SECONDS = 10.0
"""How long the agent may take to end when nothing is on its way."""


@dataclass
class Ending:
    """Ends one run, once. `seconds`: how long storage that fails may take."""

    snapshotter: Snapshotter
    outcomes: Outcomes
    together: Together
    client: AgentClient
    log: journal.EventLog
    saving: Saving
    iteration: Iteration
    leave: Leave
    pace: Schedule
    progress: ProgressFile
    home: Home
    seconds: float
    hooks: Sequence[RemovableHandle] = ()
    is_closed: bool = False
    is_open: bool = False
    """There is a run that could be saved."""
    _error: str | None = None
    _is_for_peers: bool = False
    """Another rank failed, or this one did: all of them begin again."""

    def listen(self) -> None:
        """The run is open: its end may come at any time."""
        self.is_open = True
        self.leave.listen(self.go_along)
        atexit.register(self.at_exit)

    def wait(self, timeout: float | None = None) -> None:
        """Block until every snapshot taken so far is committed. Raises PersistError for one that was given up."""
        self.snapshotter.drain()
        self.outcomes.uploads.wait(timeout)

    def go(self, order: Order) -> None:
        """Told to leave, and an iteration is over: one more checkpoint, as far as the time allows. Raises to leave."""
        self.leave.finish(order, self.iteration.take_last, self.wait)
        if self.together.is_alone and not order.is_for_peer and not self.leave.finish_others():
            return  # to come here again after the next step
        self.seconds = min(self.seconds, order.seconds_for_disk)
        self._is_for_peers = order.is_for_peer and not self.together.is_alone
        self.pace.close(TOLD)
        with contextlib.suppress(PersistError):
            self.close(save=False)
        self.leave.exit()

    def go_along(self, order: Order) -> bool:
        """Another Checkpointer of this process is about to leave. False: a step is under way here."""
        if not self.together.is_alone:
            return True
        if self.iteration.is_within_step:
            return False
        self.leave.finish(order, self.iteration.take_last, self.wait)
        return True

    def close(self, *, save: bool) -> None:
        """Save the last step if it is not saved, wait until everything is durable, end the agent."""
        if self.is_closed or not self.home.is_here:
            self.is_closed = True
            return
        self.is_closed = True
        deadline = time.monotonic() + self.seconds
        can_save = self.is_open and not self.outcomes.is_lost and not self.together.is_broken
        try:
            if save and can_save:
                self.iteration.take_last(self.seconds)
                self.iteration.tell_if_left()
        finally:
            self.iteration.forget()
            self._shut_down(is_saved=save and can_save, deadline=deadline)
        if save and self.is_open and self.outcomes.why_lost is not None:
            raise PersistError(f"cannot save the last step: {self.outcomes.why_lost}")

    def give_way(self) -> None:
        """Another Checkpointer of this process opens the run: after an exception that somebody caught, say."""
        self._error = "another Checkpointer of this process opens this run"
        with contextlib.suppress(PersistError):  # the next one finds out what is there
            self.close(save=False)

    def name_those_beside(self, others: Sequence[Ending]) -> None:
        """Log which other runs of this process are open and follow an optimizer of this one: an exception left them."""
        for other in others:
            is_open = other is not self and other.is_open and not other.is_closed and other.home.is_here
            if is_open and other.iteration.untracked.shares_with(self.iteration.untracked):
                self.log.emit(loop_events.StillOpen(place=other.home.place))

    def refusal(self, *, is_over: bool, by_finish: bool) -> ConfigError:
        """Why nothing more can be done with a run that is closed."""
        if not is_over:
            return ConfigError("this Checkpointer is closed; create a new one")
        if by_finish:
            return ConfigError(
                "ckpt.finish() has saved the last step and ended the run; only ckpt.log() may follow. Leave the loop "
                "after it (break), and call save(), with a name=, before it"
            )
        return ConfigError(
            "the last epoch of ckpt.epochs() is over: its last step is saved, and the run is closed; "
            "only ckpt.log() may follow. To keep the end under a name, call ckpt.save(name=...) last in "
            "the last epoch (n - 1)"
        )

    def log_more(self) -> None:
        """Values that were noted after the end go to their file."""
        self.log.flush()
        self.log.close()
        self.pace.release()  # which takes the file into a bucket

    def _shut_down(self, *, is_saved: bool, deadline: float) -> None:
        self.snapshotter.hurry(deadline - time.monotonic())
        atexit.unregister(self.at_exit)
        self.leave.stop()
        for handle in self.hooks:
            handle.remove()
        self.iteration.gradients.end()
        self.iteration.untracked.end()
        self.log.flush()
        self.snapshotter.stop()
        pending = self.outcomes.uploads.pending()
        if self._is_for_peers or self.together.is_broken:
            pending = []  # what is complete is written; the agent keeps its memory for the next start of all ranks
        else:
            rest = max(0.0, deadline - time.monotonic())
            self.client.close(seconds=rest if pending or self.saving.has_levels else min(rest, _SHORT_SECONDS))
            finish_callbacks(max(0.0, deadline - time.monotonic()))
        if not is_saved:
            self._log_what_is_lost()
        self.snapshotter.close()
        self.together.close()
        self.pace.close(CLOSED)
        self.log.close()
        self.pace.release()
        self.progress.close()
        if left := sum(not future.done() for future in pending):
            raise PersistError(self._say_left(left))
        if is_saved and (failure := self.saving.failure) is not None:
            raise failure

    def _say_left(self, left: int) -> str:
        what = "1 snapshot" if left == 1 else f"{left} snapshots"
        reason = self.outcomes.watch.reason
        return (
            f"{what} did not become durable within {self.seconds:.0f} s (STEPWELL_CLOSE_SECONDS): {reason}. "
            f"The directory is {self.home.place}"
        )

    def _log_what_is_lost(self) -> None:
        step, on_disk = self.iteration.steps.step, self.outcomes.committed_step
        if self.is_open and not self.leave.has_told and (self._error is not None or step > (on_disk or 0)):
            reason = self._error or self.outcomes.why_lost or "close(save=False)"
            self.log.emit(loop_events.Ended(step=step, on_disk=on_disk, reason=reason))

    def at_exit(self) -> None:
        """The interpreter ends without close()."""
        if not self.home.is_here:
            return  # the run goes on elsewhere
        kind = getattr(sys, "last_type", None)
        try:
            self._end(kind, save=kind is None and self.iteration.can_end(by_exit=False))
        except Exception as error:  # nobody is left who could catch it
            print(f"stepwell: {shown(str(error))}", file=sys.stderr)

    def leave_block(self, kind: type[BaseException] | None) -> None:
        """The `with` block ends, by this exception if any. sys.exit() is orderly, unless it cuts a step off."""
        if not self.home.is_here:
            return
        is_exit = kind is SystemExit and not self.is_closed
        save = kind is None or (is_exit and self.iteration.can_end(by_exit=True))
        self._end(None if is_exit and save else kind, save=save)

    def _end(self, kind: type[BaseException] | None, *, save: bool) -> None:
        self.pace.close_after(kind)
        self._error = None if kind is None else kind.__name__
        self._is_for_peers |= kind is not None and not self.together.is_alone
        self.close(save=save)
