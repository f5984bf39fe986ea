"""The run's own part of the state: step, position in the data, generators.

Owns:    what is saved beside the tracked objects, and how it comes back.
Holds:   generators are set twice on resume: by `restore()`, and again inside the first batch request, at the very
         point where they were captured, because `iter(loader)` may draw from them in between.
"""

from __future__ import annotations

from typing import Any

from stepwell.data.batches import Batches
from stepwell.data.cursor import Cursor
from stepwell.data.steps import StepCounter
from stepwell.errors import DataError
from stepwell.state import rng


class OwnState:
    """Counters and generators of one run. `at` is the position at the last step: what is prefetched does not count."""

    def __init__(self, steps: StepCounter, data: Batches) -> None:
        self._steps = steps
        self._data = data
        self._rng_to_set: dict[str, Any] | None = None
        self._told = self.at = Cursor()
        self._early = 0
        self.is_finished = False
        self.is_after_epoch = False

    def capture(self, *, is_draft: bool = False) -> dict[str, Any]:
        """As it is saved; a draft has its form. Raises DataError where the position cannot be told.

        `is_after_epoch`: the code after the epoch's last batch is done too, the next one begins.
        """
        at = self._data.following() if self.is_after_epoch else self.at
        return {
            "step": self._steps.step,
            **self._data.saved(at, is_draft=is_draft),
            "finished": self.is_finished,
            "rng": rng.capture(),
        }

    def check(self, own: dict[str, Any]) -> None:
        """Raises DataError when the position of a checkpoint means another one now."""
        problem = self._data.drift(own)
        if problem:
            raise DataError(
                f"{problem}: some samples would come twice or never. Give the data as it was, or go on with what "
                "there is: restore(strict=False)"
            )

    def load(self, own: dict[str, Any], derived_seed: int | None = None) -> list[str]:
        """Go back to what was captured. Returns what could not be set on this machine, or is not as it was.

        derived_seed:  for the generators, where those of this rank were not saved: other ranks did that
        """
        problem = self._data.drift(own)
        self._steps.step, self.is_finished = own["step"], own["finished"]
        self._go(self._data.read(own))
        self._data.load(own)
        problems = [problem] if problem else []
        if derived_seed is None:
            self._rng_to_set = own["rng"]
            return problems + rng.restore(own["rng"])
        rng.seed(derived_seed)
        self._rng_to_set = rng.capture()
        return [*problems, "the generators of this rank are derived from the run's seed: other ranks saved this"]

    def settle_generators(self, *, again: bool) -> None:
        """The loop has begun: set the generators once more if `again`, and never after that."""
        pending, self._rng_to_set = self._rng_to_set, None
        if pending is not None and again:
            rng.restore(pending)

    def go_to(self, epoch: int) -> None:
        """To the start of an epoch."""
        self._go(self._data.start(epoch))

    def _go(self, at: Cursor) -> None:
        self._told = self.at = at
        self._early = 0
        self._data.seek(at)

    def tell(self, batches: int) -> None:
        """`step()` says how many batches the loop body used: one that reads ahead was delivered more than that."""
        early, self._early = min(self._early, batches), 0
        self._told = self._data.use(self._told, batches - early)

    def tell_early(self) -> None:
        """A save before `step()`, in a body whose optimizer has stepped: its batch is used already."""
        if self._steps.is_open:
            self._early += 1
            self._told = self._data.use(self._told, 1)

    @property
    def is_past_epoch(self) -> bool:
        """Nothing is left of the epoch, and nothing of it waits in the hands of a loop that reads ahead."""
        return self._data.is_exhausted and (self._data.is_used_up or not self._steps.is_explicit)

    def note_step(self) -> None:
        """A step is done: everything used so far is consumed."""
        if not self._steps.is_explicit:
            self._told = self._data.use(self._told, None)
        self.at = self._told
