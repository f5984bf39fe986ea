"""The run's own part of the state: step, position in the data, generators, gradients that wait for their step.

Owns:    what is saved beside the tracked objects, at which point of the loop, and how it comes back.
Holds:   generators are set twice on resume: by `restore()`, and again inside the first batch request, at the very
         point where they were captured, because `iter(loader)` may draw from them in between. Between two epochs that
         point is before the next one begins.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, Final

from stepwell.errors import DataError
from stepwell.events import loop_events
from stepwell.events.run_events import Event
from stepwell.training.data.batches import Batches
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.steps import StepCounter
from stepwell.training.state import rng
from stepwell.training.state.gradients import Gradients
from stepwell.training.state.settings import Settings, differences

_MOST_REMARKS: Final = 8


class RunPoint(enum.Enum):
    """Where in the loop a checkpoint is taken, and so what a restart does next."""

    STEP = "after a step"
    """The batch after those of the last step."""
    PART = "in the middle of a step"
    """The batch after the last one that was trained on; its gradient, and those before, wait for the step."""
    EPOCH = "after an epoch"
    """The next epoch: the code after the inner loop is done too."""


class OwnState:
    """Counters and generators of one run. `at` is the position at the last step: what is prefetched does not count."""

    def __init__(self, steps: StepCounter, data: Batches, gradients: Gradients) -> None:
        self._steps = steps
        self._data = data
        self._gradients = gradients
        self._rng_to_set: dict[str, Any] | None = None
        self.at = Cursor()
        self._early = 0
        self.point = RunPoint.STEP
        self.is_finished = False
        self.is_stopped = False
        """The user said that the run is finished before its last epoch: a restart trains no further."""
        self.given: Settings = {}
        """What the script set (learning rates and the like) before anything was restored."""

    @contextlib.contextmanager
    def at_point(self, point: RunPoint) -> Iterator[None]:
        """What is captured inside is of this point of the loop."""
        before, self.point = self.point, point
        try:
            yield
        finally:
            self.point = before

    @property
    def position(self) -> Cursor:
        """Where a restart goes on, at the present point of the loop."""
        if self.point is RunPoint.EPOCH:
            return self._data.following()
        return self._data.reached if self.point is RunPoint.PART else self.at

    @property
    def is_epoch_end(self) -> bool:
        """Whether a checkpoint that is taken now is of the end of an epoch."""
        return self.point is RunPoint.EPOCH or self._data.is_end(self.position) or self.is_finished

    def capture(self, *, is_draft: bool = False) -> dict[str, Any]:
        """As it is saved; a draft has its form. Raises DataError where the position cannot be told."""
        pending = {} if is_draft else self._gradients.pending(is_part=self._steps.has_begun)
        return {
            "step": self._steps.step,
            **self._data.saved(self.position, is_draft=is_draft),
            "finished": self.is_finished,
            "stopped": self.is_stopped,
            "given": self.given,
            **({"pending": pending} if pending else {}),
            "rng": rng.capture(),
        }

    def check(self, own: dict[str, Any]) -> None:
        """Raises DataError when the position of a checkpoint means another one now."""
        problem = self._data.drift(own)
        if problem:
            raise DataError(
                f"{problem}: some samples would be used twice or never. Pass the same data as before, or "
                "continue with the new data: restore(strict=False)"
            )

    def load(self, own: dict[str, Any], derived_seed: int | None = None) -> list[str]:
        """Go back to what was captured. Returns what could not be set on this machine, or is not as it was.

        derived_seed:  for the generators, where those of this rank were not saved: other ranks did that
        """
        problem = self._data.drift(own)
        self._steps.step, self.is_finished = own["step"], own["finished"]
        self.is_stopped = own.get("stopped") is True
        self._go(self._data.read(own))
        self._data.load(own)
        problems = [problem] if problem else []
        pending = own.get("pending", {})
        if derived_seed is None:
            self._rng_to_set = own["rng"]
            return problems + self._gradients.restore(pending) + rng.restore(own["rng"])
        rng.seed(derived_seed)
        self._rng_to_set = rng.capture()
        if pending:
            problems.append("gradients that waited for their step are lost: another number of ranks saved them")
        return [*problems, "the generators of this rank are derived from the run's seed: other ranks saved this"]

    def remarks(self, own: dict[str, Any], in_use: Settings) -> list[Event]:
        """What the person at the terminal should know of a state that came back."""
        found: list[Event] = []
        if own.get("pending"):
            found.append(loop_events.ResumedInPart(step=self._steps.step, batches=self.at.batches))
        if self._data.is_counted_only and self.at.batches and not self._data.is_placed_elsewhere:
            at = self.at
            found.append(loop_events.OwnLoader(step=self._steps.step, epoch=at.epoch, batches=at.batches))
        if changed := differences(own.get("given"), self.given, in_use):
            found.append(loop_events.Overridden(changed=changed[:_MOST_REMARKS]))
        return found

    def settle_generators(self, *, again: bool) -> None:
        """The loop has begun: set the generators once more if `again`, and never after that."""
        pending, self._rng_to_set = self._rng_to_set, None
        if pending is not None and again:
            rng.restore(pending)

    def begin_epoch(self) -> None:
        """`ckpt.epochs()` hands out an epoch. One that begins with its first batch begins with its generators."""
        if not self.at.batches or self._data.is_counted_only:
            self.settle_generators(again=True)

    def go_to(self, epoch: int) -> None:
        """To the start of an epoch."""
        self._go(self._data.start(epoch))

    def _go(self, at: Cursor) -> None:
        self.at = at
        self._early = 0
        self._data.seek(at)

    def tell(self, batches: int | None) -> None:
        """`step()` ends a loop body that used so many batches. Raises DataError if that cannot be known."""
        early, self._early = self._early, 0
        self._data.count(batches, early=early)

    def tell_early(self) -> None:
        """A save before `step()`, in a body whose optimizer has stepped: its batches are used already."""
        if self._steps.is_open and not self._early:
            self._early = self._data.count_body()

    def note_step(self) -> None:
        """A step is done: everything used so far is consumed. Raises DataError if that cannot be known."""
        if not (self._steps.is_explicit or self._data.is_counted_only):
            self._data.usage.use(None)
        self.at = self._data.usage.at
