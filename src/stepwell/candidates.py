"""What a start could go on from, in the order it is tried, and where each of these can be read.

Owns:    the list over disk, memory, caches and chains, and what the user prefers of it.
Not:     trying them (reopen), judging what is on disk (restore.plan).
Holds:   rank 0 makes the list for all. What is lossy comes before something exact only if that is asked for, or much
         work would be lost; after everything exact it is there in any case.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepwell import events, journal
from stepwell.caches import Caches
from stepwell.chains import Chain, bring_back, find_chains, when
from stepwell.codecs.events import ChainLeft
from stepwell.errors import ConfigError, DamagedError, RestoreError, listing
from stepwell.holdings import Holdings
from stepwell.restore.plan import Choice, choose
from stepwell.restore.whole import Part, parts_on_disk
from stepwell.store import catalog
from stepwell.store.lineage import read_history
from stepwell.store.paths import RunPaths
from stepwell.types import CheckpointId

PREFERENCES = (None, "exact", "newest")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be restored. `is_committed`: what is not in memory or in the caches is on disk.

    `chain`: it is what a chain of records, up to number `until`, makes of this base, and lossy.
    """

    id: CheckpointId
    is_suspect: bool
    is_live: bool
    is_committed: bool
    in_memory: bool = False
    in_caches: bool = False
    chain: str = ""
    until: int = 0

    def dump(self) -> list[Any]:
        """As it travels."""
        return [self.id.directory, *list(vars(self).values())[1:]]

    @classmethod
    def load(cls, values: Sequence[Any]) -> Candidate:
        id = CheckpointId.parse(values[0])
        assert id is not None
        return cls(id, *values[1:])


@dataclass(frozen=True)
class Wish:
    """What is asked for: this step, or the newest below one; and whether it may be lossy.

    worth: seconds of work that make a lossy one preferable, where nothing is said; None: never
    """

    step: int | None = None
    before: int | None = None
    prefer: str | None = None
    worth: float | None = None

    def __post_init__(self) -> None:
        if self.prefer not in PREFERENCES:
            raise ConfigError(f"prefer={self.prefer!r}: give 'exact' or 'newest'", name="prefer")


def plan(
    paths: RunPaths,
    everywhere: Sequence[dict[str, Any]],
    caches: Caches | None,
    log: journal.EventLog,
    wish: Wish,
    *,
    any_branch: bool = False,
) -> list[list[Any]]:
    """Rank 0: candidates in the order they are tried. Raises RestoreError if there are checkpoints but none to try."""
    choices = choose(catalog.scan(paths), step=wish.step, before=wish.before, any_branch=any_branch)
    found: dict[CheckpointId, Candidate] = {}
    for choice in choices:
        entry = choice.entry
        if entry.damage is not None:
            log.emit(events.Damage(directory=entry.id.directory, reason=entry.damage))
        if choice.rank is not None and entry.manifest is not None:
            found[entry.id] = Candidate(entry.id, entry.manifest.suspect is not None, entry.is_live, True)
    history = read_history(paths)

    def is_wanted(id: CheckpointId) -> bool:
        is_asked = (wish.step is None or id.step == wish.step) and (wish.before is None or id.step < wish.before)
        return is_asked and history.is_live(id)

    for id, is_suspect in ({} if caches is None else caches.whole(history)).items():
        if is_wanted(id):
            found[id] = Candidate(id, is_suspect, True, id in found, in_caches=True)
    for directory in {name for held in everywhere for name in held}:
        named = CheckpointId.parse(directory)
        if named is None or not is_wanted(named):
            continue
        facts = [held.get(directory) for held in everywhere]
        is_whole = all(fact is not None and fact["ranks"] == list(range(fact["of"])) for fact in facts)
        if is_whole:
            is_suspect = any(fact is not None and fact["suspect"] for fact in facts)
            known = found.get(named, Candidate(named, is_suspect, True, False))
            found[named] = replace(known, is_suspect=is_suspect, in_memory=True)
    exact = sorted(found.values(), key=_preference)
    lossy = [_of_chain(chain, is_wanted) for chain in find_chains(paths)]
    merged = _merge(exact, [item for item in lossy if item is not None], wish, paths, log)
    if not merged:
        _check_nothing(paths, choices, log)
    return [candidate.dump() for candidate in merged]


