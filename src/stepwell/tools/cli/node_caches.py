"""What the caches of a run's nodes hold, as far as this machine can tell.

Owns:    the checkpoint that `nodes.json` names, and those that are whole in this node's own cache.
Holds:   other nodes are not asked, and no shard is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stepwell.errors import StepwellError
from stepwell.levels.assignments import run_cache
from stepwell.levels.cached import readable_steps
from stepwell.levels.inventory import Inventory
from stepwell.levels.protect.repair import tell
from stepwell.restore.preference import sort_key
from stepwell.storage.store.lineage import History
from stepwell.storage.store.nodes_mark import Mark, read_mark
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId

_MOST_LOOKED_AT: Final = 16
"""In a node's cache, the newest. A restart looks at as many."""


@dataclass(frozen=True)
class OnNodes:
    """A checkpoint in the caches of the nodes.

    cache:    their directory; empty if they have different ones
    is_here:  every part lies on this node. Otherwise `nodes.json` names it, and a newer one may be there
    guard:    what `nodes.json` names: a start that cannot reach it is refused. None if the run has left that history
    """

    id: CheckpointId
    cache: str
    is_here: bool
    is_suspect: bool
    guard: CheckpointId | None

    def as_document(self) -> dict[str, Any]:
        """For scripts."""
        return {"checkpoint": self.id.directory, "cache": self.cache, "here": self.is_here}


def find_on_nodes(paths: RunPaths, history: History, is_wanted: Callable[[CheckpointId], bool]) -> OnNodes | None:
    """The one that a restart on the nodes would try first. Raises DamagedError if `nodes.json` cannot be read."""
    mark = read_mark(paths)
    if mark is None:
        return None
    guard = mark.newest if history.is_live(mark.newest) else None
    here = _whole_here(mark, paths.rank)
    found = [OnNodes(id, mark.cache, True, is_suspect, guard) for id, is_suspect in here.items()]
    if guard is not None and guard not in here:
        found.append(OnNodes(guard, mark.cache, False, False, guard))
    usable = [item for item in found if history.is_live(item.id) and is_wanted(item.id)]
    return min(usable, key=lambda item: sort_key(item.id, is_suspect=item.is_suspect), default=None)


def _whole_here(mark: Mark, rank: int) -> dict[CheckpointId, bool]:
    """Checkpoints of which this node has every part, and whether one of these is suspect."""
    if not mark.cache or not Path(mark.cache).is_absolute():
        return {}
    cache = run_cache(mark.cache, mark.run, rank)
    found = {}
    for id in readable_steps(cache)[:_MOST_LOOKED_AT]:
        with contextlib.suppress(OSError, StepwellError):
            inventory = Inventory({"here": tell(cache, id, mark.run)})
            if inventory.losses() is not None:
                found[id] = inventory.is_suspect
    return found
