"""What rank 0's agent does to commit: it looks for all parts, reads what it needs of them, and writes the manifest."""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from many.records import make
from many.report import Row
from stepwell.storage.format.manifest import Manifest
from stepwell.storage.store import assemble, commit

ABOUT = __doc__
COLUMNS = ("leader CPU s", "leader s", "memory MB", "manifest MB")
FIT = ("leader CPU s",)
RANKS = (64, 256, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--leaves", type=int, default=1_000)
    parser.add_argument("--directory", type=Path, help="where records are written")


def measure(size: int, options: argparse.Namespace) -> Row:
    """One row."""
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        paths, id = make(Path(root) / "run", size, options.leaves)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started, busy = time.perf_counter(), time.process_time()
        found = assemble.gather(paths, id, size)
        manifest = _manifest(found)
        commit.publish_manifest(paths, manifest)
        took, busy = time.perf_counter() - started, time.process_time() - busy
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        nbytes = paths.manifest(id).stat().st_size
    return {"leader CPU s": busy, "leader s": took, "memory MB": grown / 1024, "manifest MB": nbytes / 1e6}


def _manifest(found: Any) -> Manifest:
    if hasattr(assemble, "make_manifest"):
        made: Manifest = assemble.make_manifest(found)
        return made
    first = found[0][0]  # as it was before there were summaries
    return Manifest(
        run=first.run,
        id=first.id,
        world_size=len(found),
        created=first.created,
        records=tuple(reference for _, reference in found),
        nbytes=sum(record.nbytes for record, _ in found),
    )
