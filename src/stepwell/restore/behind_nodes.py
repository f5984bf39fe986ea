"""A start that would go back behind what is whole on the nodes: refused where somebody seems to have made a mistake.

Owns:    the comparison of what a start can reach with what the shared place knows of the nodes, and the advice.
Not:     writing that down (agent.marker), what is reached (candidates).
Holds:   never from zero while the nodes are known to hold something. Nodes may be lost, and then the shared place
         counts: that is a warning, where the start looked into the right caches and something older is there.
"""

from __future__ import annotations

from stepwell.errors import ConfigError, DamagedError, RestoreError
from stepwell.events.journal import EventLog
from stepwell.events.level_events import NodesBehind
from stepwell.restore.from_nodes import Caches
from stepwell.storage.store.lineage import History, read_history
from stepwell.storage.store.nodes_mark import Mark, read_mark
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId


def check_nodes(
    paths: RunPaths,
    history: History,
    caches: Caches | None,
    newest: CheckpointId | None,
    log: EventLog,
    *,
    is_only: bool = False,
) -> None:
    """Rank 0: whether a start that reaches `newest` may begin there. Raises RestoreError.

    is_only:  only single objects are taken, and the run stays what it is
    """
    mark = _read(paths)
    if mark is None or (newest is not None and newest >= mark.newest):
        return
    if not history.is_live(mark.newest) and history.damage is None:
        return  # the run has left that history
    why = _why_not_reached(mark, caches)
    is_mistake = caches is None or (caches.place != mark.cache and bool(mark.cache) and bool(caches.place))
    if newest is not None and (is_only or not is_mistake):
        log.emit(NodesBehind(step=mark.newest.step, to=newest.step, why=why))
        return
    back = "the beginning" if newest is None else f"step {newest.step}"
    where = f"levels=[Node({mark.cache!r})]" if mark.cache else "the levels= it had"
    raise RestoreError(
        f"step {mark.newest.step} of this run is whole in the caches of its nodes, {why}; this start would go back to "
        f"{back}.\nStart on these nodes, with {where}, and without deltas=. If they are lost, or to start over from "
        f"{back} deliberately, remove {paths.nodes}",
        path=str(paths.nodes),
        step=mark.newest.step,
    )


def _why_not_reached(mark: Mark, caches: Caches | None) -> str:
    if caches is None:
        return f"in {mark.cache or 'directories of their own'}, and this start does not look there"
    if mark.cache and caches.place and caches.place != mark.cache:
        return f"in {mark.cache}, and this start looks in {caches.place}"
    return "and the nodes that are here do not have all of its parts"


def check_fresh(paths: RunPaths) -> None:
    """A loop that begins without `restore()`. Raises ConfigError if the nodes hold checkpoints."""
    mark = _read(paths)
    if mark is not None and read_history(paths).is_live(mark.newest):
        raise ConfigError(
            f"{paths.root} has checkpoints up to step {mark.newest.step} in the caches of its nodes: call "
            "ckpt.restore() before the loop, or use another directory for a new run",
            path=str(paths.root),
        )


def _read(paths: RunPaths) -> Mark | None:
    try:
        return read_mark(paths)
    except DamagedError as error:
        raise RestoreError(
            f"how far the nodes of this run are cannot be read: {error}\nIf nothing is in their caches that is needed, "
            "remove this file",
            path=str(paths.nodes),
        ) from error
