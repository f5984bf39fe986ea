"""Many small reads, several at a time: each may wait for a network, or for a file server.

Holds:   answers come in the order of the items; the first error is raised when all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_THREADS: Final = 16
_FEW: Final = 8
"""So many are read before the threads are there."""


def for_each(items: Sequence[Item], call: Callable[[Item], Answer]) -> list[Answer]:
    """What `call` gives for each item."""
    if len(items) <= _FEW:
        return [call(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(call, items))
