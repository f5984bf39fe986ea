"""The `levels=` option: its public types, checks and defaults, and its form in messages to the agent.

    levels=[Node("/local/cache", keep=2, protect=Pairs()), Shared(every=10)]

Owns:    the public names, their defaults and their checks.
Not:     who protects whom (sets), what is done about it (agent.keeper, agent.flush).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from stepwell.errors import ConfigError


@dataclass(frozen=True)
class Single:
    """No copies on other nodes: survives the process and a reboot, not the loss of the node."""


@dataclass(frozen=True)
class Pairs:
    """Two ranks on different nodes each hold a copy of the other's shard."""


@dataclass(frozen=True)
class Partner:
    """Each rank copies its shard to the next node, in a ring."""


@dataclass(frozen=True)
class Xor:
    """Parity over sets of `n` nodes: each set survives the loss of one node."""

    n: int = 8

    def __post_init__(self) -> None:
        _check_set(self, self.n, 1)


@dataclass(frozen=True)
class ReedSolomon:
    """Parity over sets of `n` nodes: each set survives the loss of any `m`. Needs `pip install stepwell[parity]`."""

    n: int = 8
    m: int = 2

    def __post_init__(self) -> None:
        _check_set(self, self.n, self.m)


Protection = Single | Pairs | Partner | Xor | ReedSolomon
_PROTECTIONS: Final[dict[str, type[Protection]]] = {
    kind.__name__: kind for kind in (Single, Pairs, Partner, Xor, ReedSolomon)
}


def _check_set(what: Protection, n: int, m: int) -> None:
    if not (2 <= n <= 128 and 1 <= m < n):
        raise ConfigError(f"{what}: give sets of 2 to 128 nodes, and fewer losses than nodes, at least one")


@dataclass(frozen=True)
class Node:
    """A directory on a local disk, or in memory, of each node; the same path on all nodes.

    path:     by default the value of STEPWELL_CACHE
    keep:     how many complete checkpoints to keep there, at least 2: a crash during a write leaves the other
    protect:  copies or parity on other nodes; by default Pairs() with several nodes
    domain:   what fails together, where that is more than a node: the name of a rack, say
    address:  of this node, where other nodes reach it; by default the one that the launcher names
    tls:      a folder with cert.pem, key.pem and ca.pem, on every node: what travels between them is encrypted
    """

    path: str | os.PathLike[str] = ""
    keep: int = 2
    protect: Protection | None = None
    domain: str | None = None
    address: str | None = None
    tls: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path) or os.environ.get("STEPWELL_CACHE", ""))
        if not self.path:
            raise ConfigError("Node(): give a directory of each node, or set STEPWELL_CACHE", name="path")
        if self.keep < 2:
            raise ConfigError(f"Node(keep={self.keep!r}): at least 2, since a crash may spoil the newest", name="keep")
        if self.protect is not None and type(self.protect).__name__ not in _PROTECTIONS:
            names = ", ".join(f"{name}()" for name in _PROTECTIONS)
            raise ConfigError(f"Node(protect={self.protect!r}): give one of {names}", name="protect")


@dataclass(frozen=True)
class Shared:
    """The directory or bucket of the Checkpointer, which outlives all nodes.

    every:  copy every n-th checkpoint there; explicit saves are always copied
    rate:   limit in bytes per second, for all ranks together
    """

    every: int = 10
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or self.every % 1:
            raise ConfigError(f"Shared(every={self.every!r}): give a number of checkpoints of 1 or more", name="every")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"Shared(rate={self.rate!r}): give bytes a second, above 0", name="rate")


@dataclass(frozen=True)
class Levels:
    """The levels of a run. `is_default`: the user did not choose; checkpoints may go straight to the shared place."""

    node: Node
    shared: Shared
    is_default: bool = False


def read_levels(levels: Sequence[Node | Shared] | None) -> Levels | None:
    """Read `levels=`. None: checkpoints go straight to the shared place. Raises ConfigError."""
    if levels is None:
        return Levels(Node(), Shared(), is_default=True) if os.environ.get("STEPWELL_CACHE") else None
    if not isinstance(levels, list | tuple):
        said = "levels=[Node(...)], or levels=[Node(...), Shared(every=10)]"
        raise ConfigError(f"levels={levels!r}: give a list: {said}", name="levels")
    if not levels:
        return None
    nodes = [item for item in levels if isinstance(item, Node)]
    shared = [item for item in levels if isinstance(item, Shared)]
    if len(nodes) != 1 or len(shared) > 1 or len(nodes) + len(shared) != len(levels):
        raise ConfigError(f"levels={levels!r}: give one Node(...), and at most one Shared(...)", name="levels")
    return Levels(nodes[0], shared[0] if shared else Shared())


def choose_protection(protect: Protection | None, domains: Sequence[str]) -> Protection:
    """What was asked for, or what fits the nodes."""
    if len(set(domains)) < 2:
        return Single()
    return Pairs() if protect is None else protect


def dump_protection(protect: Protection) -> dict[str, Any]:
    """As it travels."""
    return {"kind": type(protect).__name__, **asdict(protect)}


def load_protection(values: dict[str, Any]) -> Protection:
    """What `dump_protection` gave. Raises ConfigError."""
    kind = _PROTECTIONS[values["kind"]]
    return kind(**{field.name: values[field.name] for field in fields(kind)})
