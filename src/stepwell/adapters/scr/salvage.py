"""Datasets from caches that no job works on any more, into the prefix: what SCR's scavenge does after the last run.

Owns:    finding the run's caches below given directories, and carrying, copying or rebuilding parts from them.
Before:  the nodes' caches are mounted or were copied to this machine.   After: the datasets exist in the prefix.
Holds:   everything is read and checked before it is used; caches are only read. What was carried before is not again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.adapters.scr.all_caches import check_document
from stepwell.adapters.scr.application_files import Description
from stepwell.adapters.scr.prefix_flush import conclude
from stepwell.adapters.scr.prefix_index import CHECKPOINT, OUTPUT, Prefix
from stepwell.errors import ConfigError, DamagedError, PeerError, StepwellError
from stepwell.levels import cached
from stepwell.levels.inventory import HeldNode, Inventory
from stepwell.levels.protect.copies import keep_shard
from stepwell.levels.protect.parity import RECORD
from stepwell.levels.protect.protection import near_shard
from stepwell.levels.protect.repair import RepairReach, remake, tell
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.format.parity_entry import parity_name
from stepwell.storage.format.record import Record
from stepwell.storage.store import assemble, commit, files
from stepwell.storage.store.commit import record_name
from stepwell.storage.store.lineage import read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner


@dataclass(frozen=True)
class Cached:
    """A dataset that lies in caches. `is_wanted`: the job meant it to go to the prefix, and it is not there."""

    id: CheckpointId
    description: Description
    inventory: Inventory
    is_wanted: bool
    is_in_prefix: bool

    @property
    def is_whole(self) -> bool:
        """Whether every part can be had."""
        return self.inventory.losses() is not None


class Folder:
    """A cache directory, read as another node's would be."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def read(self, directory: str, name: str, start: int, nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer. Raises PeerError."""
        place = self._paths.root / directory / name
        assert isinstance(place, Path)
        fd = files.open_regular(place)
        try:
            if os.preadv(fd, [buffer[:nbytes]], start) != nbytes:
                raise PeerError(f"{place}: ends early", path=str(place))
        finally:
            os.close(fd)


def open_prefix(root: str | os.PathLike[str]) -> Prefix:
    """A prefix that the SCR interface was used in. Raises ConfigError."""
    prefix = Prefix(Path(root).absolute())
    if not files.exists(prefix.paths.run):
        raise ConfigError(f"{root}: not a prefix of the SCR interface; give the directory that was SCR_PREFIX")
    return prefix


def find_caches(prefix: Prefix, folders: Iterable[Path]) -> dict[str, RunPaths]:
    """The parts of this run below directories that were SCR_CACHE_BASE, each of one node. Raises ConfigError."""
    run, found = read_run(prefix.paths).id, {}
    for folder in folders:
        places = [*folder.glob(f"*/stepwell-scr/runs/{run}"), *folder.glob(f"runs/{run}")]
        if not places:
            raise ConfigError(f"{folder}: contains nothing of this run; give what was SCR_CACHE_BASE on a node")
        found.update({str(place): RunPaths(place) for place in places})
    return found


def survey(prefix: Prefix, caches: dict[str, RunPaths]) -> list[Cached]:
    """What lies in the caches, whole or not, the newest first. Reads everything."""
    run = read_run(prefix.paths).id
    ids = sorted({id for paths in caches.values() for id in cached.steps(paths)}, reverse=True)
    out = []
    for id in ids:
        nodes = {name: _sound(paths, id, run) for name, paths in caches.items()}
        known = [found for paths in caches.values() if (found := _describe(paths, id)) is not None]
        levels = [level for paths in caches.values() if (level := cached.read_level(paths, id)) is not None]
        is_there = files.exists(prefix.paths.manifest(id))
        if known:
            is_wanted = any(level.flush for level in levels) and not is_there
            out.append(Cached(id, known[0], Inventory(nodes), is_wanted, is_there))
    return out


def _sound(paths: RunPaths, id: CheckpointId, run: str) -> HeldNode:
    """What a cache holds of a dataset, without what is damaged."""
    found, directory = tell(paths, id, run), paths.checkpoint(id)

    def is_sound(name: str) -> bool:
        try:
            check_document(directory / name)
        except (OSError, StepwellError):
            return False
        return True

    return HeldNode(
        [item for item in found.shards if is_sound(record_name(Owner(item.rank)))],
        [item for item in found.parity if is_sound(parity_name(item.rank))],
    )


def _describe(paths: RunPaths, id: CheckpointId) -> Description | None:
    directory = paths.checkpoint(id)
    for name in files.list_names(directory):
        if name.startswith("rank-") and name.endswith((".json", RECORD)):
            try:
                return Description.of(Record.load(files.get(directory / name), path=name))
            except DamagedError:
                continue
    return None


def choose(found: Sequence[Cached], *, take_all: bool = False) -> list[Cached]:
    """What is worth carrying: all output, then the newest checkpoint; none that is newer than output that is lost.

    In the order in which they are carried.
    """
    missing = [item for item in found if not item.is_in_prefix]
    output = [item for item in missing if item.description.flags & OUTPUT or not item.description.flags & CHECKPOINT]
    lost = min((item.id for item in output if not item.is_whole), default=None)
    checkpoints = [
        item
        for item in found
        if item.description.flags & CHECKPOINT and item.is_whole and (lost is None or item.id < lost)
    ]
    newest = checkpoints if take_all else checkpoints[:1]
    wanted = {item.id: item for item in (*output, *newest) if item.is_whole and not item.is_in_prefix}
    return [wanted[id] for id in sorted(wanted)]


def carry(prefix: Prefix, caches: dict[str, RunPaths], item: Cached) -> Manifest:
    """One dataset, to the prefix. On return it is durable there. Raises OSError, StepwellError."""
    id, run = item.id, read_run(prefix.paths).id
    commit.check_fence(prefix.paths, id)
    losses = item.inventory.losses()
    if losses is None:
        raise DamagedError(f"{item.description.name}: some of its parts are missing in these caches")
    for rank in range(item.inventory.world_size or 0):
        if assemble.find_record(prefix.paths, id, Owner(rank)) is None:
            for node in list(item.inventory.holders(rank))[:1]:  # all that are left were read and are sound
                data, record, fill = near_shard(caches[node], id, rank)
                keep_shard(prefix.paths, record, data, fill, may_link=False)
    for loss in losses:
        if assemble.find_record(prefix.paths, id, Owner(loss.rank)) is None:
            reach = RepairReach(prefix.paths, id, run, "", lambda node: Folder(caches[node]))
            remake(prefix.paths, id, run, item.inventory, loss, reach)
    manifest = conclude(prefix, id)
    if manifest is None:
        raise DamagedError(f"{item.description.name}: parts are missing in the prefix")
    return manifest