def _preference(candidate: Candidate) -> tuple[bool, bool, int, int, int]:
    """As `choose` ranks them: not suspect, live, newest."""
    id = candidate.id
    return candidate.is_suspect, not candidate.is_live, -id.step, -id.lineage, -id.repeat


def _of_chain(chain: Chain, is_wanted: Callable[[CheckpointId], bool]) -> tuple[Candidate, float] | None:
    """The newest state of a chain that is wanted, and when it was."""
    for item in reversed(chain.records):
        id = CheckpointId(item.step, 0, chain.base.lineage)
        if is_wanted(id):
            with contextlib.suppress(DamagedError):
                return Candidate(id, False, True, False, chain=chain.base.directory, until=item.number), when(item)
    return None


def _merge(
    exact: list[Candidate], lossy: list[tuple[Candidate, float]], wish: Wish, paths: RunPaths, log: journal.EventLog
) -> list[Candidate]:
    """What is lossy before or behind what is exact."""
    best = next((item for item in exact if not item.is_suspect), None)
    newer = sorted((item for item in lossy if best is None or item[0].id.step > best.id.step), key=_newest)
    rest = [item for item, _ in sorted(lossy, key=_newest) if item not in [other for other, _ in newer]]
    if best is None or not newer:
        return exact + [item for item, _ in newer] + rest
    ahead = [item for item, _ in newer]
    if wish.prefer == "newest" or (wish.prefer is None and _is_worth_it(best, newer[0], wish.worth, paths)):
        return ahead + exact + rest
    log.emit(ChainLeft(step=ahead[0].id.step, restored=best.id.step))
    return exact + ahead + rest


def _newest(item: tuple[Candidate, float]) -> tuple[int, int]:
    return -item[0].id.step, -item[0].id.lineage


def _is_worth_it(best: Candidate, newer: tuple[Candidate, float], worth: float | None, paths: RunPaths) -> bool:
    """Whether going on from what is exact would lose too much. What is in memory is the newest there can be."""
    if worth is None or best.in_memory or not best.is_committed:
        return False
    return newer[1] - catalog.read_manifest(paths, best.id).created > worth


def inventory(holdings: Holdings) -> dict[str, Any]:
    """What this rank can read from memory: of each snapshot whose parts, and whether it is suspect."""
    found = {}
    for id, parts in holdings.held.items():
        records = [part.record for part in parts.values()]
        found[id.directory] = {
            "ranks": sorted(parts),
            "of": records[0].owner.world_size,
            "suspect": any(record.suspect is not None for record in records),
        }
    return found


def _check_nothing(paths: RunPaths, choices: Sequence[Choice], log: journal.EventLog) -> None:
    """No candidate at all: fine for a directory without checkpoints, an error where there are some."""
    found = [f"{choice.entry.id}: {choice.reason}" for choice in choices if choice.entry.is_committed]
    if found:
        raise RestoreError(
            f"no checkpoint in {paths.root} can be restored:\n{listing(found)}\n"
            "`stepwell why` shows the details; restore(step=...) takes a named one; another directory starts anew",
            path=str(paths.root),
        )
    log.emit(events.Fresh(where=str(paths.root)))


@dataclass(frozen=True)
class Places:
    """Where the parts of a checkpoint can be read from."""

    paths: RunPaths
    holdings: Holdings
    caches: Caches | None
    log: journal.EventLog

    def of(self, candidate: Candidate) -> list[tuple[str, Callable[[], list[Part]]]]:
        """What they are called, and how their parts are had, the nearest first. These raise DamagedError."""
        id, caches, held = candidate.id, self.caches, self.holdings.held
        if candidate.chain:
            return [("chain", lambda: [self._bring_back(candidate)])]
        out: list[tuple[str, Callable[[], list[Part]]]] = []
        if candidate.in_memory:
            out.append(("memory", lambda: [held[id][rank] for rank in sorted(held[id])]))
        if candidate.in_caches and caches is not None:
            out += [("node", functools.partial(caches.parts, id))] * caches.attempts(id)
        if candidate.is_committed:
            out.append(("disk", lambda: parts_on_disk(self.paths, catalog.read_manifest(self.paths, id))))
        return out

    def _bring_back(self, candidate: Candidate) -> Part:
        base = CheckpointId.parse(candidate.chain)
        assert base is not None
        return bring_back(self.paths, base, candidate.until, self.log)
