"""Which of the delivered batches the loop has used.

Owns:    the batches that were delivered and not used yet, and what is known of how the loop reads.
Holds:   nothing is guessed. A loop that trains on each batch before it takes the next one has used all that was
         delivered; a loop that reads ahead looks like one that skips batches, so it has to say what it used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from stepwell.errors import DataError
from stepwell.training.data.cursor import Cursor

_MOST_UNUSED: Final = 1 << 16
"""A loop that never uses anything (an evaluation) must not fill memory."""
_READ_ELSEWHERE: Final = "another thread than the training thread reads ckpt.data"


class Usage:
    """Batches between their delivery and their use. `at` is the position after everything that was used."""

    def __init__(self, on_skipped: Callable[[int], None] = lambda batches: None) -> None:
        self.at = Cursor()
        self.keeps_up = False
        """Known: the loop trains on a batch before it takes the next one."""
        self.is_hearsay = False
        """A checkpoint says so: this process has not seen a step yet, and the script may be another one."""
        self.on_skipped = on_skipped
        """Told of batches that count as skipped by hearsay alone."""
        self.is_newest_trained = False
        """The loop did something with the newest batch: gradients changed, or an optimizer stepped."""
        self._unused: deque[Cursor] = deque(maxlen=_MOST_UNUSED)
        self._since = self._untouched = self._told = self._skipped = 0
        self._read_in = self._trained_in = 0

    def seek(self, at: Cursor) -> None:
        """Another position: what was delivered before does not count."""
        self.at = at
        self._unused.clear()
        self._since = self._untouched = self._skipped = 0
        self.is_newest_trained = False

    def deliver(self, at: Cursor) -> None:
        """One batch more, which leads to this position."""
        self._untouched += bool(self._since) and not self.is_newest_trained
        self._since += 1
        self._unused.append(at)
        self.is_newest_trained = False
        self._read_in = threading.get_ident()

    @property
    def is_newest_doubtful(self) -> bool:
        """Whether a step that comes now may be of the batches before the newest one alone."""
        return self._since > 1 and not (self.is_newest_trained or self.keeps_up)

    def note_trained(self, *, has_trained: bool = True) -> None:
        """An optimizer steps. `has_trained`: gradients changed since the newest batch, if that is doubtful.

        Without that the loop has read ahead, between its backward pass and here.
        """
        self._untouched += self.is_newest_doubtful and not has_trained
        self.is_newest_trained, self._trained_in = True, threading.get_ident()

    def come_back(self, *, has_trained: bool) -> None:
        """The loop asks for the next batch. `has_trained`: gradients changed since it did so last."""
        self._skipped += self.is_hearsay and self._since > 0 and not (has_trained or self.is_newest_trained)
        self.is_newest_trained |= has_trained or (self.keeps_up and not self._told)

    @property
    def is_newest_looked_at(self) -> bool:
        """The loop took the newest batch and did nothing with it."""
        return bool(self._unused) and not (self.is_newest_trained or self._told) and (self.keeps_up or self._since == 1)

    def take_back(self) -> Cursor:
        """A new iterator begins: the newest batch comes again if the loop did nothing with it. Returns from where."""
        if self.is_newest_looked_at:
            self._unused.pop()
            self._since -= 1
        return self._unused[-1] if self._unused else self.at

    @property
    def is_empty(self) -> bool:
        """Everything that was delivered is used, as far as is known."""
        return not self._unused

    @property
    def is_unclear(self) -> bool:
        """Several batches were delivered, and not all of them were trained on: read ahead, or skipped?"""
        return not self._told and (self._is_read_elsewhere or (not self.keeps_up and self._untouched > 0))

    @property
    def _is_read_elsewhere(self) -> bool:
        return bool(self._since and self._trained_in) and self._read_in != self._trained_in

    @property
    def is_part_only(self) -> bool:
        """What is not used yet came after the last step, and each of it was trained on: it waits for the next step."""
        return self._since == len(self._unused) and not self._untouched and self.is_newest_trained

    def use(self, batches: int | None, *, early: int = 0) -> int:
        """The loop says how many it used; None: all. `early` of them were counted before. Returns how many more.

        Raises DataError if that cannot be known.
        """
        if batches is None:
            if self.is_unclear:
                raise DataError(self._question(), found=self._since)
            self.keeps_up = self.keeps_up or self._since > 0
            if self._skipped:
                self.on_skipped(self._skipped)
        count = min(len(self._unused) if batches is None else max(0, batches - early), len(self._unused))
        for _ in range(count):
            self.at = self._unused.popleft()
        self._told = batches or 0
        self.is_hearsay = self.is_hearsay and not self._since
        self._since = self._untouched = self._skipped = 0
        return count

    def use_body(self) -> int:
        """A loop body has made its step and has not said yet what it used: as many as the one before."""
        return self.use(self._told or None)

    def reached(self, *, is_over: bool) -> Cursor:
        """Where the loop is in the middle of a step. The newest batch counts if it was trained on, or all is over."""
        if not self._unused or (self._told and not is_over):
            return self.at
        if is_over or self.is_newest_trained:
            return self._unused[-1]
        return self._unused[-2] if len(self._unused) > 1 else self.at

    def _question(self) -> str:
        if self._is_read_elsewhere:
            found = _READ_ELSEWHERE
        else:
            found = f"{self._since} batches were taken from ckpt.data before this step, and not all were trained on"
        return (
            f"{found}, so stepwell does not know which of them a resume must repeat. A loop that "
            "prefetches ends its body with ckpt.step(batches=n), with n the batches that its step used; "
            "a loop that skips batches calls ckpt.step() for each batch, also before `continue`"
        )
