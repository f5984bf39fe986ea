"""How positions in an epoch become batches: sizes, ranks, and what happens where the epoch ends. Only arithmetic.

A global batch covers `size * world_size` positions, of which each rank takes a slice that lies together. What is left
of an epoch is cut anew after every restart: nothing depends on who read what before, so that the size of batches and
the number of ranks may change at any position.

    carry     the last batch goes on into the next epoch, which then begins after those samples: every batch is full,
              and every epoch has each sample once
    drop      what does not fill a batch is left out
    partial   the last batch is short; ranks may get different numbers of samples, and the last of them none
    pad       the last batch is filled with samples from the start of the same epoch, which then come twice
"""

from __future__ import annotations

from typing import Final, NamedTuple

from stepwell.training.data.cursor import Cursor

TAILS: Final = ("carry", "drop", "partial", "pad")


class Cut(NamedTuple):
    """Batches of one rank. `Cursor.samples` counts those of all ranks; with `carry` it runs past the epoch's end."""

    size: int = 1
    tail: str = "partial"
    rank: int = 0
    world_size: int = 1

    @property
    def whole(self) -> int:
        """Samples of a global batch."""
        return self.size * self.world_size

    def after(self, at: Cursor, length: int) -> Cursor:
        """Where one batch more leads to."""
        end = at.samples + self.whole
        return Cursor(at.epoch, at.batches + 1, end if self.tail == "carry" else min(end, length))

    def left(self, at: Cursor, length: int) -> int:
        """Batches of this rank from a position to the end of the epoch."""
        full, rest = divmod(max(0, length - at.samples), self.whole)
        if self.tail == "drop":
            return full
        return full + (rest > (self.rank if self.tail == "partial" else 0))

    def is_over(self, at: Cursor, length: int) -> bool:
        """Whether nothing is left of the epoch, for any rank: the first one gets a part of every batch."""
        return self._replace(rank=0).left(at, length) == 0

    def following(self, at: Cursor, length: int) -> Cursor:
        """The start of the next epoch, seen from the end of this one."""
        return Cursor(at.epoch + 1, 0, max(0, at.samples - length))

    def positions(self, start: int, length: int) -> range:
        """This rank's part of the global batch that starts there. With `carry` and `pad` it may lie past the end."""
        rest = length - start
        if self.tail != "partial" or rest >= self.whole:
            first = start + self.rank * self.size
            return range(first, first + self.size)
        share, more = divmod(rest, self.world_size)
        first = start + self.rank * share + min(self.rank, more)
        return range(first, first + share + (self.rank < more))
