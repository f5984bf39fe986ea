"""Which checkpoint a restart uses, and why not the others.

Owns:    the one order of candidates (`sort_key`), and the verdict on each checkpoint in the run's directory.
Holds:   only live, committed checkpoints are candidates, unless the user names a step; one that is not suspect comes
         before any that is; newest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stepwell.storage.store import catalog
from stepwell.storage.store.catalog import Entry
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId


@dataclass(frozen=True)
class Ranked:
    """One checkpoint and what a restart would do with it. `rank` is 0 for the first choice, None for never."""

    entry: Entry
    rank: int | None
    reason: str


NOT_COMMITTED: Final = "not committed: it is being written, or its process ended before the manifest was written"
"""Which of these it is the files do not tell."""


def sort_key(id: CheckpointId, *, is_suspect: bool = False, is_live: bool = True) -> tuple[bool, bool, int, int, int]:
    """The order in which checkpoints are tried, wherever they lie: not suspect, live, newest first."""
    return is_suspect, not is_live, -id.step, -id.lineage, -id.repeat


def choose_on_disk(
    paths: RunPaths, *, step: int | None = None, before: int | None = None, any_branch: bool = False
) -> list[Ranked]:
    """`choose` for the run's directory or bucket."""
    return choose(catalog.scan_again(paths), step=step, before=before, any_branch=any_branch)


def choose(
    entries: Sequence[Entry], *, step: int | None = None, before: int | None = None, any_branch: bool = False
) -> list[Ranked]:
    """All entries with their verdict, candidates first in the order they would be tried.

    any_branch:  abandoned checkpoints are candidates too, after all live ones
    """
    refusals = {entry.id: _why_not(entry, step, before, any_branch) for entry in entries}
    usable = [entry for entry in entries if refusals[entry.id] is None]
    usable.sort(key=lambda entry: sort_key(entry.id, is_suspect=entry.is_suspect, is_live=entry.is_live))
    chosen = [Ranked(entry, rank, _why(entry, rank, usable)) for rank, entry in enumerate(usable)]
    rest = [
        Ranked(entry, None, refusal)
        for entry in sorted(entries, key=lambda entry: sort_key(entry.id))
        if (refusal := refusals[entry.id]) is not None
    ]
    return chosen + rest


def _why_not(entry: Entry, step: int | None, before: int | None, any_branch: bool) -> str | None:
    if entry.void is not None:
        return f"void, so never committed: {entry.void}"
    if not entry.is_committed:
        return NOT_COMMITTED
    if entry.damage is not None:
        return f"damaged: {entry.damage}"
    if step is not None:
        return None if entry.id.step == step else f"step {step} was asked for"
    if before is not None and entry.id.step >= before:
        return f"not before step {before}"
    if not entry.is_live and not any_branch:
        return entry.why_not_live or "abandoned branch: the run was continued from an earlier step"
    return None


def _why(entry: Entry, rank: int, usable: Sequence[Entry]) -> str:
    suspect = f" (suspect: {entry.manifest.suspect})" if entry.manifest is not None and entry.manifest.suspect else ""
    if rank == 0:
        newer = [e for e in usable if e.id > entry.id and e.is_live]
        passed = f", newer ones are suspect: {len(newer)}" if newer and not suspect else ""
        return f"newest good checkpoint{passed}{suspect}"
    return f"next choice if the {rank} before it {'is' if rank == 1 else 'are'} damaged{suspect}"
