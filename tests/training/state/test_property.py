"""Any tree of known values comes back equal, types included; what is refused is refused with a path."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.state.same import difference
from tests.training.state.through import names, round_trip
from tests.training.state.zoo import Colour, Level, Mode, Pair, Wind, every_dtype

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # said once, by torch.empty

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = sorted(name for name in every_dtype() if name != "bool")
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TEXT = st.text(st.characters(), max_size=6)  # surrogates included


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, name = draw(SHAPES), draw(st.sampled_from(DTYPES))
    kind = getattr(torch, name)
    size = kind.itemsize
    count = torch.Size(shape).numel()
    data = draw(st.binary(min_size=count * size, max_size=count * size))
    if not count:
        return torch.empty(shape, dtype=kind)
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)
    if made.dim() > 1 and draw(st.booleans()):
        made = made.transpose(0, 1)
    return made


ARRAYS = st.builds(
    lambda kind, shape: numpy.arange(int(numpy.prod(shape))).astype(kind).reshape(shape),
    st.sampled_from(["?", "<i2", ">i4", "<f4", ">f8", "<c16", "<M8[s]", "S4", "<U3"]),
    SHAPES,
)
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS.filter(lambda value: value == value),
    TEXT,
    st.binary(max_size=6),
    st.sampled_from([Colour.RED, Level.HIGH, Wind.NORTH | Wind.EAST, Mode(6), torch.float16, torch.Size([2])]),
    st.tuples(st.integers(), TEXT),
)
LEAVES = st.one_of(HASHABLE, FLOATS, st.complex_numbers(), tensors(), ARRAYS, st.binary().map(bytearray))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(HASHABLE, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 5])),
        st.dictionaries(TEXT, inner, max_size=4),
        pairs,
        pairs.map(OrderedDict),
        pairs.map(lambda value: defaultdict(list, value)),
        st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_any_tree_comes_back_as_it_was(value: Any) -> None:
    assert difference(round_trip(value), value) is None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(TEXT, st.integers(), st.tuples(TEXT)), unique=True, max_size=12))
def test_any_keys_give_distinct_names(keys: list[Any]) -> None:
    value = {key: torch.tensor(float(i)) for i, key in enumerate(keys)}
    found = names(value)
    assert len(set(found)) == len(keys)
    assert difference(round_trip(value), value) is None
