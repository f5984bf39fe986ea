"""What a start could go on from, in the order it is tried, and where each of these can be read.

Owns:    the list over disk, memory, caches and chains, and what the user prefers of it.
Not:     trying them (search), judging what is on disk (preference).
Holds:   rank 0 makes the list for all. What is lossy comes before something exact only if that is asked for, or much
         work would be lost; after everything exact it is there in any case.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepwell.errors import DamagedError, RestoreError, listing
from stepwell.events import journal, run_events
from stepwell.events.chain_events import ChainLeft
from stepwell.restore.behind_nodes import check_nodes
from stepwell.restore.from_memory import Holdings
from stepwell.restore.from_nodes import Caches
from stepwell.restore.open_request import Wish
from stepwell.restore.preference import Ranked, choose_on_disk, sort_key
from stepwell.restore.whole import Part, parts_on_disk
from stepwell.storage.chain.chain_files import chain_path, list_chains
from stepwell.storage.store import catalog, files
from stepwell.storage.store.lineage import read_history
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be restored. `is_committed`: what is not in memory or in the caches is on disk.

    `chain`: it is what a chain of records, up to number `until`, makes of this base, and lossy; no use below `least`.
    """

    id: CheckpointId
    is_suspect: bool
    is_live: bool
    is_committed: bool
    in_memory: bool = False
    in_caches: bool = False
    chain: str = ""
    until: int = 0
    least: int = 0

    def dump(self) -> list[Any]:
        """As it travels."""
        return [self.id.directory, *list(vars(self).values())[1:]]

    @classmethod
    def load(cls, values: Sequence[Any]) -> Candidate:
        id = CheckpointId.parse(values[0])
        assert id is not None
        return cls(id, *values[1:])


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
    choices = choose_on_disk(paths, step=wish.step, before=wish.before, any_branch=any_branch)
    found: dict[CheckpointId, Candidate] = {}
    for choice in choices:
        entry = choice.entry
        if entry.damage is not None:
            log.emit(run_events.Damage(directory=entry.id.directory, reason=entry.damage))
        if choice.rank is not None and entry.manifest is not None:
            found[entry.id] = Candidate(entry.id, entry.is_suspect, entry.is_live, True)
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
    exact = sorted(found.values(), key=_sort_key)
    merged = _merge(exact, _find_lossy(paths, is_wanted), wish, paths, log)
    if wish.step is None and wish.before is None:
        check_nodes(paths, history, caches, max(found, default=None), log, is_only=any_branch)
    if not merged:
        _check_nothing(paths, choices, log, wish)
    return [candidate.dump() for candidate in merged]


def _sort_key(candidate: Candidate) -> tuple[Any, ...]:
    return sort_key(candidate.id, is_suspect=candidate.is_suspect, is_live=candidate.is_live)


def _find_lossy(
    paths: RunPaths, is_wanted: Callable[[CheckpointId], bool]
) -> list[tuple[Candidate, Callable[[], float]]]:
    """Of each chain the newest state that is wanted, and how to learn when it was. The newest first."""
    if not list_chains(paths):  # most runs have none, and need not load what reads them
        return []
    from stepwell.restore.from_chain import find_chains, when

    found = []
    for chain in find_chains(paths):
        for item in reversed(chain.records):
            id = CheckpointId(item.step, 0, chain.base.lineage)
            if is_wanted(id):
                lossy = Candidate(id, False, True, False, chain=chain.base.directory, until=item.number)
                found.append((lossy, functools.partial(when, item)))
                break
    return sorted(found, key=lambda item: _sort_key(item[0]))


def _merge(
    exact: list[Candidate],
    lossy: list[tuple[Candidate, Callable[[], float]]],
    wish: Wish,
    paths: RunPaths,
    log: journal.EventLog,
) -> list[Candidate]:
    """Each that is lossy comes right before the first exact one that it is preferred to, or last."""
    merged = list(exact)
    for candidate, created in lossy:
        place = next(
            (
                at
                for at, item in enumerate(merged)
                if not item.chain and _is_lossy_preferred(candidate, created, item, wish, paths)
            ),
            len(merged),
        )
        after = [item.id.step for item in merged[place:] if not item.chain and not item.is_suspect][:1]
        least = candidate.id.step if wish.step is not None else max(after, default=-1) + 1
        merged.insert(place, replace(candidate, least=least))
    if merged and not merged[0].chain:
        ahead = [item.id.step for item, _ in lossy if item.id.step > merged[0].id.step]
        if ahead:
            log.emit(ChainLeft(step=max(ahead), restored=merged[0].id.step))
    return merged


def _is_lossy_preferred(
    lossy: Candidate, created: Callable[[], float], exact: Candidate, wish: Wish, paths: RunPaths
) -> bool:
    """Whether going on from what is exact would lose too much. What is in memory is the newest there can be."""
    if wish.prefer == "exact" or (lossy.id.step <= exact.id.step and not exact.is_suspect):
        return False
    if exact.is_suspect:
        return True
    if wish.prefer == "newest":
        return True
    if wish.worth is None or exact.in_memory or not exact.is_committed:
        return False
    with contextlib.suppress(DamagedError):
        return created() - catalog.read_manifest(paths, exact.id).created > wish.worth
    return False


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


def _check_nothing(paths: RunPaths, choices: Sequence[Ranked], log: journal.EventLog, wish: Wish) -> None:
    """No candidate at all: fine for a directory without checkpoints if none is named, an error where there are some."""
    found = [f"{choice.entry.id}: {choice.reason}" for choice in choices if choice.entry.is_committed]
    if found:
        raise RestoreError(
            f"no checkpoint in {paths.root} can be restored:\n{listing(found)}\n"
            "`stepwell why` shows the details; restore(step=...) takes a named one; another directory starts anew",
            path=str(paths.root),
        )
    if wish.step is not None or wish.before is not None:
        asked = f"step {wish.step}" if wish.step is not None else f"one before step {wish.before}"
        raise RestoreError(
            f"{paths.root} has no checkpoint at all, and {asked} was asked for; restore() without it starts a new run",
            path=str(paths.root),
        )
    log.emit(run_events.Fresh(where=str(paths.root)))


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

    def is_gone(self, candidate: Candidate) -> bool:
        """Whether it was on disk when it was listed, and is no checkpoint any more."""
        base = CheckpointId.parse(candidate.chain) if candidate.chain else candidate.id
        assert base is not None
        needed = [self.paths.manifest(base), *([chain_path(self.paths, base)] if candidate.chain else [])]
        return candidate.is_committed and not all(map(files.exists, needed))

    def _bring_back(self, candidate: Candidate) -> Part:
        from stepwell.restore.from_chain import bring_back

        base = CheckpointId.parse(candidate.chain)
        assert base is not None
        return bring_back(self.paths, base, candidate.until, candidate.least, self.log)
