"""The run's own part of the state: step, position in the data, generators.

Owns:    what is saved beside the tracked objects, and how it comes back.
Holds:   generators are set twice on resume: by `restore()`, and again inside the first batch request, at the very
         point where they were captured, because `iter(loader)` may draw from them in between.
"""

from __future__ import annotations

from typing import Any

from stepwell.data.loader import Batches
from stepwell.data.steps import StepCounter
from stepwell.state import rng


class OwnState:
    """Counters and generators of one run. `consumed` counts batches at the last step, so prefetched ones do not."""

    def __init__(self, steps: StepCounter, data: Batches) -> None:
        self._steps = steps
        self._data = data
        self._rng_to_set: dict[str, Any] | None = None
        self._told = 0
        self.consumed = 0
        self.is_finished = False
        self.is_after_epoch = False

    def capture(self) -> dict[str, Any]:
        """As it is saved. `is_after_epoch`: the code after the epoch's last batch is done too, the next one begins."""
        return {
            "step": self._steps.step,
            "epoch": self._data.epoch + int(self.is_after_epoch),
            "consumed": 0 if self.is_after_epoch else self.consumed,
            "finished": self.is_finished,
            "rng": rng.capture(),
        }

    def load(self, own: dict[str, Any]) -> list[str]:
        """Go back to what was captured. Returns what could not be set on this machine."""
        self._steps.step, self.is_finished, self.consumed = own["step"], own["finished"], own["consumed"]
        self._told = own["consumed"]
        self._data.seek(own["epoch"], own["consumed"])
        self._rng_to_set = own["rng"]
        return rng.restore(own["rng"])

    def settle_generators(self, *, again: bool) -> None:
        """The loop has begun: set the generators once more if `again`, and never after that."""
        pending, self._rng_to_set = self._rng_to_set, None
        if pending is not None and again:
            rng.restore(pending)

    def go_to(self, epoch: int) -> None:
        """To the start of an epoch."""
        self._data.seek(epoch, 0)
        self.consumed = self._told = 0

    def tell(self, batches: int) -> None:
        """`step()` says how many batches the loop body used: one that reads ahead was delivered more than that."""
        self._told += batches

    def note_step(self) -> None:
        """A step is done: everything used so far is consumed."""
        self.consumed = self._told if self._steps.is_explicit else self._data.consumed
