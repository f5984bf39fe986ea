"""What counts as a step.

Owns:    the rules. A step is a loop iteration in which at least one tracked optimizer stepped, however often; without
         tracked optimizers each batch (or each call of `step()`) is one. Once `step()` was called, batch requests no
         longer end an iteration.
Not:     what happens at the end of a step (checkpointer).
"""

from __future__ import annotations

import warnings

_STEPS_WITHOUT_TRIGGER = 20
_IDLE_BATCHES = 50
_READ = "Iterate `ckpt.data` instead of the loader that you gave as data="
_CALL = "Call `ckpt.step()` at the end of the loop body, or give the loader as data= and iterate `ckpt.data`"


class StepCounter:
    """Turns optimizer steps, batch requests and `step()` calls into a count of steps."""

    def __init__(self, *, has_optimizers: bool = False, has_data: bool = False) -> None:
        self.step = 0
        self.has_optimizers, self.has_data = has_optimizers, has_data
        self.is_explicit = False
        self.has_stepped = False
        self._stepped = False
        self._delivered = 0
        self._is_called = False
        self._has_part = False
        self._calls = 0
        self._warned = False
        self._idle, self._idle_limit = 0, _IDLE_BATCHES

    def on_optimizer_step(self) -> None:
        """A tracked optimizer's step was entered. Warns once if nobody ends the iterations."""
        self._stepped = self.has_stepped = True
        self._calls += 1
        if self._calls > _STEPS_WITHOUT_TRIGGER and not self._warned:
            self._warned = True
            warnings.warn(
                f"stepwell: {self._calls} optimizer steps without a trigger: stepwell saves nothing. "
                + (_READ if self.has_data else _CALL),
                stacklevel=5,
            )

    @property
    def calls(self) -> int:
        """Optimizer steps since an iteration ended."""
        return self._calls

    def on_delivered(self) -> None:
        """A batch went to the loop."""
        self._delivered += 1

    def on_call(self) -> None:
        """The loop called `step()`: from now on only that ends an iteration."""
        self.is_explicit = self._is_called = True

    @property
    def is_open(self) -> bool:
        """The body of an explicit loop has made its step, and has not called `step()` yet."""
        return self.is_explicit and self._stepped and not self._is_called

    @property
    def has_begun(self) -> bool:
        """Something was begun since the last step: an optimizer stepped, or batches wait for its step."""
        return self._stepped or self._has_part or self._delivered > 0

    def end_iteration(self) -> bool:
        """Everything of an iteration is over. True if it was a step."""
        self._calls = 0
        # Also asked by save() and close(): without a new call, or a new batch, nothing new was done.
        without = self._is_called if self.is_explicit else self._delivered > 0
        stepped = self._stepped or (not self.has_optimizers and without)
        self._idle = 0 if stepped else self._idle + without
        self._has_part = not stepped and (self._has_part or self._is_called)
        self._is_called = False
        if stepped:
            self._stepped, self._delivered = False, 0
            self.step += 1
        return stepped

    def note_idle(self) -> int:
        """Batches, or calls, since the last step, when that is worth a word: rarer and rarer. Else 0."""
        if self._idle < self._idle_limit:
            return 0
        self._idle_limit = 2 * self._idle
        return self._idle
