"""torch.distributed.checkpoint (DCP) saves a checkpoint of ours.

    dcp.save({"model": model.state_dict(), ...}, storage_writer=StepwellWriter("runs/x", step=1000))

Owns:    which of DCP's write items is which tensor of the state; its planner says who stores what.
Not:     files and commit (interchange.writing).
Holds:   nothing is pickled: plain values are stored as in every checkpoint, what cannot be is refused with its path.
         A save that fails on any rank leaves no checkpoint. A planner that keeps its plans (enable_plan_caching) hands
         out an earlier save's again, with that save's ticket: the ticket of this one is then found beside the plan.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, ClassVar

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stepwell import ConfigError, Keep
from stepwell.adapters.dcp_commit import CommitTicket, Owner, begin, finish, write_part
from stepwell.adapters.world import forget, hear, tell

__all__ = ["StepwellWriter"]


class StepwellWriter(StorageWriter):
    """Writes one checkpoint of a run for `dcp.save`, on any number of ranks.

    run, step:  the run's directory or address, and the step that the checkpoint is of
    keep:       how many checkpoints stay, as for a Checkpointer

    A StepwellReader, a Checkpointer and all commands read it. Step and generators come back, but no position in the
    data: an epoch begins anew. A Checkpointer that works on the run at the same time loses it.
    """

    _saves: ClassVar[int] = 0
    """Of this process; all ranks of a save count alike."""

    def __init__(self, run: str | os.PathLike[str], step: int, *, keep: int | Keep = 2) -> None:
        if type(step) is not int or step < 0:
            raise ConfigError(f"step={step!r}: give the number of the step to save", found=step)
        self._run, self._step = os.fspath(run), step
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._ticket: CommitTicket | None = None
        self._world_size = 1
        self._number = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; `checkpoint_id`: in the run in that place."""
        if checkpoint_id is not None:
            self._run = os.fspath(checkpoint_id)
        self._ticket = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Count: the run is opened when all ranks have planned."""
        StepwellWriter._saves += 1
        self._number = StepwellWriter._saves

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the planner made it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """One rank opens the run for all. Raises ConfigError."""
        self._ticket, self._world_size = begin(self._run, self._step, self._keep), len(plans)
        ticket = dataclasses.asdict(self._ticket)
        if len(plans) > 1 and not all(plan.usable for plan in plans):
            tell(json.dumps(ticket), _name(self._number))
        told = {"ticket": ticket, "save": self._number}
        return [
            dataclasses.replace(plan, storage_data={**told, "owner": (rank, len(plans))})
            for rank, plan in enumerate(plans)
        ]

    def _find_ticket(self, plan: SavePlan) -> CommitTicket:
        """Of this save; the plan may be that of an earlier one."""
        if self._ticket is not None:
            return self._ticket
        if plan.storage_data["save"] == self._number:
            return CommitTicket(**plan.storage_data["ticket"])
        return CommitTicket(**json.loads(hear(_name(self._number))))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. Returns when it is durable. Raises StateError for what cannot be stored."""
        mappings = getattr(planner, "mappings", None) or {}
        flat = getattr(planner, "state_dict", None)
        if flat is None:
            raise ConfigError(f"a planner of type {type(planner).__qualname__} does not expose its state_dict")
        paths = {key: mappings.get(key, (key,)) for key in flat}
        stored = {tuple(map(str, paths[item.index.fqn])) for item in plan.items if item.type != WriteItemType.BYTE_IO}
        state = unflatten_state_dict(flat, paths)
        write_part(self._find_ticket(plan), Owner(*plan.storage_data["owner"]), _numbered(state), stored)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written: commit, then retention."""
        assert self._ticket is not None
        if self._world_size > 1:
            forget(_name(self._number))
        finish(self._ticket, self._world_size, self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any directory or address may become a run."""
        return True


def _name(number: int) -> str:
    return f"dcp/ticket/{number}"


def _numbered(state: Any) -> Any:
    """DCP's keys are texts; those of an optimizer's state are numbers again, where they were."""
    if isinstance(state, list):
        return [_numbered(item) for item in state]
    if not isinstance(state, dict):
        return state
    found = {key: _numbered(item) for key, item in state.items()}
    inner = found.get("state")
    if "param_groups" in found and isinstance(inner, dict) and all(str(key).isdecimal() for key in inner):
        found["state"] = {int(key): item for key, item in inner.items()}
    return found
