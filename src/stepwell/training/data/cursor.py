"""Where in the data the run is.

Samples are what counts where the source knows them: then the batch size may change in the middle of an epoch. Sources
that only know batches leave `samples` at zero.
"""

from __future__ import annotations

from typing import NamedTuple


class Cursor(NamedTuple):
    """An epoch, and what was consumed of it."""

    epoch: int = 0
    batches: int = 0
    samples: int = 0
