"""The run's own part of the state: step, position in the data, generators.

Owns:    what is saved beside the tracked objects, and how it comes back.
Holds:   generators are set twice on resume: by `restore()`, and again inside the first batch request, at the very
         point where they were captured, because `iter(loader)` may draw from them in between.
"""

from __future__ import annotations

from typing import Any

from stepwell.data.cursor import Cursor
from stepwell.data.loader import Batches
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
        self.is_finished = False
        self.is_after_epoch = False

    def capture(self) -> dict[str, Any]:
        """As it is saved. `is_after_epoch`: the code after the epoch's last batch is done too, the next one begins."""
        at, length = Cursor() if self.is_after_epoch else self.at, self._data.length()
        return {
            "step": self._steps.step,
            "epoch": self._data.epoch + int(self.is_after_epoch),
            "consumed": at.batches,
            "samples": None if length is None else at.samples,
            "length": length,
            "finished": self.is_finished,
            "rng": rng.capture(),
        }

    def load(self, own: dict[str, Any], *, strict: bool) -> list[str]:
        """Go back to what was captured. Returns what could not be set on this machine.

        Raises DataError, if `strict`, when the position means another one now.
        """
        problem = self._drift(own)
        if problem and strict:
            raise DataError(
                f"{problem}: some samples would come twice or never. Give the data set as it was, or go on with what "
                "there is: restore(strict=False)",
                expected=own["length"],
                found=self._data.length(),
            )
        self._steps.step, self.is_finished = own["step"], own["finished"]
        self._told = self.at = self._data.read(own["consumed"], own.get("samples"))
        self._data.seek(own["epoch"], self.at)
        self._rng_to_set = own["rng"]
        return [*([problem] if problem else []), *rng.restore(own["rng"])]

    def _drift(self, own: dict[str, Any]) -> str:
        saved, live = own.get("length"), self._data.length()
        if saved is None or live is None or saved == live or not own["consumed"]:
            return ""
        return f"the data set had {saved} samples and has {live} now, in the middle of epoch {own['epoch']}"

    def settle_generators(self, *, again: bool) -> None:
        """The loop has begun: set the generators once more if `again`, and never after that."""
        pending, self._rng_to_set = self._rng_to_set, None
        if pending is not None and again:
            rng.restore(pending)

    def go_to(self, epoch: int) -> None:
        """To the start of an epoch."""
        self._told = self.at = Cursor()
        self._data.seek(epoch, self.at)

    def tell(self, batches: int) -> None:
        """`step()` says how many batches the loop body used: one that reads ahead was delivered more than that."""
        self._told = self._data.after(self._told, batches)

    def note_step(self) -> None:
        """A step is done: everything used so far is consumed."""
        self.at = self._told if self._steps.is_explicit else self._data.at
