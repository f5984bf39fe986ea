"""What a lingering agent offers a successor: the newest complete snapshot, with checksums, and the arena it lies in.

With many ranks also older ones in that arena: another rank may have been killed before it had the newest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from stepwell.agent.pending import Pending
from stepwell.agent.target.shared_target import record_in_memory
from stepwell.events import run_events
from stepwell.handover.memory import FROZEN
from stepwell.handover.protocol import PROTOCOL, Offer, Peek
from stepwell.types import OfferedArena, OfferedSnapshot

_hashing: Final = threading.Lock()
"""Many ranks ask at once: the first one waits for the checksums, the others find them."""


def why_refused(wish: Peek, *, trainer: int, is_closing: bool) -> str | None:
    """Why somebody who asks for the memory does not get it; None if he does."""
    if wish.protocol != PROTOCOL:
        return "the agent is of another version of stepwell"
    if trainer:
        return f"another Checkpointer (process {trainer}) still uses this run"
    return "closing" if is_closing else None


def offer_later(
    complete: Sequence[Pending], then: Callable[[Offer, list[int]], None], wait: Callable[[], None]
) -> None:
    """Make the offer in a thread: to hash a snapshot that is not written yet takes a while. `wait` comes first."""

    def prepare() -> None:
        wait()
        try:
            made = make_offer(complete)
        except Exception:  # the successor waits for an answer, whatever is wrong with the snapshot
            run_events.logger.exception("it offers no snapshot")
            made = make_offer([])
        then(*made)

    threading.Thread(target=prepare, daemon=True, name="stepwell-offer").start()


def make_offer(complete: Sequence[Pending]) -> tuple[Offer, list[int]]:
    """The message and the descriptors that travel with it. Hashes what was not written yet. The newest comes first."""
    if not complete:
        return Offer(os.getpid()), []
    newest, snapshots = complete[0], []
    for item in complete[:1] if newest.owner.is_alone else complete:
        if item.arena is newest.arena:
            with _hashing:
                record = record_in_memory(item).dump().decode()
            snapshots.append(OfferedSnapshot(record, item.slot, FROZEN))
    shape = OfferedArena(**vars(newest.arena.shape))
    return Offer(os.getpid(), tuple(snapshots), shape), [newest.arena.fd]
