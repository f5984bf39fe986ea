"""What may go from a node's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stepwell.levels import cached
from stepwell.levels.assignments import Orders
from stepwell.levels.cached import Level
from stepwell.storage.format.parity_entry import parity_name
from stepwell.storage.store import files
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

_BY_PROCESS: Final = re.compile(r"\.(\d+)\.tmp")


def left_over(paths: RunPaths, lineage: int) -> list[Location]:
    """Temporary files whose writers are gone: processes that are not there, or of an earlier start.

    Whoever still writes under such a name, in a container of its own, is told by the missing name, and tries again.
    """
    found: list[Location] = []
    for id in cached.steps(paths):
        for name in files.list_names(paths.checkpoint(id)):
            if name.endswith(files.TEMPORARY):
                named = _BY_PROCESS.search(name)
                is_gone = id.lineage < lineage if named is None else not os.path.exists(f"/proc/{named[1]}")
                found += [paths.checkpoint(id) / name] if is_gone else []
    return found


def withdrawn(paths: RunPaths, id: CheckpointId, rank: int, copies: Iterable[int]) -> list[Location]:
    """What a rank holds of a checkpoint that is void: its own part, and what it holds for others."""
    directory, parity = paths.checkpoint(id), parity_name(rank).removesuffix("json")
    stems = tuple(f"{Owner(owner).stem}." for owner in (rank, *copies))
    names = [name for name in files.list_names(directory) if name.startswith((*stems, parity))]
    return [directory / name for name in names if not name.endswith(".void")]


def surplus(
    paths: RunPaths,
    orders: Orders,
    rank: int,
    whole: Sequence[CheckpointId],
    level_of: Callable[[CheckpointId], Level | None] | None = None,
) -> list[CheckpointId]:
    """All that is older than the checkpoints to keep, and of another history; not what is still to be carried on.

    The newest one that is not degraded stays too, however old. `whole`: known to be, the oldest first. Nothing goes
    before enough of them are there. `level_of`: what is to become of one, where that does not lie beside it.
    """
    levels = {id: cached.read_level(paths, id) if level_of is None else level_of(id) for id in whole}
    good = [id for id in whole if (level := levels[id]) is not None and not level.degraded]
    oldest, dead = (whole[-orders.keep] if len(whole) >= orders.keep else None), set(orders.dead)

    def is_needed(id: CheckpointId) -> bool:
        level = levels.get(id)
        is_waiting = level is not None and level.flush and not cached.is_flushed(paths, id, orders.here(rank))
        return is_waiting or id in good[-1:]

    return [
        id
        for id in cached.steps(paths)
        if id.directory in dead or (oldest is not None and id < oldest and not is_needed(id))
    ]
