"""Agents of dead trainers: found by their address, and asked for what they hold.

Owns:    the questions `peek` and `adopt`, and how long an answer may take; where the agents of a run are, for who may
         know (the run's processes, and commands of the same user).
"""

from __future__ import annotations

import os
from typing import Final

from stepwell.errors import ConfigError
from stepwell.events import run_events
from stepwell.handover.agent_address import connect, find_agents, place
from stepwell.handover.channel import Channel, is_stopped
from stepwell.handover.message import MessageError, ToSuccessor, expect
from stepwell.handover.protocol import PROTOCOL, Adopt, NoOffer, Offer, Peek
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.run_secret import make_local, read_local

_CALL_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 60.0


def whereabouts(paths: RunPaths, run: str, *, to_look: bool = False) -> str:
    """Where the agents of this run are on this machine, for `peek` and `adopt`; empty if there can be none.

    Raises OSError, ConfigError; less of these if it is only `to_look` who is alive.
    """
    key = read_local(paths, to_look=to_look)
    return "" if key is None else place(key, run, paths.identity)


def make_whereabouts(paths: RunPaths, run: str) -> str:
    """The same for a run that starts. Empty, with a warning: its agents will not be found."""
    try:
        found = whereabouts(paths, run)
        if not found:
            make_local(paths)
            found = whereabouts(paths, run)
        return found
    except (OSError, ConfigError) as error:
        run_events.logger.warning(
            "after a crash the next start continues from disk, not from memory, because this run has no secret "
            "that only its processes know: %s",
            error,
        )
        return ""


def peek(where: str, rank: int) -> tuple[Offer, list[int]] | None:
    """What another rank's agent on this machine holds, without becoming its trainer; None if there is nothing."""
    found = _ask(where, rank, Peek(PROTOCOL, os.getpid()))
    if found is None:
        return None
    found[0].close()
    return found[1], found[2]


def find_orphan(where: str, rank: int) -> tuple[Channel, Offer, list[int]] | None:
    """A lingering agent of this run whose trainer is dead, with what it offers; None if there is none."""
    return _ask(where, rank, Adopt(PROTOCOL, os.getpid()))


def _ask(where: str, rank: int, wish: Peek) -> tuple[Channel, Offer, list[int]] | None:
    for found in find_agents(where, rank):
        try:
            channel = connect(found, timeout=_CALL_SECONDS)
        except TimeoutError as error:
            run_events.logger.warning("Resuming from disk instead of memory: %s", error)
            continue
        if channel is None:
            continue
        if is_stopped(channel.socket):
            run_events.logger.warning(
                "Resuming from disk instead of memory: the agent (process %d) is stopped", found.pid
            )
            channel.close()
            continue
        channel.socket.settimeout(_ANSWER_SECONDS)
        answer, fds = _answer(channel, wish)
        if isinstance(answer, Offer):
            channel.socket.settimeout(None)
            return channel, answer, fds
        if answer is not None and answer.trainer:
            run_events.logger.warning("Resuming from disk instead of memory: %s", answer.reason)
        channel.close()
    return None


def _answer(channel: Channel, wish: Peek) -> tuple[Offer | NoOffer | None, list[int]]:
    """None: nothing that could be understood; the agent may be of another version."""
    try:
        channel.send(wish)
        received = channel.receive()
        answer = None if received is None else expect(received[0], ToSuccessor)
    except (OSError, MessageError):
        return None, []
    assert answer is None or isinstance(answer, (Offer, NoOffer))
    return answer, [] if received is None else received[1]
