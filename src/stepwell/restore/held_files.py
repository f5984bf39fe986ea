"""Files of a checkpoint, open before a byte of any of them is used.

Holds:   a checkpoint that a live trainer removes meanwhile is read to its end, or not at all. This goes for the first
         MOST_OPEN files; those of a larger checkpoint are opened when their turn comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from stepwell.restore.byte_sources import BlockSource
from stepwell.restore.whole import Part
from stepwell.storage.format.record import FileEntry

MOST_OPEN: Final = 256
"""A process may have 1024 descriptors, unless it asked for more."""


@contextlib.contextmanager
def held(wanted: Sequence[tuple[Part, Collection[int]]]) -> Iterator[list[Part]]:
    """The same parts, with these of their files (by number) open. Raises DamagedError."""
    waiting: dict[tuple[int, str], BlockSource] = {}
    with contextlib.ExitStack() as stack:
        for number, (part, files) in enumerate(wanted):
            for file in [part.record.files[index] for index in sorted(files)]:
                if len(waiting) < MOST_OPEN:
                    source = part.open_source(file)
                    waiting[number, file.name] = source
                    stack.callback(_close, waiting, (number, file.name))
        yield [_held(part, number, waiting) for number, (part, _) in enumerate(wanted)]


def _held(part: Part, number: int, waiting: dict[tuple[int, str], BlockSource]) -> Part:
    def open_source(file: FileEntry) -> BlockSource:
        source = waiting.pop((number, file.name), None)  # from here on it is the reader's, which closes it
        return part.open_source(file) if source is None else source

    return part.with_source(open_source)


def _close(waiting: dict[tuple[int, str], BlockSource], key: tuple[int, str]) -> None:
    source = waiting.pop(key, None)
    if source is not None:
        source.close()
