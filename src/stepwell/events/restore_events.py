"""Events while a run is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class Gone(Event):
    """A checkpoint was listed, and removed before its files were open, by a live trainer or a person."""

    level: ClassVar[int] = logging.INFO
    directory: str

    def text(self) -> str:
        return (
            f"{self.directory} was removed before restore could open it: the run has newer checkpoints now; "
            "searching again"
        )
