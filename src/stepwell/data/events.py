"""What is said of the data, as lines of the event log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events import Event


@dataclass(frozen=True, kw_only=True)
class SameSamples(Event):
    """A loader shuffles as if there were no other ranks."""

    level: ClassVar[int] = logging.WARNING
    ranks: int

    def text(self) -> str:
        return (
            f"each of the {self.ranks} ranks trains on the same samples: give the DataLoader a DistributedSampler, or "
            "use stepwell.DataLoader; right as it is if the ranks share one replica, or have data sets of their own"
        )
