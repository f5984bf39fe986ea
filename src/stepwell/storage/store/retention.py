"""Which checkpoints may go, and how one goes.

Owns:    the choice (a pure function) and the removal order.
Holds:   the newest two good live checkpoints are never removed, whatever `Keep` says; suspect and damaged ones do not
         count; a checkpoint loses its manifest first, so what remains after a crash is no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.faults import crash_point
from stepwell.storage.chain.chain_files import remove_chain
from stepwell.storage.store import files
from stepwell.storage.store.catalog import LOOKED_AT, Entry
from stepwell.storage.store.objects import Location
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.spare import Spare, is_left_over, put_away
from stepwell.types import CheckpointId, Keep

_SUSPECTS_KEPT = 1


def surplus(entries: Sequence[Entry], keep: Keep) -> list[tuple[Entry, str]]:
    """Committed checkpoints that may go, with the reason. `entries` as `scan` returns them: newest first."""
    good = [e for e in entries if e.is_live and e.manifest is not None and e.manifest.suspect is None]
    suspects = [e for e in entries if e.is_live and e.manifest is not None and e.manifest.suspect is not None]
    protected = {e.id for e in good[: max(2, keep.last)]}
    protected.update(e.id for e in suspects[:_SUSPECTS_KEPT])
    out = []
    for entry in entries:
        if not entry.is_committed or entry.id in protected:
            continue
        manifest = entry.manifest
        if manifest is not None and manifest.name is not None:
            continue
        if len(good) < max(2, keep.last):
            continue  # nothing goes before enough good ones stand, not even what is damaged or abandoned
        if not entry.is_live:
            out.append((entry, "abandoned branch"))
        elif manifest is None:
            out.append((entry, "damaged"))
        elif manifest.suspect is not None:
            out.append((entry, "suspect, and a newer suspect one is kept"))
        elif (keep.every is not None and entry.id.step % keep.every == 0) or (keep.epochs and manifest.epoch_end):
            continue
        else:
            out.append((entry, f"newer ones kept: {keep.last}"))
    return out


def remove_checkpoint(id: CheckpointId, path: Location, spare: Spare | None = None) -> None:
    """Remove one checkpoint: first it stops being one, then its files go; one of them into `spare`, if that is free.

    One that another process has removed meanwhile is gone: that is no error.
    """
    crash_point("prune.begin")
    with files.unless_gone(path):
        files.remove(path / "manifest.json")
        files.sync_directory(path)  # before the shards go: a power loss must not bring the manifest back alone
        crash_point("prune.unlisted")
        remove_chain(path.parent, id)
        remove_directory(path, spare)


def remove_directory(path: Location, spare: Spare | None = None) -> None:
    """Remove what is left of a directory that holds no manifest."""
    with files.unless_gone(path):
        for name in files.list_names(path):
            put_away(path / name, spare)
            crash_point("prune.middle")
        files.remove_directory(path)


def left_over(entries: Sequence[Entry], lineage: int) -> list[Entry]:
    """Directories that never become a checkpoint. `lineage` is the newest one, and asks.

    Snapshots are committed in order: what is older than a committed one was given up, or its process died. Many ranks
    number planned and other saves of one step apart, so there only a word says so of one of the same step.
    """
    newest = max((e for e in entries if e.is_live and e.manifest is not None), key=lambda e: e.id, default=None)

    def is_passed(entry: Entry) -> bool:
        if newest is None or newest.manifest is None:
            return False
        is_numbered = newest.manifest.world_size == 1 or entry.void is not None
        return entry.id.step < newest.id.step or (is_numbered and entry.id < newest.id)

    return [
        entry
        for entry in entries
        if not entry.is_committed and entry.id.lineage <= lineage and (not entry.is_live or is_passed(entry))
    ]


def remove_strays(paths: RunPaths, entries: Sequence[Entry], lineage: int) -> None:
    """Remove temporary files beside names that are taken: whoever wrote them died, or lost and does not need them.

    With `paths.known` once: nobody writes into what is committed, but for the newest ones.
    """
    swept, is_swept = (set(), False) if paths.known is None else (paths.known.swept, paths.known.is_swept)
    newest = {entry.id for entry in [entry for entry in entries if entry.is_committed][:LOOKED_AT]}
    ours = [e for e in entries if e.is_committed and e.id.lineage <= lineage and (e.id in newest or e.id not in swept)]
    committed = [entry.path for entry in ours if files.is_directory(entry.path)]
    for directory in (paths.root, *([] if is_swept else [paths.lineages]), *committed):
        for name in files.list_names(directory, follow=True):
            final = name.partition(".json.")[0]
            is_taken = final in ("run", "storage") or (final.isdecimal() and int(final) <= lineage)
            is_taken = is_taken or directory in committed or (name.startswith("secret.") and directory == paths.root)
            if (is_taken and name.endswith(files.TEMPORARY)) or is_left_over(name, lineage):
                files.remove(directory / name)
    if paths.known is not None:
        paths.known.swept.update(entry.id for entry in ours)
        paths.known.is_swept = True
