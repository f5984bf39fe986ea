"""What a rank does at a restart to know which bytes are its own: manifest, records, and the plan of what to read.

On the same number of ranks, and on half as many, where all ranks find out together which records hold what.
"""

from __future__ import annotations

import argparse
import functools
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from many.records import COLUMNS as WIDTH
from many.records import ROWS, make, sample
from many.report import Row
from stepwell.restore.whole import Whole, parts_on_disk
from stepwell.storage.format.box import Box
from stepwell.storage.store import assemble, catalog, commit, files

ABOUT = __doc__
COLUMNS = (
    "a rank s", "metadata MB", "records", "memory MB", "on half: a rank s", "on half: metadata MB", "on half: records",
)  # fmt: skip
FIT = ("a rank s", "metadata MB", "on half: a rank s", "on half: metadata MB")
RANKS = (64, 256, 1024)
_SAMPLE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--leaves", type=int, default=1_000)
    parser.add_argument("--directory", type=Path, help="where records are written")


class _Reads:
    """Counts what is read, by replacing the one function that reads documents."""

    def __init__(self) -> None:
        self.nbytes = self.records = 0
        self._get = files.get

    def __enter__(self) -> _Reads:
        files.get = self._read
        return self

    def __exit__(self, *_: object) -> None:
        files.get = self._get

    def _read(self, path: Any, **more: Any) -> bytes:
        data = self._get(path, **more)
        self.nbytes += len(data)
        self.records += path.name.startswith("rank-")
        return data


def measure(size: int, options: argparse.Namespace) -> Row:
    """One row: the worst of some ranks."""
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        paths, id = make(Path(root) / "run", size, options.leaves)
        from many.commit import _manifest

        commit.publish_manifest(paths, _manifest(assemble.gather(paths, id, size)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        is_new = hasattr(Whole, "lacking")
        ranks = list(sample(size, _SAMPLE if is_new else 1))
        same = [_same(paths, id, rank, is_new=is_new) for rank in ranks]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        half = [_half(paths, id, rank, size // 2, size) for rank in sample(size // 2, _SAMPLE)] if is_new else []
    row: Row = {"a rank s": max(one[0] for one in same), "metadata MB": max(one[1] for one in same) / 1e6}
    row |= {"records": max(one[2] for one in same), "memory MB": grown / 1024}
    if half:
        row |= {"on half: a rank s": max(one[0] for one in half), "on half: metadata MB": max(h[1] for h in half) / 1e6}
        row["on half: records"] = max(one[2] for one in half)
    return row


def _same(paths: Any, id: Any, rank: int, *, is_new: bool) -> tuple[float, int, int]:
    with _Reads() as reads:
        started = time.perf_counter()
        manifest = catalog.read_manifest(paths, id)
        whole = Whole(parts_on_disk(paths, manifest), rank, **({"is_lazy": True} if is_new else {}))
        wanted = {name: Box((rank * ROWS, 0), (ROWS, WIDTH)) for name in whole.leaves}
        list(whole.plan(wanted))
        return time.perf_counter() - started, reads.nbytes, reads.records


@functools.cache
def _questions(size: int, shape: tuple[int, ...]) -> list[Any]:
    from stepwell.restore import needed_records

    return [
        needed_records.load(needed_records.dump({shape: {Box((rank * 2 * ROWS, 0), (2 * ROWS, WIDTH))}}))
        for rank in range(size)
    ]


def _half(paths: Any, id: Any, rank: int, size: int, world: int) -> tuple[float, int, int]:
    """The rank's own work; what it hears from the others is worked out beside it, and not counted."""
    from stepwell.restore import needed_records

    with _Reads() as reads:
        started = time.perf_counter()
        manifest = catalog.read_manifest(paths, id)
        parts = parts_on_disk(paths, manifest)
        whole = Whole(parts, None, is_lazy=True)
        shape = (world * ROWS, WIDTH)
        needed_records.answer(
            [parts[number].record for number in needed_records.turns(rank, size, world)], _questions(size, shape)
        )
        wanted = {name: Box((rank * 2 * ROWS, 0), (2 * ROWS, WIDTH)) for name in whole.leaves}
        assert whole.lacking(wanted) or rank == 0
        whole.look_into([2 * rank, 2 * rank + 1])
        list(whole.plan(wanted))
        return time.perf_counter() - started, reads.nbytes, reads.records
