"""A state that cannot be saved: said once, and not looked at again at every step.

Holds:   looking takes at most a fiftieth of the time. A state that has become right is saved when it is next due after
         PAUSE_SECONDS, or after fifty times what looking took. The same reason is said once in SAY_SECONDS.
"""

from __future__ import annotations

import time
from typing import Final

from stepwell.errors import StateError

PAUSE_SECONDS: Final = 10.0
SAY_SECONDS: Final = 600.0
_SHARE: Final = 50


class StateRefusal:
    """Why nothing was saved, and until when nothing is tried. Constructing only assigns."""

    def __init__(self) -> None:
        self.reason = ""
        self._until = 0.0
        self._said: object = None
        self._said_at = -SAY_SECONDS

    @property
    def holds(self) -> bool:
        """Whether it is too early to look again."""
        return bool(self.reason) and time.monotonic() < self._until

    def note(self, error: StateError, started: float) -> bool:
        """It was refused, and looking began then. Returns whether this has to be said."""
        now = time.monotonic()
        self.reason = f"{type(error).__name__}: {error}"
        self._until = now + max(PAUSE_SECONDS, _SHARE * (now - started))
        what = error.fields.get("path", self.reason)
        is_news = what != self._said or now >= self._said_at + SAY_SECONDS
        if is_news:
            self._said, self._said_at = what, now
        return is_news

    def clear(self) -> None:
        """It could be saved."""
        self.reason, self._said = "", None
