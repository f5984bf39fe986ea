"""Checkpoints made in this process: the real snapshot layout, arena, persister and commit, without an agent process.

A test that needs a run directory and nothing of the loop around it builds one here in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stepwell.agent.pending import AgentLayout, Pending
from stepwell.agent.target.shared_target import Persister
from stepwell.events import journal
from stepwell.handover.client import AgentClient
from stepwell.handover.memory import FROZEN, Arena, ArenaShape, whole_pages
from stepwell.handover.message import decode, encode
from stepwell.handover.protocol import KINDS, Begin, NewLayout
from stepwell.restore.open_request import LoadRequest, OpenRequest, Wish
from stepwell.restore.open_run import Reopened, load_only, reopen
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.store.catalog import read_manifest
from stepwell.storage.store.lineage import create_next, open_run
from stepwell.storage.store.paths import RunPaths
from stepwell.training.snapshot.host_copy import HostCopy
from stepwell.training.snapshot.layout import Plan, make_plan
from stepwell.training.state import rng
from stepwell.training.state.flatten import Flat, flatten
from stepwell.training.state.roles import Role
from stepwell.training.state.tracked import track
from stepwell.types import CheckpointId, Owner, SaveRequest


def own(step: int, *, epoch: int = 0, consumed: int = 0) -> dict[str, Any]:
    """The run's own part of a state."""
    return {"step": step, "epoch": epoch, "consumed": consumed, "finished": False, "rng": rng.capture()}


@dataclass
class RunBuilder:
    """One run directory. `lineage` is the one that checkpoints are written into."""

    root: Path
    seed: int = 7
    lineage: int = 0
    paths: RunPaths = field(init=False)
    run: str = field(init=False)

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.root)
        self.run = open_run(self.paths, seed=self.seed).id
        self.fork()

    def fork(self, *, parent: int | None = None, step: int = 0) -> int:
        """The next lineage, from a step of `parent` (default: the present one)."""
        self.lineage = create_next(self.paths, parent=self.lineage if parent is None else parent, step=step).number
        return self.lineage

    def write(
        self, state: dict[str, Any], step: int, *, frozen: Iterable[str] = (), suspect: bool = False, **meta: Any
    ) -> CheckpointId:
        """Commit a checkpoint of `state`. `frozen` names leaves that go into the frozen file."""
        flat = flatten({**state, "stepwell": meta.pop("own", None) or own(step)})
        plan = _plan(flat, set(frozen))
        arena = _fill(flat, plan)
        try:
            if suspect:
                arena.set_suspects(0, 1, 0)
            pending = self._pending(flat, plan, arena, step, meta)
            log = journal.EventLog(self.paths.events, who="agent", lineage=self.lineage)
            Persister(self.paths, log, lineage=pending.id.lineage).persist(pending)
            log.close()
        finally:
            arena.close()
        return pending.id

    def _pending(self, flat: Flat, plan: Plan, arena: Arena, step: int, meta: dict[str, Any]) -> Pending:
        said = {"created": 1700000000.5, "tree": flat.tree, "epoch_end": False, "finished": False, "name": None,
                "files": {}, "repeat": 0, **meta}  # fmt: skip
        begin = decode(encode(Begin(SaveRequest(step, **said), 1, 0, 1, 1, 1 if plan.frozen else 0)).encode(), KINDS)
        layout = decode(encode(plan.message()).encode(), KINDS)  # both as they reach the agent
        assert isinstance(begin, Begin) and isinstance(layout, NewLayout)
        return Pending(
            run=self.run,
            id=CheckpointId(step, begin.request.repeat, self.lineage),
            owner=Owner(),
            arena=arena,
            layout=AgentLayout.from_message(layout),
            begin=begin,
        )

    def manifest(self, id: CheckpointId) -> Manifest:
        return read_manifest(self.paths, id)


def _plan(flat: Flat, frozen: set[str]) -> Plan:
    def live() -> torch.Tensor | None:
        return None

    known = {leaf.name for leaf in flat.leaves}
    assert frozen <= known, f"no such leaves: {frozen - known}"
    roles = [Role("frozen" if leaf.name in frozen else "loose", "value", live) for leaf in flat.leaves]
    return make_plan(1, flat.leaves, roles)


def _fill(flat: Flat, plan: Plan) -> Arena:
    """A snapshot in an arena, complete with verdict."""
    arena = Arena.allocate(ArenaShape(1, 1, whole_pages(plan.live.nbytes), whole_pages(plan.frozen_bytes)))
    arena.image(0, len(plan.live.header))[:] = plan.live.header
    if plan.frozen is not None:
        arena.image(FROZEN, len(plan.frozen.header))[:] = plan.frozen.header
    for leaf in flat.leaves:
        place = plan.places[leaf.name]
        start = arena.shape.start(FROZEN if place.is_frozen else 0) + place.start
        HostCopy(leaf.tensor, arena.address() + start, place.nbytes).run()
    for index in (0, FROZEN):
        arena.set_sequence(index, 1)
        arena.set_verdict(index, 1, is_good=True)
    return arena


def restore(root: Path, objects: dict[str, Any], **options: Any) -> Reopened:
    """What `Checkpointer.restore` does, up to the point where it would greet its agent."""
    paths = RunPaths(root)
    log = journal.EventLog(paths.events, who="trainer")
    client = AgentClient(log)
    try:
        wish = Wish(*(options.pop(name, None) for name in ("step", "before", "prefer")))
        group = options.pop("group", None)
        request = OpenRequest(attach=lambda seed: None, check=lambda own: None, wish=wish, **options)
        return reopen(paths, track(objects), request, log=log, client=client, group=group)
    finally:
        client.give_up()
        log.close()


def restore_only(root: Path, objects: dict[str, Any], *, only: set[str], step: int | None = None) -> bool:
    """What `Checkpointer.restore(only=...)` does."""
    paths = RunPaths(root)
    log = journal.EventLog(paths.events, who="trainer")
    try:
        return load_only(paths, track(objects), LoadRequest.of(only, Wish(step)), log=log)
    finally:
        log.close()


def damage_events(root: Path) -> list[dict[str, Any]]:
    """The damage that restores of this run reported."""
    return [event for event in journal.read_events(RunPaths(root).events) if event["kind"] == "damage"]
