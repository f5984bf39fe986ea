"""What a scheme comes to on the nodes that are there, in a sentence where it is not what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.events.level_events import ProtectionDiffers
from stepwell.levels.first_level import bytes_besides
from stepwell.levels.level_spec import Protection, ReedSolomon, Single, Xor
from stepwell.levels.protect import sets


def compare(asked: Protection | None, domains: Sequence[str]) -> ProtectionDiffers | None:
    """None: it is as asked for, or nothing was asked for."""
    count = len(set(domains))
    if asked is None or isinstance(asked, Single):
        return None
    if count < 2:
        why = "all ranks are on one node, or on nodes that fail together: nothing is held elsewhere, as with Single()"
        return ProtectionDiffers(asked=str(asked), found=why, is_less=True)
    if not isinstance(asked, Xor | ReedSolomon):
        return None
    made, _ = sets.make_sets(domains, asked.n)
    size = min(map(len, made))
    if size >= asked.n:
        return None
    losses = asked.m if isinstance(asked, ReedSolomon) else 1
    left = sets.losses_allowed(size, losses)
    besides = bytes_besides(ReedSolomon(size, left))
    why = f"with {count} nodes there are sets of {size}: {left} of each may be lost, for {besides:.0%} more bytes"
    return ProtectionDiffers(asked=str(asked), found=why, is_less=left < losses)
