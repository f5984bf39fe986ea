"""Boxes: what goes from one to another, run by run, is what slicing gives."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from stepwell.storage.format.box import Box, Runs, is_covered


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Positions of a box's elements in its tensor, in order, the slow way."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    corners = [range(offset, offset + size) for offset, size in zip(box.offsets, box.shape, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*corners)]


def some_tensor(around: tuple[int, ...], dice: random.Random) -> tuple[Box, tuple[int, ...]]:
    """A tensor that has a box of this shape, and where."""
    before = tuple(dice.choice([0, 0, 1, 2]) for _ in around)
    after = tuple(dice.choice([0, 0, 1]) for _ in around)
    whole = tuple(a + size + b for a, size, b in zip(before, around, after, strict=True))
    return Box(before, around), whole


def test_runs_are_what_slicing_gives() -> None:
    dice = random.Random(3)
    for _ in range(500):
        shape = tuple(dice.choice([0, 1, 2, 3, 4]) for _ in range(dice.randrange(5)))
        (source, in_source), (target, in_target) = some_tensor(shape, dice), some_tensor(shape, dice)
        runs = Runs(source, in_source, target, in_target)
        pairs = [(a + n, b + n) for a, b in runs for n in range(runs.length)]
        expected = zip(elements(source, in_source), elements(target, in_target), strict=True)
        assert pairs == list(expected), (source, in_source, target, in_target)


def test_what_lies_together_is_one_run() -> None:
    rows = Runs(Box.whole((3, 4)), (3, 4), Box((2, 0), (3, 4)), (9, 4))
    assert (rows.count, rows.length, list(rows)) == (1, 12, [(0, 8)])
    columns = Runs(Box.whole((3, 2)), (3, 2), Box((0, 1), (3, 2)), (3, 4))
    assert (columns.count, columns.length, columns.starts(2)) == (3, 2, (4, 9))
    scalar = Runs(Box.whole(()), (), Box.whole(()), ())
    assert (scalar.count, scalar.length, list(scalar)) == (1, 1, [(0, 0)])


def test_covered_means_each_element_once() -> None:
    dice = random.Random(4)
    verdicts = []
    for _ in range(2000):
        shape = tuple(dice.randint(1, 4) for _ in range(dice.randrange(3)))
        parts = []
        for _ in range(dice.randint(1, 4)):
            offsets = tuple(dice.randint(0, size - 1) for size in shape)
            sizes = tuple(dice.randint(0, size - offset) for size, offset in zip(shape, offsets, strict=True))
            parts.append(Box(offsets, sizes))
        found = sorted(position for part in parts for position in elements(part, shape))
        verdicts.append(is_covered(Box.whole(shape), parts))
        assert verdicts[-1] == (found == list(range(math.prod(shape)))), (shape, parts)
    assert verdicts.count(True) > 50 < verdicts.count(False)


def test_many_ranks_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    meet = Box.meet
    monkeypatch.setattr(Box, "meet", lambda a, b: calls.append(1) or meet(a, b))
    assert is_covered(Box.whole((4000, 2)), [Box((row, 0), (1, 2)) for row in range(4000)])
    assert len(calls) < 4000
