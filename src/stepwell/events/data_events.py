"""What is said of the data, as lines of the event log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from stepwell.events.run_events import Event


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


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """Batches before the first step after a restart: skipped, if the loop reads as it did before."""

    level: ClassVar[int] = logging.WARNING
    batches: int

    def text(self) -> str:
        return (
            f"{self.batches} of the batches before the first step were not trained on, and count as skipped, as the "
            "loop did not read ahead before this restart. If it does now, end its body with ckpt.step(batches=n), n "
            "being the batches that its step used: else a restart misses what was read ahead"
        )


@dataclass(frozen=True, kw_only=True)
class CountedAnew(Event):
    """A restart began in the middle of an epoch, nobody asked how far it was, and epochs are left before their end."""

    level: ClassVar[int] = logging.WARNING
    began: int
    before: int
    epoch: int
    batches: int

    def text(self) -> str:
        return (
            f"this restart went on after {self.before} batches of epoch {self.began}, and epoch {self.epoch} was left "
            f"after {self.batches}: a loop that ends epochs by a count of batches (islice, zip, enumerate) counted "
            f"anew in epoch {self.began}. Count from ckpt.data.index, as in islice(ckpt.data, n - ckpt.data.index)"
        )


@dataclass(frozen=True, kw_only=True)
class Replay(Event):
    """A source without positions was read again from the start of the epoch, and thrown away."""

    level: ClassVar[int] = logging.WARNING
    epoch: int
    batches: int
    seconds: float

    def text(self) -> str:
        rate = f"{self.batches / max(self.seconds, 1e-9):.0f} per second"
        what = f"{self.batches} batch{'' if self.batches == 1 else 'es'} of epoch {self.epoch}"
        return f"read {what} again in {self.seconds:.1f} s ({rate})"
