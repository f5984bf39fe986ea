"""What counts as a step.

Owns:    the rules. A step is a loop iteration in which at least one tracked optimizer stepped, however often; without
         tracked optimizers each batch (or each call of `step()`) is one. Once `step()` was called, batch requests no
         longer end an iteration.
Not:     what happens at the end of a step (checkpointer).
"""

from __future__ import annotations

import warnings

_STEPS_WITHOUT_TRIGGER = 20


class StepCounter:
    """Turns optimizer steps, batch requests and `step()` calls into a count of steps."""

    def __init__(self) -> None:
        self.step = 0
        self.has_optimizers = False
        self.is_explicit = False
        self.has_stepped = False
        self._stepped = False
        self._delivered = 0
        self._is_called = False
        self._calls = 0
        self._warned = False

    def on_optimizer_step(self) -> None:
        """A tracked optimizer's step was entered. Warns once if nobody ends the iterations."""
        self._stepped = self.has_stepped = True
        self._calls += 1
        if self._calls > _STEPS_WITHOUT_TRIGGER and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._calls} optimizer steps without a trigger: nothing is being checkpointed. Iterate `ckpt.data` "
                "instead of your loader, or call `ckpt.step()` at the end of the loop body",
                stacklevel=5,
            )

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
    def is_between(self) -> bool:
        """Nothing was begun since the last step."""
        return not (self._stepped or self._delivered)

    @property
    def is_ahead(self) -> bool:
        """A batch was delivered and no optimizer stepped since: accumulation, or a consumer that reads ahead."""
        return self.has_optimizers and self._delivered > 0 and not self._stepped

    def end_iteration(self) -> bool:
        """Everything of an iteration is over. True if it was a step."""
        self._calls = 0
        # Also asked by save() and close(): without a new call, or a new batch, nothing new was done.
        without = self._is_called if self.is_explicit else self._delivered > 0
        stepped = self._stepped or (not self.has_optimizers and without)
        self._is_called = False
        if stepped:
            self._stepped, self._delivered = False, 0
            self.step += 1
        return stepped
