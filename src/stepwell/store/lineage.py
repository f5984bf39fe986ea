"""Which history is true.

Owns:    creating the run and the next lineage exclusively, and the path from the newest lineage back to the start.
Holds:   two processes that start at once get two different lineages; a checkpoint off the path is never chosen.
"""

from __future__ import annotations

import os
import secrets
import socket
import time

from stepwell.errors import DamagedError
from stepwell.format.manifest import Lineage, Run
from stepwell.store import files
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId

_MAX_LINEAGES = 1_000_000


def open_run(paths: RunPaths, *, seed: int | None) -> Run:
    """Read the run's identity, or create it. A seed that was drawn once stays."""
    if not paths.run.exists():
        paths.root.mkdir(parents=True, exist_ok=True)
        fresh = Run(id=secrets.token_hex(8), seed=secrets.randbits(63) if seed is None else seed, created=time.time())
        files.put_new(paths.run, fresh.dump(), point="run")
    return read_run(paths)


def read_run(paths: RunPaths) -> Run:
    """The run's identity. Raises DamagedError if it cannot be read."""
    return Run.load(files.get(paths.run), path=str(paths.run))


def read_lineages(paths: RunPaths) -> dict[int, Lineage]:
    """All readable lineages by number. A damaged one is left out: what hangs on it is then off the path."""
    found: dict[int, Lineage] = {}
    try:
        names = sorted(os.listdir(paths.lineages))
    except FileNotFoundError:
        return found
    for name in names:
        if not name.endswith(".json") or not name[:-5].isdigit():
            continue
        path = paths.lineages / name
        try:
            lineage = Lineage.load(files.get(path), path=str(path))
        except DamagedError:
            continue
        if lineage.number == int(name[:-5]) and lineage.parent < lineage.number:
            found[lineage.number] = lineage
    return found


def newest_number(paths: RunPaths) -> int:
    """The highest lineage number taken, readable or not; 0 if none."""
    try:
        names = os.listdir(paths.lineages)
    except FileNotFoundError:
        return 0
    return max((int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()), default=0)


def create_next(paths: RunPaths, *, parent: int, step: int) -> Lineage:
    """Take the next free number. Whoever links the name first has it; the others go on to the next one."""
    files.make_directory(paths.lineages)
    number = newest_number(paths)
    while number < _MAX_LINEAGES:
        number += 1
        lineage = Lineage(number=number, parent=parent, step=step, created=time.time(), host=socket.gethostname())
        if files.put_new(paths.lineage(number), lineage.dump(), point="lineage"):
            return lineage
    raise DamagedError(f"{paths.lineages}: more than {_MAX_LINEAGES} lineages", path=str(paths.lineages))


class History:
    """The path from the newest lineage back to the start: which steps of which lineage are live."""

    def __init__(self, lineages: dict[int, Lineage], newest: int) -> None:
        self.newest = newest
        self._until: dict[int, int | None] = {}
        number, until = newest, None
        while number:
            self._until[number] = until
            lineage = lineages.get(number)
            if lineage is None:
                break  # a damaged link: what lies behind it cannot be shown to be ours
            number = lineage.parent
            # A parent's checkpoints count up to where its child left it, and no further than where
            # the child itself is left: the path may only go back in time.
            until = lineage.step if until is None else min(until, lineage.step)

    def is_live(self, id: CheckpointId) -> bool:
        """Whether this checkpoint lies on the path."""
        if id.lineage not in self._until:
            return False
        until = self._until[id.lineage]
        return until is None or id.step <= until


def read_history(paths: RunPaths) -> History:
    """The history as the directory has it now."""
    return History(read_lineages(paths), newest_number(paths))
