"""What this process does when another one of its run tells it something.

Owns:    which stage each message from another rank, or news of an agent, goes to.
Holds:   called on the threads that bring messages; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.ranks.member import Costs, Together
from stepwell.storage.store.progress import ProgressFile
from stepwell.training.loop.iteration import Iteration
from stepwell.training.loop.outcomes import Outcomes
from stepwell.training.loop.preemption import Leave
from stepwell.training.loop.save import Saving
from stepwell.training.loop.schedule import Schedule
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.state.capture import Capture
from stepwell.training.state.flatten import Leaf
from stepwell.training.state.roles import Role


@dataclass(frozen=True)
class RankReactions:
    """To the other ranks (`member.ThisRank`)."""

    capture: Capture
    pace: Schedule
    leave: Leave
    outcomes: Outcomes
    saving: Saving
    iteration: Iteration

    def find_roles(self, leaves: Sequence[Leaf]) -> list[Role]:
        """How each leaf may be copied, and what it is."""
        return self.capture.find_roles(leaves)

    def policies(self) -> list[Any]:
        """What this rank was told to count by."""
        return self.pace.policies()

    def follow_policies(self, policies: list[Any]) -> None:
        """Count by rank 0's."""
        self.pace.follow(policies)

    def is_within_step(self) -> bool:
        """A step has begun, and its end is still to come."""
        return self.iteration.is_within_step

    def on_late(self, step: int) -> None:
        """A plan came after its step was over."""
        self.saving.on_late(step)

    def on_alone(self, step: int, repeat: int, by: int, missing: int) -> None:
        """Rank 0: not all ranks call `save()` after this step."""
        self.saving.on_alone(step, repeat, by, missing)

    def on_ended(self, step: int, repeat: int, missing: int) -> None:
        """Rank 0 ended a save that not all ranks asked for."""
        self.saving.on_ended(step, repeat, missing)

    def on_costs(self, rank: int, costs: Costs) -> None:
        """What checkpoints cost another rank."""
        self.pace.note_others(rank, costs)

    def on_leave(self) -> None:
        """Another rank has to leave."""
        self.leave.take("another rank")

    def on_rank_lost(self, rank: int) -> None:
        """It is gone."""
        self.outcomes.on_rank_lost(rank)

    def on_no_agent(self, rank: int) -> None:
        """It has no agent any more."""
        self.outcomes.on_no_agent(rank)


@dataclass(frozen=True)
class AgentReactions:
    """To news of this process's agent, as other processes have to know them (`outcomes.Neighbours`)."""

    together: Together
    saving: Saving
    progress: ProgressFile

    def on_new_agent(self, pid: int) -> None:
        """Another agent serves this process now."""
        self.progress.update(self.saving.steps.step, agent_pid=pid)

    def on_unannounced(self, inflight: Inflight) -> None:
        """A snapshot is void, and no agent has heard of it."""
        self.saving.on_unannounced(inflight)

    def on_no_agent(self) -> None:
        """There is no agent any more, and none comes."""
        self.together.tell_no_agent()
