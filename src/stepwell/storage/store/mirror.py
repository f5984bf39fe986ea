"""The desk of a run in a bucket: files that are written again and again lie on this machine, and are copied to it.

Owns:    bringing events, progress and history here, and back to the bucket.
Holds:   all of it is advisory: without it reports are poorer and costs are learned again, nothing else. In a directory
         the desk is the run itself, and nothing here does anything.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from stepwell.events.event_file import parts_of
from stepwell.storage.store import files, objects
from stepwell.storage.store.objects import ObjectFacts, ObjectPath
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.private_directory import make_private

_NAMES: Final = re.compile(r"(progress|events)(\.rank-\d{5,})?((\.kept|\.old)?\.jsonl)?|history\.json", re.ASCII)
_MAX_BYTES: Final = 1 << 30


def lay(paths: RunPaths) -> None:
    """Make the place for it, which is this user's alone; that of a run in a directory is there. Raises ConfigError."""
    if isinstance(paths.root, ObjectPath):
        make_private(paths.desk, advice="let STEPWELL_DESK name a directory that only you can write to")


def fetch(paths: RunPaths, *, since: float = 0.0, is_reader: bool = False) -> None:
    """Lay the desk: what the bucket has and this machine has not, or has older. Raises OSError.

    since:      when the run was made: what is older is of another one that lay in the same place
    is_reader:  of all ranks, for somebody who looks at the run from outside; else what this rank writes itself
    """
    if not isinstance(paths.root, ObjectPath):
        return
    lay(paths)
    for name in _mine(paths):
        here = files.facts(paths.desk / name)
        if here is not None and here.modified < since:
            files.remove(paths.desk / name)
    for name, found in files.list_facts(paths.root).items():
        if not _NAMES.fullmatch(name) or not (is_reader or name in _mine(paths)):
            continue
        path = paths.desk / name
        here = files.facts(path)
        if here is None or here.modified < found.modified:
            data = objects.get(paths.root / name, _MAX_BYTES)
            files.put(path, data, point="desk")
            os.utime(path, (found.modified, found.modified))


def publish(paths: RunPaths, seen: dict[str, ObjectFacts], *, is_last: bool = False) -> None:
    """Copy to the bucket what this rank changed since the last time, which `seen` remembers. Never raises.

    Events only grow, and an object cannot: they are sent again when they are an eighth more, when another file has
    their name, and at the end.
    """
    if not isinstance(paths.root, ObjectPath):
        return
    for name in _mine(paths):
        with contextlib.suppress(OSError):  # the next time
            path: Path = paths.desk / name
            found, last = files.facts(path), seen.get(name)
            if found is None or found == last:
                continue
            is_same = last is not None and last.identity == found.identity and path == paths.events
            if last is not None and is_same and not is_last and found.nbytes < last.nbytes * 9 // 8:
                continue
            objects.put(paths.root / name, path.read_bytes())
            seen[name] = found


def _mine(paths: RunPaths) -> list[str]:
    names = [paths.progress.name, *(path.name for path in parts_of(paths.events))]
    return names if paths.rank else [*names, paths.history.name]
