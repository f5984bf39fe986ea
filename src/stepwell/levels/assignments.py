"""What an agent has to know about levels: where its node's cache is, who else is there, what goes to the shared place.

Owns:    the message, and the table of who sits where, which is the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stepwell.levels.level_spec import Levels, Protection, Shared, choose_protection, dump_protection, load_protection
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.private_directory import make_private
from stepwell.types import CheckpointId

_ADVICE: Final = "give Node(), or STEPWELL_CACHE, a directory that only you can write to, on every node"


@dataclass(frozen=True)
class Seat:
    """Where one rank is: its node, what fails together with it, and where its agent can be reached."""

    node: str
    domain: str
    host: str
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


def run_cache(cache: str | os.PathLike[str], run: str, rank: int = 0) -> RunPaths:
    """The part of a node's cache that belongs to a run."""
    return RunPaths(Path(cache).absolute() / "runs" / run, rank)


def open_cache(paths: RunPaths) -> None:
    """Make the part of a cache that belongs to a run, for this user alone. Raises OSError, ConfigError."""
    assert isinstance(paths.root, Path)
    make_private(paths.root, advice=_ADVICE)


@dataclass(frozen=True)
class Orders:
    """For the agent of one rank.

    dead:   checkpoints in this node's cache that are of no use any more: another history went on
    again:  the checkpoint that all went on from, to be held and protected by who sits where now; empty if there is none
    place:  the directory of the caches, for people; empty if it is not the same on all nodes
    """

    cache: str
    run: str
    keep: int
    protect: Protection
    shared: Shared
    secret: str
    peers: tuple[Seat, ...]
    dead: tuple[str, ...] = ()
    again: str = ""
    tls: str | None = None
    place: str = ""

    @classmethod
    def make(
        cls,
        levels: Levels,
        run: str,
        secret: str,
        peers: Sequence[Seat],
        dead: Sequence[str] = (),
        again: CheckpointId | None = None,
        place: str = "",
    ) -> Orders:
        """What follows from what the user said and who came."""
        protect = choose_protection(levels.node.protect, [peer.domain for peer in peers])
        cache = str(Path(levels.node.path).absolute())
        directory = "" if again is None else again.directory
        return cls(
            cache,
            run,
            levels.node.keep,
            protect,
            levels.shared,
            secret,
            tuple(peers),
            tuple(dead),
            directory,
            levels.node.tls,
            place,
        )

    def here(self, rank: int) -> list[int]:
        """The ranks on that rank's node, in order. The first one removes what is old there."""
        return [other for other, seat in enumerate(self.peers) if seat.node == self.peers[rank].node]

    def one_of_each_node(self) -> list[int]:
        """A rank of each node, to ask what that node holds."""
        return sorted({seat.node: rank for rank, seat in reversed(list(enumerate(self.peers)))}.values())

    def dump(self) -> dict[str, Any]:
        """As it travels."""
        return {**asdict(self), "protect": dump_protection(self.protect)}

    @classmethod
    def load(cls, values: dict[str, Any]) -> Orders:
        """What `dump` gave."""
        peers = tuple(Seat(**peer) for peer in values["peers"])
        made = {"protect": load_protection(values["protect"]), "shared": Shared(**values["shared"]), "peers": peers}
        return cls(**{**values, **made, "dead": tuple(values["dead"])})
