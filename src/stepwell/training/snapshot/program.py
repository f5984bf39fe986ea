"""What one snapshot has to copy, and by whom: worked out once for leaves that stay, each time for the rest.

Owns:    the split of leaves into: copied at the trigger, by host threads, by a device; watched; sampled.
Not:     the copying (host, device).
Holds:   every leaf of the live image is in exactly one list; frozen leaves have lists of their own, used once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from stepwell.training.snapshot.guard import Samples
from stepwell.training.snapshot.layout import Plan
from stepwell.training.state.flatten import Leaf
from stepwell.training.state.roles import Role

TINY_BYTES = 1024
"""A managed leaf on the CPU this small (Adam's step counters) costs more to line up than to copy."""
_GATHERED_BYTES = 4096
"""A leaf on a device this small is gathered with others first: a graph takes 0.1 ms to launch a copy of 4 bytes."""


@dataclass(frozen=True)
class CopySource:
    """One leaf to be copied: the live tensor, and where its image begins. `is_late`: while training runs."""

    name: str
    tensor: torch.Tensor
    start: int
    nbytes: int
    is_late: bool
    is_checked: bool

    @property
    def is_direct(self) -> bool:
        """Whether its bytes can be copied from where they lie, late, and in a piece worth it."""
        return self.is_late and self.nbytes > _GATHERED_BYTES and self.tensor.is_contiguous()


@dataclass
class Program:
    """The lists of one snapshot, or of the part of it that stays the same."""

    now: list[CopySource] = field(default_factory=list)
    host: list[CopySource] = field(default_factory=list)
    device: dict[torch.device, list[CopySource]] = field(default_factory=dict)
    frozen_host: list[CopySource] = field(default_factory=list)
    frozen_device: dict[torch.device, list[CopySource]] = field(default_factory=dict)
    watched: list[str] = field(default_factory=list)
    live: list[Callable[[], torch.Tensor | None]] = field(default_factory=list)
    samples: Samples = field(default_factory=lambda: Samples([]))


def make_program(leaves: Sequence[Leaf], roles: Sequence[Role], plan: Plan) -> Program:
    """Sort leaves into the lists."""
    program, frozen = Program(), []
    for leaf, role in zip(leaves, roles, strict=True):
        place, device, is_late = plan.places[leaf.name], leaf.tensor.device, role.protection != "loose"
        source = CopySource(leaf.name, leaf.tensor, place.start, place.nbytes, is_late, leaf.name in plan.checked)
        if is_late:
            program.watched.append(leaf.name)
            program.live.append(role.live)
        if place.is_frozen:
            frozen.append((leaf.name, leaf.local))  # as `arrange` looks at it
        if not place.nbytes:
            continue
        if place.is_frozen and device.type == "cpu":
            program.frozen_host.append(source)
        elif place.is_frozen:
            program.frozen_device.setdefault(device, []).append(source)
        elif device.type != "cpu":
            program.device.setdefault(device, []).append(source)
        elif is_late and place.nbytes > TINY_BYTES:
            program.host.append(source)
        else:
            program.now.append(source)
    program.samples = Samples(frozen)
    return program
