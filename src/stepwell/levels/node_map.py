"""Who sits where: ranks of one node share its cache, and are lost together, whatever the ids in the caches say.

Owns:    node and failure domain of every rank; nodes that were cloned from one image get ids of their own.
Not:     who protects whom (sets), how the ranks hear of each other (the caller's `gather`).
Holds:   the same answer on all ranks. Two machines have one cache only if each sees what the other one writes there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.events.level_events import NodeCloned, OneCache
from stepwell.events.run_events import Event
from stepwell.storage.store import files
from stepwell.storage.store.node_id import node_id, renew
from stepwell.storage.store.progress import boot_id

Gather = Callable[[Any, str], list[Any]]
"""Everybody's value, in rank order. Collective."""
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Machine:
    """What this process runs on: containers of one machine have one `boot`, and may have several `host`s."""

    host: str
    boot: str

    @classmethod
    def here(cls) -> Machine:
        """STEPWELL_NODE names it, where that is given."""
        given = os.environ.get("STEPWELL_NODE")
        boot = given or boot_id().hex()
        return cls(given or f"{socket.gethostname()} {boot}", boot)


@dataclass(frozen=True)
class Sitting:
    """Of one rank: the id of its node, and what fails together with it."""

    node: str
    domain: str


def find_sittings(
    gather: Gather, rank: int, root: Path, domain: str | None, emit: Emit, machine: Machine | None = None
) -> list[Sitting]:
    """Of all ranks. Collective. `root` holds a `node.json`."""
    here = machine or Machine.here()
    told = gather([node_id(root), here.host, here.boot, domain], "who shares a node")
    ids, hosts, boots = ([facts[at] for facts in told] for at in range(3))
    doubtful = {id for id in ids if len({hosts[other] for other, its in enumerate(ids) if its == id}) > 1}
    if doubtful:
        ids = _separate(gather, rank, root, ids, hosts, boots, doubtful, emit)
    together = _components(range(len(told)), lambda one, other: ids[one] == ids[other] or boots[one] == boots[other])
    first = {member: members[0] for members in together for member in members}
    return [Sitting(id, facts[3] or f"node {first[at]}") for at, (id, facts) in enumerate(zip(ids, told, strict=True))]


def _separate(
    gather: Gather,
    rank: int,
    root: Path,
    ids: Sequence[str],
    hosts: Sequence[str],
    boots: Sequence[str],
    doubtful: set[str],
    emit: Emit,
) -> list[str]:
    """Ids of all ranks, where machines with the same one and caches of their own have different ones."""
    mark = f"who.{secrets.token_hex(8)}{files.TEMPORARY}" if ids[rank] in doubtful else ""
    with contextlib.ExitStack() as stack:
        if mark:
            stack.callback(files.discard, root / mark)
            try:
                os.close(files.create(root / mark))
            except OSError:  # it cannot be written: nobody sees anything there
                mark = ""
        marks = gather(mark, "what is written into each cache")
        seen = [
            other for other, name in enumerate(marks) if name and ids[rank] in doubtful and files.exists(root / name)
        ]
        sees = gather(seen, "what is seen in each cache")
    fresh, own = list(ids), ""
    caches: list[list[int]] = []
    for id in sorted(doubtful):
        ranks = [other for other, its in enumerate(ids) if its == id]
        first, *clones = _components(
            ranks, lambda one, other: hosts[one] == hosts[other] or other in sees[one] or one in sees[other]
        )
        caches += [first, *clones]
        for members in clones:
            if rank == members[0]:
                own = renew(root)
                emit(NodeCloned(rank=rank, of_rank=first[0], path=str(root)))
    drawn = gather(own, "the new ids of nodes")
    for members in caches:
        if drawn[members[0]]:
            fresh = [drawn[members[0]] if other in members else id for other, id in enumerate(fresh)]
        if rank == members[0] and len({boots[other] for other in members}) > 1:
            emit(OneCache(ranks=members, path=str(root)))
    return fresh


def _components(ranks: Sequence[int], is_linked: Callable[[int, int], bool]) -> list[list[int]]:
    """Ranks that are linked directly or by others, the lowest first."""
    found: list[list[int]] = []
    for rank in ranks:
        linked = [members for members in found if any(is_linked(rank, other) for other in members)]
        merged = sorted([rank, *(other for members in linked for other in members)])
        found = sorted([members for members in found if members not in linked] + [merged])
    return found
