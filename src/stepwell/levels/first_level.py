"""Whether the nodes come first, where nobody said so: measured, since a shared place may be faster than a local disk.

Owns:    the measurement and the judgement.
Not:     what follows from them (caches).
"""

from __future__ import annotations

import os
import time
from typing import Final

from stepwell.errors import StepwellError
from stepwell.levels.level_spec import Pairs, Partner, Protection, ReedSolomon, Xor
from stepwell.storage.store import files
from stepwell.storage.store.objects import Location

_ALL_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 32 << 20
_LEAST_BYTES: Final = 2 << 20
_PIECE: Final = 1 << 20


def probe_bytes(world_size: int) -> int:
    """What each rank writes: enough to be more than one round trip, and little for all of them together."""
    return max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_BYTES // world_size))


def write_seconds(place: Location, rank: int, nbytes: int) -> float | None:
    """How long so much takes until it is durable there. None: it cannot be written. Nothing is left."""
    data = os.urandom(_PIECE) * (nbytes // _PIECE)
    started = time.monotonic()
    try:
        with files.written_for_now(place / f"probe.{rank}", data):
            return time.monotonic() - started
    except (OSError, StepwellError):
        return None


def bytes_besides(protect: Protection) -> float:
    """What is stored on other nodes for each byte of a shard."""
    if isinstance(protect, Pairs | Partner):
        return 1.0
    if isinstance(protect, Xor):
        return 1 / (protect.n - 1)
    return protect.m / (protect.n - protect.m) if isinstance(protect, ReedSolomon) else 0.0


def is_worth_it(node: float | None, shared: float | None, protect: Protection) -> bool:
    """Whether a checkpoint is safe on the nodes sooner than in the shared place, each measured with all ranks at once.

    One that cannot be written loses. If neither can, the nodes: there training at least does not wait for a network.
    """
    if shared is None:
        return True
    return node is not None and node * (1 + bytes_besides(protect)) < shared
