"""Events of the data source."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class SameSamples(Event):
    """A loader shuffles without regard to other ranks."""

    level: ClassVar[int] = logging.WARNING
    ranks: int

    def text(self) -> str:
        return (
            f"Each of the {self.ranks} ranks trains on the same samples. Give the DataLoader a "
            "DistributedSampler, or use stepwell.DataLoader. Ignore this if the ranks share one replica or have "
            "data sets of their own"
        )


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """Batches before the first step after a restart. They count as skipped unless the loop now prefetches."""

    level: ClassVar[int] = logging.WARNING
    batches: int

    def text(self) -> str:
        return (
            f"Counted {self.batches} of the batches before the first step as skipped, because the loop did not "
            "prefetch batches before this restart. If it prefetches now, end its body with ckpt.step(batches=n), "
            "with n the batches that its step used; otherwise a restart loses the prefetched batches"
        )


@dataclass(frozen=True, kw_only=True)
class CountedAnew(Event):
    """A restart began in the middle of an epoch, the loop never read its position, and it leaves epochs early."""

    level: ClassVar[int] = logging.WARNING
    began: int
    before: int
    epoch: int
    batches: int

    def text(self) -> str:
        return (
            f"This restart continued after {self.before} batches of epoch {self.began}, and the loop left epoch "
            f"{self.epoch} after {self.batches}: a loop that ends epochs by counting batches (islice, zip, "
            f"enumerate) started its count again in epoch {self.began}. Count from ckpt.data.index, as in "
            "islice(ckpt.data, n - ckpt.data.index)"
        )


@dataclass(frozen=True, kw_only=True)
class Replay(Event):
    """stepwell read a source without positions again from the start of the epoch, and discarded the batches."""

    level: ClassVar[int] = logging.WARNING
    epoch: int
    batches: int
    seconds: float

    def text(self) -> str:
        rate = f"{self.batches / max(self.seconds, 1e-9):.0f} per second"
        what = f"{self.batches} batch{'' if self.batches == 1 else 'es'} of epoch {self.epoch}"
        return f"Replayed {what} in {self.seconds:.1f} s ({rate})"
