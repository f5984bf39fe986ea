"""A state in plainer types: everything that can be saved can be exported and read with `weights_only=True`."""

from __future__ import annotations

import io
from typing import Any

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.tools.interchange.plain import simplify
from stepwell.tools.interchange.torch_file import _add_arrays
from stepwell.training.state.flatten import flatten, unflatten
from tests.tools.interchange.test_outline import STATE, Colour


def exported(state: Any) -> tuple[Any, list[str]]:
    """As `export --format torch` does it, but for the disk in between."""
    flat = flatten({"s": state})
    plain = simplify(flat.tree)
    tensors = {leaf.name: leaf.tensor for leaf in flat.leaves}
    _add_arrays(plain, tensors)
    file = io.BytesIO()
    torch.save(unflatten(plain.encoded, tensors.__getitem__), file)
    file.seek(0)
    return torch.load(file, weights_only=True)["s"], plain.changes


def test_every_type_comes_through() -> None:
    state, changes = exported(STATE)
    assert state["list"] == [1, "two", None]
    assert state["frozen"] == {4}
    assert state["deque"] == [5]
    assert state["default"] == {"b": [2]} and type(state["default"]) is dict
    assert state["pair"][0] == 1 and torch.equal(state["pair"][1], torch.ones(2))
    assert state["colour"] == "Colour.RED"
    assert state["mode"] == 3
    assert state["numbers"][4:] == [(1, 9, 2), (1, None, None)]
    assert state["numpy"][:2] == [-3, "text"]
    assert torch.equal(state["numpy"][2], torch.tensor([1.0], dtype=torch.float64))
    assert state["torch"][:3] == [torch.float32, torch.device("cpu"), torch.Size([1, 2])]
    assert state[7] == "int key" and state["7"] == "text key" and state[(1, "x")] == "tuple key"
    assert state[9] == "numpy key" and state["Colour.RED"] == "enum key"
    assert "s/frozen: frozenset -> set" in changes
    assert not [change for change in changes if change.startswith("s/list")]


def test_what_must_be_hashable_stays_hashable() -> None:
    state, _ = exported({frozenset({1}): "key", "set": {frozenset({2}), (frozenset({3}), Colour.RED)}})
    assert state[(1,)] == "key"
    assert state["set"] == {(2,), ((3,), "Colour.RED")}


def test_whole_numbers_that_the_stock_loader_refuses() -> None:
    near, far = 1 << 1900, 1 << 2100
    state, changes = exported([near, -near, far, -far, {far: 1}])
    assert state == [near, -near, hex(far), hex(-far), {hex(far): 1}]
    assert changes[0] == "s/2: int -> str"


def test_empty_bytes_which_the_stock_loader_refuses() -> None:
    state, changes = exported({"a": b"", b"": 1, "n": numpy.bytes_(b""), "full": b"\0"})
    assert state == {"a": bytearray(), "": 1, "n": bytearray(), "full": b"\0"}
    assert "s/a: bytes -> bytearray" in changes


def test_arrays_of_all_kinds() -> None:
    arrays = {
        "zero": numpy.array(5.0),
        "none": numpy.empty((0, 3), dtype=numpy.float32),
        "bool": numpy.array([True, False]),
        "complex": numpy.array([[1 + 2j]], dtype=numpy.complex128),
        "swapped": numpy.array([1.0], dtype=">f8"),
        "text": numpy.array(["ab"]),
    }
    state, _ = exported(arrays)
    assert state["zero"].shape == () and state["zero"].item() == 5.0
    assert state["none"].shape == (0, 3)
    assert state["bool"].tolist() == [True, False]
    assert state["complex"].tolist() == [[1 + 2j]] and state["complex"].dtype == torch.complex128
    assert bytes(state["swapped"].tolist()) == arrays["swapped"].tobytes()
    assert bytes(state["text"].tolist()) == arrays["text"].tobytes()


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(min_size=1)
    | st.complex_numbers(allow_nan=False)
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
states = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(states)
def test_plain_states_are_unchanged(state: Any) -> None:
    found, changes = exported(state)
    assert found == state
    assert changes == []
