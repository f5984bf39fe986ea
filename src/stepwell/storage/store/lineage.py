"""Which history is true.

Owns:    creating the run and the next lineage exclusively, and the path from the newest lineage back to the start.
Holds:   two processes that start at once get two different lineages; a checkpoint off the path is never chosen; a run
         whose identity is lost is not silently given another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from stepwell.errors import ConfigError, DamagedError
from stepwell.storage.format.manifest import MAX_SEED, Lineage, Run
from stepwell.storage.store import files
from stepwell.storage.store.objects import Location, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep

_MAX_LINEAGES = 1_000_000
_MAX_BYTES = 64 << 10  # of run.json and of a lineage: both have a handful of fields
_ENDLESS: Final = 1 << 62
_NAME = re.compile(r"(\d{4,8})\.json", re.ASCII)


def open_run(paths: RunPaths, *, seed: int | None) -> Run:
    """Read the run's identity, or create it. A seed that was drawn once stays."""
    if not files.exists(paths.run):
        if seed is not None and (type(seed) is not int or not 0 <= seed < MAX_SEED):
            raise ConfigError(f"seed={seed!r}: give a whole number from 0 to 2**64 - 1", found=seed)
        _refuse_orphans(paths)
        drawn = int.from_bytes(os.urandom(8), "little") >> 1  # not `secrets`: its imports cost each agent 15 ms
        fresh = Run(id=os.urandom(8).hex(), seed=drawn if seed is None else seed, created=time.time())
        with _opening(paths):
            _make_root(paths.root)
            files.put_new(paths.run, fresh.dump(), point="run")
            _check_exclusive(paths)
    return read_run(paths)


@contextlib.contextmanager
def _opening(paths: RunPaths) -> Iterator[None]:
    """Say what a file system that fails means to the person who starts a run."""
    try:
        yield
    except OSError as error:
        advice = "make room or repair the file system, or give the run another directory"
        if isinstance(paths.root, ObjectPath):
            advice = "look at the address, the keys in the environment and the network"
        raise ConfigError(
            f"the run in {paths.root} cannot be opened for writing: {error}; {advice}", path=str(paths.root)
        ) from error


def _check_exclusive(paths: RunPaths) -> None:
    """Everything stands on names that are given once. A service that does not know that is found out here."""
    if isinstance(paths.root, ObjectPath) and files.put_new(paths.run, files.get(paths.run), point="run"):
        raise ConfigError(
            f"{paths.root}: this storage gives a name twice (it ignores If-None-Match), so that two processes could "
            "continue the run at once; use a service that knows conditional writes",
            path=str(paths.root),
        )


def _refuse_orphans(paths: RunPaths) -> None:
    """run.json is durable before anything else of a run: checkpoints without it have lost their seed."""
    names = [
        name
        for name in files.list_names(paths.root, follow=True)
        if CheckpointId.parse(name) or name == paths.lineages.name
    ]
    if names:
        raise DamagedError(
            f"{paths.run}: missing, but {paths.root} holds {names[0]}: without its seed the run cannot go on; "
            "bring run.json back from a copy, or use another directory",
            path=str(paths.run),
        )


def _make_root(root: Location) -> None:
    """Make the run's directory, each name durable: a checkpoint is worth no more than the way to it."""
    if isinstance(root, ObjectPath):
        return
    if os.path.lexists(root):
        if not root.is_dir():
            raise ConfigError(f"{root} is not a directory; give the run another place", path=str(root))
        return
    _make_root(root.parent)
    files.make_directory(root)


def read_run(paths: RunPaths) -> Run:
    """The run's identity. Raises DamagedError if it cannot be read."""
    return Run.load(files.get(paths.run, limit=_MAX_BYTES), path=str(paths.run))


def read_lineages(paths: RunPaths) -> tuple[dict[int, Lineage], dict[int, str]]:
    """All readable lineages by number, and what is wrong with each of the others."""
    found: dict[int, Lineage] = {}
    damage: dict[int, str] = {}
    for number in _numbers(paths):
        try:
            found[number] = _read_lineage(paths, number)
        except DamagedError as error:
            damage[number] = str(error)
    return found, damage


