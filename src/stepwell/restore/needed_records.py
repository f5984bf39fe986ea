"""Which records hold the boxes that a rank needs, where other ranks saved the checkpoint, or saved it otherwise.

Owns:    the questions and answers of all ranks, and what follows from them. Pure.
Holds:   each record is read by one rank, however many there are, and after that only by those that need it. Boxes are
         compared by the shape of their tensor, not by name: few of them stand for thousands of leaves, and a rank may
         look into a record too many, never into one too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepwell.storage.format.box import Box
from stepwell.storage.format.record import Record

Shape = tuple[int, ...]
Wanted = dict[Shape, set[Box]]
"""Boxes, by the shape of the whole tensor."""


def ask(boxes: Mapping[str, Box], shapes: Mapping[str, Shape]) -> Wanted:
    """What a rank needs: boxes of leaves, whose tensors have these shapes."""
    wanted: Wanted = {}
    for name, box in boxes.items():
        wanted.setdefault(shapes[name], set()).add(box)
    return wanted


def dump(wanted: Wanted) -> list[Any]:
    """As it travels."""
    return [[shape, sorted([box.offsets, box.shape] for box in boxes)] for shape, boxes in sorted(wanted.items())]


def load(values: Sequence[Any]) -> Wanted:
    """What `dump` gave."""
    return {tuple(shape): {Box(tuple(offsets), tuple(size)) for offsets, size in boxes} for shape, boxes in values}


def turns(rank: int, size: int, world_size: int) -> range:
    """Which of the records this rank reads for all."""
    return range(rank, world_size, size)


def answer(records: Iterable[Record], questions: Sequence[Wanted]) -> dict[str, list[int]]:
    """For each rank (as text) those of the records that hold something for it."""
    found: dict[str, list[int]] = {}
    for record in records:
        held: Wanted = {}
        for leaf in record.leaves:
            held.setdefault(leaf.global_shape, set()).add(leaf.box)
        for rank, wanted in enumerate(questions):
            if _meet(held, wanted):
                found.setdefault(str(rank), []).append(record.owner.rank)
    return found


def _meet(held: Wanted, wanted: Wanted) -> bool:
    shapes = held.keys() & wanted.keys()
    return any(mine.meet(other) is not None for shape in shapes for mine in held[shape] for other in wanted[shape])
