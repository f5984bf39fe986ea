"""What the processes of a run agree on: who is there, and the same values everywhere.

Owns:    rank, size and node of this process, the deadline of every call, the check that all ranks make the same call.
Not:     how bytes travel (local, distributed, mpi, horovod); messages that nobody waits for (line).
Holds:   every call ends, with an answer or with an error that names who is missing. After an error the group is over:
         later calls raise it again at once. Values are JSON, so nothing that arrives can run.
"""

from __future__ import annotations

import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from stepwell.errors import ConfigError, GroupError

_SECONDS: Final = "STEPWELL_GROUP_SECONDS"
_DEFAULT_SECONDS: Final = 600.0
_NODE: Final = "STEPWELL_NODE"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Absent(Exception):
    """Raised by a backend: these ranks did not answer within the time. `note` is what else it knows."""

    def __init__(self, ranks: list[int], seconds: float, note: str = "") -> None:
        super().__init__(ranks, seconds, note)
        self.ranks = ranks
        self.seconds = seconds
        self.note = note


class Group(ABC):
    """All processes of the run. Every call but `close` is collective and blocks; one thread at a time.

    node, nodes:             on which machine this process is, by first appearance in rank order, and of how many
    local_rank, local_size:  this process among those of its node, in rank order
    node_of:                 the number of each rank's machine
    hosts:                   the name of each rank's machine, for people; empty if there is one machine
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.node = 0
        self.nodes = 1
        self.local_rank = 0
        self.local_size = 1
        self.node_of = [0] * size
        self.hosts: list[str] = []
        self._error: GroupError | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def open(self, seconds: float | None = None) -> None:
        """Meet the others, and learn which ranks share a node."""
        names = self.all_gather(_node_name(), "opening the group", seconds)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.node_of = [numbers[name] for name in names]
        self.node, self.nodes = self.node_of[self.rank], len(numbers)
        self.local_rank, self.local_size = self.node_of[: self.rank].count(self.node), self.node_of.count(self.node)
        self.hosts = [name.partition(" ")[0] for name in names] if self.nodes > 1 else []

    def all_gather(self, value: Any, what: str, seconds: float | None = None) -> list[Any]:
        """Everybody's value, in rank order. `what` is for the error; all ranks must give the same.

        Equal values are one object: who wants to change one copies it first.
        """
        return self._meet("all_gather", value, what, seconds)

    def broadcast(self, value: Any, what: str, seconds: float | None = None, root: int = 0) -> Any:
        """The value of `root`; those of the others are not looked at. Waits for everybody, as all calls do."""
        values = self._meet(f"broadcast from rank {root}", value if self.rank == root else None, what, seconds)
        return values[root]

    def barrier(self, what: str, seconds: float | None = None) -> None:
        """Return when everybody has called."""
        self._meet("barrier", None, what, seconds)

    def rest(self) -> None:
        """Let go of connections; the next call makes them again. Not collective, does not wait."""
        return

    def close(self) -> None:
        """Leave; later calls raise. Does not wait for the others, but for a moment on rank 0. May be called twice."""
        if self._error is None:
            self._error = GroupError("the group is closed", missing=[], operation="close")
            self._leave()

    def _meet(self, kind: str, value: Any, what: str, seconds: float | None) -> list[Any]:
        if self._error is not None:
            # Not the same object twice: each raise would add to its traceback.
            raise GroupError(str(self._error), **self._error.fields) from self._error
        seconds = default_seconds() if seconds is None else seconds
        call = f"{kind} '{what}' of {self.size} ranks"
        message = b"\n".join(json.dumps(part, separators=(",", ":")).encode() for part in (call, value))
        # Stays if the wait is interrupted: this rank is then out of step with the others.
        self._error = GroupError(f"'{what}' was interrupted; restart all ranks", missing=[], operation=what)
        try:
            answers = self._hear(what, self._exchange(message, seconds))
        except Absent as absent:
            self._error = _absence(absent, what)
            raise self._error from absent
        except (ValueError, RecursionError) as error:
            self._error = GroupError(
                f"'{what}': the ranks' answers cannot be read ({error}); they run different versions of stepwell, or "
                "somebody else writes into their store; restart all ranks",
                missing=[],
                operation=what,
            )
            raise self._error from error
        self._error = None
        return answers

    def _hear(self, what: str, messages: list[bytes]) -> list[Any]:
        """The values in them. Raises GroupError if some are of another call, ValueError for nonsense."""
        different = dict.fromkeys(messages)  # most are equal, and then they are one object
        calls, values = zip(*(message.split(b"\n") for message in different), strict=True)
        if len(set(calls)) > 1:
            self._error = _mismatch([json.loads(message.split(b"\n")[0]) for message in messages], what)
            raise self._error
        # Each different value is read once, and all of them in one go: a thousand small ones are nothing then.
        answers = dict(zip(different, json.loads(b"[%s]" % b",".join(values)), strict=True))
        return [answers[message] for message in messages]

    @abstractmethod
    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        """Everybody's lines of JSON, by rank; raises `Absent`. The n-th call of one meets the n-th of all others."""

    def _leave(self) -> None:
        """Let go of what the backend holds, after the last exchange of a group that has had no error."""
        return


def default_seconds() -> float:
    """How long a call waits that does not say it: `STEPWELL_GROUP_SECONDS`, or ten minutes."""
    text = os.environ.get(_SECONDS, "")
    try:
        return float(text or _DEFAULT_SECONDS)
    except ValueError:
        raise ConfigError(f"{_SECONDS}={text}: give a number of seconds", found=text) from None


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 1 and 2`, `ranks 1, 2 and 5`."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _node_name() -> str:
    """The machine, and its start: a host name alone may be the same on two of them."""
    given = os.environ.get(_NODE)
    return given or f"{socket.gethostname()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"


def _absence(absent: Absent, what: str) -> GroupError:
    who = name_ranks(absent.ranks) if absent.ranks else "at least one rank"
    return GroupError(
        f"{who} did not take part in '{what}' within {absent.seconds:g} s{absent.note}; "
        "look at what it printed last, then restart all ranks",
        missing=absent.ranks,
        operation=what,
    )


def _mismatch(calls: list[str], what: str) -> GroupError:
    where = [
        f"{name_ranks(rank for rank, other in enumerate(calls) if other == call)} in {call}"
        for call in dict.fromkeys(calls)
    ]
    return GroupError(
        f"the ranks are in different operations: {'; '.join(where)}; all of them must make the same calls in one order",
        missing=[],
        operation=what,
    )
