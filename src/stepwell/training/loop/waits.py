"""Waits of the trainer that have an end.

Holds:   slices are counted, so that time in which the whole process is frozen is not.
"""

from __future__ import annotations

import threading
from typing import Final

from stepwell.errors import PersistError
from stepwell.events.run_events import logger

LONG_SECONDS: Final = 600.0
"""What takes memory, a copy or a free slot longer than this is taken for stuck."""
_SLICE_SECONDS: Final = 1.0
_WARN_SECONDS: Final = 60.0


def until(event: threading.Event, what: str, seconds: float = LONG_SECONDS) -> None:
    """Block until it is set. Warns after a minute. Raises PersistError, which says `what` did not come in time."""
    waited, warn_at = 0.0, _WARN_SECONDS
    while not event.wait(min(_SLICE_SECONDS, max(0.0, seconds - waited))):
        waited += _SLICE_SECONDS
        if waited >= seconds:
            raise too_long(what, seconds)
        if waited >= warn_at:
            logger.warning("waiting for %s for %.0f s", what, waited)
            warn_at *= 2


def too_long(what: str, seconds: float) -> PersistError:
    """For who waits in another way."""
    return PersistError(f"{what} did not come within {seconds:.0f} s")
