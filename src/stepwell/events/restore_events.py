"""What happens while a run is read, as lines of the event log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class Gone(Event):
    """A checkpoint was listed, and removed before its files were open: by a trainer that lives, or by a person."""

    level: ClassVar[int] = logging.INFO
    directory: str

    def text(self) -> str:
        return f"{self.directory} was removed before it was open: the run has newer ones now; looking again"
