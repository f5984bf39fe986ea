"""What a lingering agent offers a successor: the newest complete snapshot, with checksums, and the arena it lies in."""

from __future__ import annotations

import os

from stepwell.agent.persist import record_in_memory
from stepwell.agent.queue import Pending
from stepwell.arena.channel import Message
from stepwell.arena.memory import FROZEN


def make_offer(newest: Pending | None) -> tuple[Message, list[int]]:
    """The message and the descriptors that travel with it. Hashes the snapshot if it was not written yet."""
    offer: Message = {"type": "offer", "agent": os.getpid(), "snapshots": []}
    if newest is None:
        return offer, []
    record = record_in_memory(newest).dump().decode()
    offer["snapshots"].append({"record": record, "slot": newest.slot, "frozen": FROZEN})
    offer["arena"] = vars(newest.arena.shape)
    return offer, [newest.arena.fd]
