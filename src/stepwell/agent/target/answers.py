"""What this rank says about checkpoints on the node level, when the agents of other ranks ask.

Owns:    the answers: what lies on this node's disk, and words that could not be written there.
Not:     what follows from them (keeper).
Holds:   an agent that died and came back says the same, but for words of a full disk. A part that rank 0 was told of
         is never taken back by this rank: rank 0 may have called the checkpoint whole.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Final

from stepwell.agent.target.rank0_decisions import Decisions
from stepwell.agent.target.redundancy import Redundancy
from stepwell.agent.target.spill import Spill, describe
from stepwell.errors import DamagedError
from stepwell.levels import cached
from stepwell.storage.format.record import Record
from stepwell.storage.store import assemble, commit, files
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Owner

_MOST_WORDS: Final = 64


class Answers:
    """Of one rank. Constructing only assigns; questions come on any thread."""

    def __init__(
        self, paths: RunPaths, owner: Owner, run: str, redundancy: Redundancy, decisions: Decisions, spill: Spill
    ) -> None:
        self._paths, self._owner, self._run, self._redundancy = paths, owner, run, redundancy
        self._decisions, self._spill = decisions, spill
        self.newest = ""
        """The newest checkpoint that is whole."""
        self._lock = threading.Lock()
        self._known: dict[CheckpointId, dict[str, Any]] = {}
        """What was said of this rank's records, which never change."""
        self._words: dict[CheckpointId, str] = {}
        self._told_leader: set[CheckpointId] = set()

    def answer(self, question: str, fields: dict[str, Any]) -> dict[str, Any]:
        """What lies on this node of one checkpoint, as far as this rank is concerned."""
        id = CheckpointId.parse(str(fields.get("id")))
        if id is None or question not in ("state", "shards"):
            raise ValueError(f"no such question: {question}")
        if question == "shards":
            return cached.describe(self._paths, id, self._run)
        with self._lock:
            state = self.state(id)
            if fields.get("by") == 0 and state["held"] is not None and state["void"] is None:
                self._told_leader.add(id)
        return state

    def say_void(self, id: CheckpointId, why: str) -> None:
        """This rank has no part in it."""
        self._words[id] = why

    def take_back(self, id: CheckpointId, why: str) -> bool:
        """Have no part in it any more. False: rank 0 knows that this rank holds one."""
        with self._lock:
            if id in self._told_leader:
                return False
            self._words[id] = why
            return True

    def state(self, id: CheckpointId) -> dict[str, Any]:
        """What this rank can say about a checkpoint."""
        directory, names = self._paths.checkpoint(id), self._names(id)
        mine = commit.record_name(self._owner)
        held = self._spill.held.get(id)
        if mine in names:
            held = self._known.get(id) or _read(directory / mine)
            self._known[id] = held
        void, word = f"{self._owner.stem}.void", self._words.get(id)
        ended = assemble.say(self._paths.void(id)) if "void.json" in names else None
        manifest, level = self._decisions.dump(id) or (None, None)
        return {
            "held": held,
            "is_ready": self._redundancy.is_held(id),
            "failed": self._redundancy.why_failed(id),
            "unprotected": self._redundancy.duties.why_not,
            "void": assemble.say(directory / void) if void in names else word,
            "ended": ended or (word if self._owner.is_leader else None),
            "manifest": manifest,
            "level": level,
            "newest": self.newest,
        }

    def _names(self, id: CheckpointId) -> set[str]:
        try:
            return set(files.list_names(self._paths.checkpoint(id)))
        except (OSError, DamagedError):  # the disk is gone, and what this rank has lies elsewhere
            return set()

    def keep_only(self, ids: Collection[CheckpointId]) -> None:
        """What is not there any more needs no memory; a word does for a while, or what came to nothing and is gone
        would be taken for one that made room.
        """
        with self._lock:
            self._known = {id: held for id, held in self._known.items() if id in ids}
            self._words = dict(sorted(self._words.items())[-_MOST_WORDS:])
            self._told_leader &= set(ids)


def _read(path: Location) -> dict[str, Any]:
    data = files.get(path)
    record = Record.load(data, path=str(path))
    return describe(record, data)
