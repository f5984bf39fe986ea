"""What a loop did after a save, or after its inner loop was left: a checkpoint may lack that.

Owns:    which moment the last checkpoint is of, and what the state was like then and when the inner loop was left.
Not:     what follows from a change (iteration).
Holds:   the state is looked at only after a save that somebody asked for, outside of a step, or by `break`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.training.data.cursor import Cursor
from stepwell.training.data.steps import StepCounter
from stepwell.training.loop.run_state import OwnState
from stepwell.training.state.capture import Capture
from stepwell.training.state.fingerprint import Fingerprint


@dataclass
class Changes:
    """Of one run. Constructing only assigns."""

    steps: StepCounter
    own: OwnState
    capture: Capture
    _saved: tuple[int, Cursor] | None = None
    _saved_as: Fingerprint | None = None
    _left_as: Fingerprint | None = None

    def note_saved(self, *, look: bool = False) -> None:
        """There is a checkpoint of this moment. `look`: it may be followed by more than it has."""
        self._saved = self.steps.step, self.own.position
        self._saved_as = self._look() if look else None

    def note_left(self) -> None:
        """The inner loop was left by `break`."""
        self._left_as = self._look()

    def forget(self, *, left: bool = True, saved: bool = True) -> None:
        """What comes now is of the next iteration, or epoch."""
        self._left_as = None if left else self._left_as
        self._saved_as = None if saved else self._saved_as

    @property
    def has_moved(self) -> bool:
        """Whether the loop is at another place than the last checkpoint."""
        return self._saved != (self.steps.step, self.own.position)

    def since_save(self) -> list[str]:
        """What came after a save that was looked at, with no step since."""
        if self._saved_as is None or self._saved is None or self._saved[0] != self.steps.step:
            return []
        now = self._look()
        found = self._saved_as.changed(now)
        if self._saved_as.generators != now.generators:
            found.append("generators")
        return found or (["position"] if self._saved[1] != self.own.position else [])

    def since_left(self) -> list[str]:
        """What the code after the inner loop changed, if that was left by `break`."""
        return [] if self._left_as is None else self._left_as.changed(self._look())

    def _look(self) -> Fingerprint:
        return Fingerprint.of(self.capture.flatten())
