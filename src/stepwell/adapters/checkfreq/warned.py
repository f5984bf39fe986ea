"""An event as a Python warning, for interfaces whose users expect these."""

from __future__ import annotations

import warnings

from stepwell.escape import shown
from stepwell.events.run_events import Event


def warn(event: Event) -> None:
    """Warn in the name of the line that made the iterator, four calls up."""
    warnings.warn(shown(event.text()), stacklevel=5)
