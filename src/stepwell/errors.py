"""Every error stepwell raises, as one tree.

    StepwellError
    |-- ConfigError       the call or its options do not fit together
    |-- StateError        a value cannot be saved, or does not fit the live object
    |-- DamagedError      bytes on disk or in memory are not what was written
    |-- RestoreError      no checkpoint could be brought back
    |-- PersistError      a snapshot did not become durable
    |-- AgentError        the agent process could not be started or reached
    |-- DataError         the data source cannot be resumed
    |-- RoomError         the device has no memory for a copy of the state
    |-- VoidError         a checkpoint of many ranks came to nothing, because one of them could not take part
    |-- StorageError      a bucket or file system cannot be reached, or refuses (an OSError too)
    |   `-- PeerError     another node cannot be reached, or refuses
    |-- GroupError        a rank did not answer in time, or the processes do not form a group
    `-- FencedError       a newer lineage owns the run; this process may not commit

Each error carries its facts as fields (`path`, `step`, `expected`, `found`, ...) next to the sentence,
and the sentence ends with what to do. `DamagedError` is the only one that restore answers by
trying the next older checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.escape import shown, without_secrets


class StepwellError(Exception):
    """Base of all errors raised by stepwell; `fields` holds the facts behind the sentence.

    The sentence may quote a file that anybody wrote, or an address: it is made fit to be shown.
    """

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(shown(message))
        facts = {key: without_secrets(value) if isinstance(value, str) else value for key, value in fields.items()}
        self.fields = {key: value for key, value in facts.items() if value is not None}


class ConfigError(StepwellError):
    """The call, or a combination of options, cannot work."""


class StateError(StepwellError):
    """A value in the state cannot be represented, or a checkpoint does not fit the live objects."""


class DamagedError(StepwellError):
    """A file, or a slot in memory, does not hold what its record says.

    `path` names the file; `expected` and `found` tell what differs.
    """


class RestoreError(StepwellError):
    """There are checkpoints, but none of them could be restored."""


class PersistError(StepwellError):
    """A snapshot did not become a committed checkpoint."""


class AgentError(StepwellError):
    """The agent process could not be started, or stopped answering."""


class DataError(StepwellError):
    """The data source cannot be brought back to a position."""


class RoomError(StepwellError):
    """The device has no memory for a copy of the state; what needs it can be done on the host."""


class VoidError(StepwellError):
    """A rank could not take its part in a checkpoint: it is void for all of them, and older ones stay in force."""


class StorageError(StepwellError, OSError):
    """A bucket or a file system cannot be reached, or refuses what was asked. Says nothing about what lies in it."""


class PeerError(StorageError):
    """Another node cannot be reached, or refuses what was asked. Says nothing about the checkpoints it keeps.

    `peer` is its address, `path` the file that was asked for, `kind` why it refused (`missing`, `range`, ...).
    """


class GroupError(StepwellError):
    """A rank did not answer in time, or the processes do not form a group.

    `missing` lists the ranks that were waited for, `operation` says what for.
    """


class FencedError(StepwellError):
    """Another process continued this run: this lineage may not commit any more."""


def listing(items: Sequence[str], *, limit: int = 12) -> str:
    """Join names for a message, one per line, and say how many were left out."""
    shown = [f"  {item}" for item in items[:limit]]
    if len(items) > limit:
        shown.append(f"  ... and {len(items) - limit} more")
    return "\n".join(shown)
