"""What a lingering agent offers a successor: the newest complete snapshot, with checksums, and the arena it lies in."""

from __future__ import annotations

import os
from typing import Final

from stepwell.agent.persist import record_in_memory
from stepwell.agent.queue import Pending
from stepwell.arena.channel import Message
from stepwell.arena.memory import FROZEN

PROTOCOL: Final = 1


def why_refused(message: Message, *, trainer: int, is_closing: bool) -> str | None:
    """Why somebody who asks for the memory does not get it; None if he does."""
    if message.get("protocol") != PROTOCOL:
        return "another version of stepwell"
    if trainer:
        return f"its trainer, process {trainer}, is alive"
    return "closing" if is_closing else None


def make_offer(newest: Pending | None) -> tuple[Message, list[int]]:
    """The message and the descriptors that travel with it. Hashes the snapshot if it was not written yet."""
    offer: Message = {"type": "offer", "agent": os.getpid(), "snapshots": []}
    if newest is None:
        return offer, []
    record = record_in_memory(newest).dump().decode()
    offer["snapshots"].append({"record": record, "slot": newest.slot, "frozen": FROZEN})
    offer["arena"] = vars(newest.arena.shape)
    return offer, [newest.arena.fd]