def _read_lineage(paths: RunPaths, number: int) -> Lineage:
    """One of them, which never changes. Raises DamagedError."""
    if paths.known is not None and (lineage := paths.known.lineages.get(number)) is not None:
        return lineage
    path = paths.lineage(number)
    lineage = Lineage.load(files.get(path, limit=_MAX_BYTES, is_constant=True), path=str(path))
    if lineage.number != number or lineage.parent >= number:
        raise DamagedError(
            f"{path}: speaks of lineage {lineage.number} with parent {lineage.parent}",
            path=str(path),
            expected=number,
            found=lineage.number,
        )
    if paths.known is not None:
        paths.known.note_lineage(lineage)
    return lineage


def _numbers(paths: RunPaths) -> list[int]:
    numbers = [int(match[1]) for match in map(_NAME.fullmatch, files.list_names(paths.lineages)) if match]
    return [number for number in numbers if 0 < number <= _MAX_LINEAGES]


def newest_number(paths: RunPaths) -> int:
    """The highest lineage number taken, readable or not; 0 if none.

    Who has seen the newest looks for the one after it: they are taken without gaps.
    """
    if paths.known is None:
        return max(_numbers(paths), default=0)
    number = paths.known.newest
    if not number or not files.exists(paths.lineage(number)):
        number = max(_numbers(paths), default=0)
    while number and files.appeared(paths.lineages, paths.lineage(number + 1).name):
        number += 1
    paths.known.newest = number
    return number


def create_next(
    paths: RunPaths, *, parent: int, step: int, lossy: str | None = None, keep: Keep | None = None
) -> Lineage:
    """Take the next free number. Whoever links the name first has it; the others go on to the next one."""
    host = socket.gethostname()
    with _opening(paths):
        files.make_directory(paths.lineages)
        number = newest_number(paths)
        while number < _MAX_LINEAGES:
            number += 1
            lineage = Lineage(number, parent, step, time.time(), host, lossy, keep)
            if files.put_new(paths.lineage(number), lineage.dump(), point="lineage"):
                return lineage
    raise DamagedError(f"{paths.lineages}: more than {_MAX_LINEAGES} lineages", path=str(paths.lineages))


def recorded_keep(paths: RunPaths) -> Keep | None:
    """What the run was told to keep at its last start; None if an older version started it. Raises DamagedError."""
    number = newest_number(paths)
    return _read_link(paths, number).keep if number else None


class History:
    """The path from the newest lineage back to the start: which steps of which lineage are live.

    It is read only as far back as somebody asks: who continued the run ten thousand times asks for the last ones.
    """

    def __init__(self, newest: int, read: Callable[[int], Lineage]) -> None:
        """`read` gives the lineage with a number; raises DamagedError."""
        self.newest = newest
        self.damage: str | None = None
        """Why the path cannot be followed further back than it was."""
        self._read = read
        self._until: dict[int, int | None] = {newest: None} if newest else {}
        self._oldest, self._limit = newest, _ENDLESS

    def _follow(self, number: int) -> None:
        """Go back until this lineage is on the path, or is passed: numbers only become smaller."""
        while self._oldest > number and self.damage is None:
            try:
                lineage = self._read(self._oldest)
            except DamagedError as error:  # what lies behind it cannot be shown to be ours
                self.damage = str(error)
                return
            # A parent's checkpoints count up to where its child left it, and no further than where
            # the child itself is left: the path may only go back in time.
            self._oldest, self._limit = lineage.parent, min(self._limit, lineage.step)
            if self._oldest:
                self._until[self._oldest] = self._limit

    def is_live(self, id: CheckpointId) -> bool:
        """Whether this checkpoint lies on the path."""
        self._follow(id.lineage)
        if id.lineage not in self._until:
            return False
        until = self._until[id.lineage]
        return until is None or id.step <= until

    def why_not_live(self, id: CheckpointId) -> str | None:
        """None for a live one, else a sentence."""
        if self.is_live(id):
            return None
        if self.damage is not None and id.lineage not in self._until:
            return f"not known to belong to the path of this run: {self.damage}"
        return "abandoned branch: the run was continued from an earlier step"


def read_history(paths: RunPaths) -> History:
    """The history as the directory has it now."""
    return History(newest_number(paths), lambda number: _read_link(paths, number))


def _read_link(paths: RunPaths, number: int) -> Lineage:
    try:
        return _read_lineage(paths, number)
    except DamagedError as error:
        if files.exists(paths.lineage(number)):
            raise
        raise DamagedError(f"lineage {number} is missing", path=str(paths.lineage(number))) from error
