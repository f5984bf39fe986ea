"""The run's key on all ranks, without sending it.

Owns:    the order (rank 0 makes it, then each reads it), and the comparison by a mark that tells nothing about it.
Not:     where it is kept (the caller's `make` and `read`).
Holds:   all ranks have the same key, or all raise ConfigError with the rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from stepwell.errors import ConfigError
from stepwell.ranks.groups.consent import each, lead
from stepwell.ranks.groups.group import Group
from stepwell.ranks.wire.secret import VARIABLE, derive

_SHOWN_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.1


def common_key(group: Group, about: str, make: Callable[[], None], read: Callable[[], bytes]) -> bytes:
    """The same on all ranks. Collective. Raises ConfigError. `about`: whose key it is."""
    found: list[bytes] = []

    def draw() -> None:
        with _advice():
            make()

    def take() -> None:
        deadline = time.monotonic() + _SHOWN_SECONDS
        while not found:
            with _advice():
                try:
                    found.append(read())
                except FileNotFoundError:  # a network file system may show late what rank 0 made
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_PAUSE_SECONDS)

    lead(group, "the secret of the run", draw)
    each(group, "the secret of the run on each rank", take)
    marks = group.all_gather(derive(found[0], "mark", about)[:8].hex(), "the secret of all ranks")
    for rank, mark in enumerate(marks):
        if mark != marks[0]:
            raise ConfigError(
                f"the secret of rank {rank} is not that of rank 0: give all ranks the same {VARIABLE}, or none",
                rank=rank,
            )
    return found[0]


@contextlib.contextmanager
def _advice() -> Iterator[None]:
    """An OSError becomes a ConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the secret of the run cannot be kept or read there: {error}; set {VARIABLE} to the same 64 hex digits "
            "for all ranks (openssl rand -hex 32)"
        ) from error
