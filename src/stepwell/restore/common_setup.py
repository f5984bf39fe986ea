"""What all ranks must have in common before training starts: one run directory, and the same levels.

Owns:    the comparison, and errors that name the rank and what it has.
Not:     opening the run (reopen), who sits where (levels.places).
Holds:   a directory that each machine has for itself is refused: no checkpoint of all ranks could ever exist in it.
         What rank 0 wrote is waited for, since a network file system may show it late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from stepwell.errors import ConfigError
from stepwell.levels.level_spec import Levels
from stepwell.ranks.groups.consent import each
from stepwell.ranks.groups.group import Group
from stepwell.storage.format.manifest import Lineage, Run
from stepwell.storage.store import files
from stepwell.storage.store.lineage import read_run
from stepwell.storage.store.paths import RunPaths

_SHOWN_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.1


def check_directory(group: Group, paths: RunPaths, run: Run) -> None:
    """Every rank sees the run that rank 0 opened. Collective. Raises ConfigError."""

    def check() -> None:
        if not _is_shown(lambda: files.exists(paths.run)):
            raise _not_shared(group, paths, "there is no run.json")
        found = read_run(paths).id
        if found != run.id:
            raise _not_shared(group, paths, f"it holds run {found}, and on rank 0 it holds run {run.id}")

    if group.size > 1:
        each(group, "the run directory", check)


def check_lineage(group: Group, paths: RunPaths, lineage: Lineage) -> None:
    """Every rank sees the lineage that rank 0 made: copies of a run have its id too. Collective. Raises ConfigError."""

    def check() -> None:
        if not _is_shown(lambda: files.exists(paths.lineage(lineage.number))):
            raise _not_shared(group, paths, f"what rank 0 wrote there, lineage {lineage.number}, is not there")

    if group.size > 1:
        each(group, "the lineage of all ranks", check)


def _is_shown(look: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SHOWN_SECONDS
    while not (is_there := look()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return is_there


def _not_shared(group: Group, paths: RunPaths, why: str) -> ConfigError:
    return ConfigError(
        f"{paths.root} is not the same directory on rank {group.rank} as on rank 0: {why}; give a directory that all "
        "machines have mounted, or a bucket",
        path=str(paths.root),
        rank=group.rank,
    )


def check_levels(group: Group, levels: Levels | None) -> None:
    """The ranks were given the same levels. Collective. Raises ConfigError."""
    told = group.all_gather(_describe(levels), "the levels")
    for rank, found in enumerate(told):
        if found != told[0]:
            raise ConfigError(
                f"the levels are not the same on all ranks: rank 0 has {told[0]}, and rank {rank} has {found}; give "
                "all ranks the same levels=, or all nodes a STEPWELL_CACHE",
                rank=rank,
            )


def _describe(levels: Levels | None) -> Any:
    """What has to be alike: path, domain and address may be each node's own."""
    if levels is None:
        return "none (no levels=, and no STEPWELL_CACHE)"
    node, shared = levels.node, levels.shared
    given = f"keep={node.keep}, protect={node.protect}, tls={node.tls is not None}"
    said = " (by STEPWELL_CACHE)" if levels.is_default else ""
    return f"Node({given}), {shared}{said}"
