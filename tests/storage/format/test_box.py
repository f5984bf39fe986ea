"""Boxes: the arithmetic behind pieces of tensors, compared with sets of elements."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stepwell.storage.format.box import Box, is_covered

Element = tuple[int, ...]


def elements(box: Box) -> set[Element]:
    """The same, element by element."""
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offsets, box.ends, strict=True))))


@st.composite
def inside(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box of a tensor, which may be empty."""
    pairs = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in pairs), tuple(high - low for low, high in pairs))


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(st.data(), shapes)
def test_meet_is_the_common_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(inside(shape)), data.draw(inside(shape))
    met = one.meet(other)
    assert (set() if met is None else elements(met)) == elements(one) & elements(other)
    assert met == other.meet(one)
    assert met is None or met.numel == len(elements(met))


@given(st.data(), shapes)
def test_inside_moves_the_origin(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(inside(shape))
    inner = data.draw(inside(outer.shape))
    moved = Box(tuple(map(sum, zip(outer.offsets, inner.offsets, strict=True))), inner.shape)
    assert moved.inside(outer) == inner


@given(st.data(), shapes)
def test_rows(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(inside(shape))
    first, last = sorted((data.draw(st.integers(0, box.row_count)), data.draw(st.integers(0, box.row_count))))
    found = elements(box.rows(first, last))
    if not shape:
        assert box.row_count == 1 and found == elements(box)
    else:
        start = box.offsets[0]
        assert found == {element for element in elements(box) if start + first <= element[0] < start + last}


@given(st.data(), shapes, st.integers(0, 6))
def test_covered_is_each_element_once(data: st.DataObject, shape: tuple[int, ...], count: int) -> None:
    parts = [data.draw(inside(shape)) for _ in range(count)]
    expected = sorted(element for part in parts for element in elements(part)) == sorted(elements(Box.whole(shape)))
    assert is_covered(Box.whole(shape), parts) is expected


@given(st.data(), shapes.filter(bool))
def test_a_grid_covers_and_a_moved_part_does_not(data: st.DataObject, shape: tuple[int, ...]) -> None:
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    axes = [[(low, high - low) for low, high in itertools.pairwise(marks)] for marks in cuts]
    parts = [
        Box(tuple(start for start, _ in cell), tuple(size for _, size in cell)) for cell in itertools.product(*axes)
    ]
    whole = Box.whole(shape)
    assert is_covered(whole, data.draw(st.permutations(parts)))
    assert is_covered(whole, [*parts, Box(data.draw(inside(shape)).offsets, (0,) * len(shape))]), "nothing adds nothing"
    assert not is_covered(whole, [*parts, parts[0]])
    assert not is_covered(whole, parts[1:])
    same = [part for part in parts if part.shape == parts[0].shape]
    if len(same) > 1:
        assert not is_covered(whole, [same[1], *parts[1:]]), "one twice in the place of another"


def test_many_rows_are_judged_quickly() -> None:
    """Every tensor of a run of thousands of ranks is asked for: not each part against each other one."""
    count = 20_000
    parts = [Box((row, 0), (1, 8)) for row in range(count)]
    assert is_covered(Box.whole((count, 8)), parts)
    parts[7] = parts[8]
    assert not is_covered(Box.whole((count, 8)), parts)
