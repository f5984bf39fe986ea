"""Roles, layout and program of a state: found once, and used again while the state looks the same.

Owns:    which leaves count as frozen, and when a layout has to be made anew.
Holds:   what is used again was found for the very same tensors in the very same places (`Flat.fixed`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from stepwell.storage.format.record import LeafEntry
from stepwell.training.snapshot.device_copy import DeviceProgram
from stepwell.training.snapshot.guard import Fingerprints, Samples
from stepwell.training.snapshot.layout import Plan, absent, make_plan, signature
from stepwell.training.snapshot.program import CopySource, Program, make_program
from stepwell.training.state.capture import leaves_after
from stepwell.training.state.fingerprint import facts
from stepwell.training.state.flatten import Flat, Leaf
from stepwell.training.state.roles import Owners, Role, assign_roles
from stepwell.training.state.tracked import Tracked


class _Everything(Container[str]):
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


@dataclass
class Arrangement:
    """How a state is copied. The programs of the device are made at their first use."""

    plan: Plan
    fixed: Program
    rest: Program
    devices: dict[torch.device, DeviceProgram] = field(default_factory=dict)

    def device_bytes(self, device: torch.device) -> int:
        """How much of the live image comes from a device."""
        programs = (self.fixed, self.rest)
        return sum(source.nbytes for program in programs for source in program.device.get(device, []))

    def late(self) -> list[CopySource]:
        """Leaves of the live image that are copied while training runs."""
        programs = (self.fixed, self.rest)
        on_device = [source for program in programs for sources in program.device.values() for source in sources]
        return [source for source in on_device if source.is_late] + [s for program in programs for s in program.host]

    def kept_devices(self) -> Iterator[tuple[torch.device, DeviceProgram]]:
        """Programs of the leaves that stay."""
        for device, sources in self.fixed.device.items():
            if device not in self.devices:
                self.devices[device] = DeviceProgram(sources, is_kept=True)
            yield device, self.devices[device]

    def on_devices(self, *, with_frozen: bool) -> Iterator[tuple[torch.device, DeviceProgram, bool]]:
        """Device, program, and whether it fills the live image (or the frozen one)."""
        for device, program in self.kept_devices():
            yield device, program, True
        for device, sources in self.rest.device.items():
            yield device, DeviceProgram(sources), True
        for part in (self.fixed, self.rest) if with_frozen else ():
            for device, sources in part.frozen_device.items():
                yield device, DeviceProgram(sources), False


@dataclass
class _Kept:
    """What was found for the leaves that stay."""

    fixed: object
    owners: Owners
    roles: list[Role]
    program: Program
    devices: dict[torch.device, DeviceProgram]
    frozen_facts: list[tuple[str, torch.Tensor]]
    elsewhere: tuple[tuple[LeafEntry, ...], tuple[int, ...] | None]
    """Of the leaves that do not stay."""


class Arranger:
    """Finds the arrangement for each snapshot.

    number:      gives the next number of a plan
    is_partial:  of what goes into a slot beside leaves that are coded
    """

    def __init__(self, tracked: Sequence[Tracked], number: Callable[[], int], *, is_partial: bool = False) -> None:
        self._tracked, self._is_partial = tracked, is_partial
        self._number = number
        self.fingerprints = Fingerprints()
        self.not_frozen: set[str] = set()
        self.is_streaming = False
        self._frozen_facts: dict[str, tuple[int, int]] = {}
        self._kept: _Kept | None = None
        self._plan: Plan | None = None

    @property
    def is_unused(self) -> bool:
        """No arrangement was made yet."""
        return self._plan is None

    def observe(self, flat: Flat) -> None:
        """Before the first step: sample what may be frozen, to see whether the step changes it."""
        self.fingerprints.settle(Samples(_frozen(flat.leaves, self._roles(flat.leaves))).take())

    def trust_frozen(self, flat: Flat, known: set[str]) -> None:
        """After a restore: only leaves that were frozen in the restored checkpoint count as frozen."""
        self.not_frozen = {leaf.name for leaf in flat.leaves} - known

    def distrust(self, names: Sequence[str]) -> None:
        """These changed: they are frozen no more."""
        if names:
            self.not_frozen.update(names)
            self._forget()

    def note_frozen(self, flat: Flat) -> None:
        """The frozen leaves are being copied as they are now."""
        roles = self._roles(flat.leaves)
        self._frozen_facts = {name: facts(tensor) for name, tensor in _frozen(flat.leaves, roles)}

    def _roles(self, leaves: Sequence[Leaf], owners: Owners | None = None) -> list[Role]:
        found = owners if owners is not None else Owners(self._tracked)
        return assign_roles(leaves, found, _Everything() if self.is_streaming else self.not_frozen)

    def arrange(self, flat: Flat) -> Arrangement:
        """For the state as it is now."""
        kept = self._kept
        if kept is None or flat.fixed is None or kept.fixed is not flat.fixed or self._moved(kept.frozen_facts):
            return self._anew(flat)
        rest = leaves_after(flat)
        roles = self._roles(rest, kept.owners)
        assert self._plan is not None
        elsewhere = absent(flat.elsewhere), flat.partners
        if signature(rest, roles) != self._plan.signature[len(kept.roles) :] or elsewhere != kept.elsewhere:
            return self._anew(flat)
        return Arrangement(self._plan, kept.program, make_program(rest, roles, self._plan), kept.devices)

    def _anew(self, flat: Flat) -> Arrangement:
        self._forget()
        roles = self._roles(flat.leaves)
        moved = self._moved(_frozen(flat.leaves, roles))
        if self._plan is None:
            moved = moved + self.fingerprints.settle(Samples(_frozen(flat.leaves, roles)).take())
        if moved:
            self.not_frozen.update(moved)
            roles = self._roles(flat.leaves)
        rest_elsewhere = absent(flat.elsewhere)
        elsewhere, partners = absent(flat.fixed_elsewhere) + rest_elsewhere, flat.partners
        before = None if self._plan is None else (self._plan.signature, self._plan.elsewhere, self._plan.partners)
        now = signature(flat.leaves, roles)
        if self._plan is None or before != (now, elsewhere, partners):
            number, is_partial = self._number(), self._is_partial
            self._plan = make_plan(
                number, flat.leaves, roles, is_partial=is_partial, elsewhere=elsewhere, partners=partners, known=now
            )
        count = flat.fixed_count if flat.fixed is not None else 0
        fixed = make_program(flat.leaves[:count], roles[:count], self._plan)
        rest = make_program(flat.leaves[count:], roles[count:], self._plan)
        if flat.fixed is not None:
            frozen = _frozen(flat.leaves[:count], roles[:count])
            owners = Owners(self._tracked)
            self._kept = _Kept(flat.fixed, owners, roles[:count], fixed, {}, frozen, (rest_elsewhere, partners))
            return Arrangement(self._plan, fixed, rest, self._kept.devices)
        return Arrangement(self._plan, fixed, rest)

    def _moved(self, frozen: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
        """Frozen leaves whose version or address is not that of their copy."""
        return [
            name for name, tensor in frozen if name in self._frozen_facts and self._frozen_facts[name] != facts(tensor)
        ]

    def let_go(self) -> None:
        """Forget the copies that were prepared for an arena: its memory goes. None may be under way."""
        for program in self._kept.devices.values() if self._kept is not None else ():
            program.close()

    def _forget(self) -> None:
        self.let_go()
        self._kept = None


def _frozen(leaves: Sequence[Leaf], roles: Sequence[Role]) -> list[tuple[str, torch.Tensor]]:
    """What is looked at is all that this process holds, so that it does not depend on what of it this rank stores."""
    pairs = zip(leaves, roles, strict=True)
    return [(leaf.name, leaf.local) for leaf, role in pairs if role.protection == "frozen"]
