"""The tree of a record, read without torch and without the user's classes."""

from __future__ import annotations

import base64
import collections
import enum
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from stepwell.errors import DamagedError
from stepwell.storage.format import tree
from stepwell.tools.interchange.outline import METADATA, numpy_scalar, outline, summary, value_text
from stepwell.training.state.flatten import flatten


class Colour(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


STATE: dict[Any, Any] = {
    "list": [1, "two", None],
    "tuple": (True, 2.5),
    "set": {3},
    "frozen": frozenset({4}),
    "deque": collections.deque([5], maxlen=2),
    "ordered": collections.OrderedDict(a=1),
    "default": collections.defaultdict(list, b=[2]),
    "counter": collections.Counter("xx"),
    "pair": Pair(1, torch.ones(2)),
    "empty": {},
    "colour": Colour.RED,
    "mode": Mode.A | Mode.B,
    "numbers": [2**80, float("nan"), 1 + 2j, b"abc", range(1, 9, 2), slice(1, None)],
    "numpy": [numpy.int16(-3), numpy.str_("text"), numpy.array([1.0])],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.zeros(1)],
    7: "int key",
    "7": "text key",
    (1, "x"): "tuple key",
    numpy.int64(9): "numpy key",
    Colour.RED: "enum key",
}


def test_every_kind_of_value_is_read() -> None:
    nodes = dict(outline(flatten({"s": STATE}).tree).walk())
    kinds = {path[1]: node.kind for path, node in nodes.items() if len(path) == 2}
    assert kinds["list"] == "list" and kinds["tuple"] == "tuple" and kinds["set"] == "set"
    assert kinds["frozen"] == "frozenset" and kinds["deque"] == "deque(maxlen=2)"
    assert kinds["ordered"] == "OrderedDict" and kinds["default"] == "defaultdict(list)"
    assert kinds["counter"] == "Counter" and kinds["pair"].endswith(".Pair") and kinds["empty"] == "dict"
    texts = {path: value_text(node.value) for path, node in nodes.items() if node.kind == "value"}
    assert texts[("s", "colour")] == "Colour.RED"
    assert texts[("s", "mode")] == "Mode(3)"
    assert [texts[("s", "numbers", str(i))] for i in range(6)] == [
        str(2**80),
        "nan",
        "(1+2j)",
        "bytes of 3",
        "range(1, 9, 2)",
        "slice(1, None, None)",
    ]
    assert [texts[("s", "numpy", str(i))] for i in range(2)] == ["numpy <i2 -3", "numpy 'text'"]
    assert [texts[("s", "torch", str(i))] for i in range(3)] == ["torch.float32", "device cpu", "size(1, 2)"]


def test_paths_of_tensors_are_those_of_the_leaves() -> None:
    flat = flatten({"s": STATE})
    found = [leaf for _, leaf in outline(flat.tree).leaves()]
    assert found == [leaf.name for leaf in flat.leaves]


def test_keys_that_read_the_same_stay_apart() -> None:
    (state,) = [node for key, node in outline(flatten({"s": STATE}).tree).children if key == "s"]
    keys = [key for key, _ in state.children]
    assert len(set(keys)) == len(keys)
    assert {"7", "7~2", "(1, 'x')", "9", "Colour.RED"} <= set(keys)
    assert state.key_kinds == {"7": "int", "(1, 'x')": "tuple", "9": "npscalar", "Colour.RED": "enum"}


def test_a_state_dict_keeps_its_notes_apart() -> None:
    module = torch.nn.BatchNorm1d(2)
    node = outline(flatten({"m": module.state_dict()}).tree)
    assert [key for key, _ in node.children[0][1].children] == [*module.state_dict(), METADATA]


def test_tied_tensors_have_one_leaf_and_two_paths() -> None:
    weight = torch.ones(3)
    assert list(outline(flatten({"a": [weight], "b": weight}).tree).leaves()) == [(("a", "0"), "a/0"), (("b",), "a/0")]


@pytest.mark.parametrize("kind", ["<i8", "<u4", "|b1", "<f2", "<f4", ">f8", "<c8", "<c16"])
def test_numpy_numbers_without_numpy(kind: str) -> None:
    value = numpy.array([1], dtype=kind)[0]
    payload = [kind, base64.b64encode(numpy.array([1], dtype=kind).tobytes()).decode()]
    assert numpy_scalar(payload) == value


def test_long_values_are_cut() -> None:
    assert value_text("x" * 500, 20) == "'" + "x" * 16 + "..."
    assert summary(outline(list(range(1000)))).endswith("... (1000 in all)")
    assert summary(outline({"a": 1, "b": {"$tuple": [1, 2]}})) == "{a: 1, b: (1, 2)}"


@pytest.mark.parametrize(
    "forged",
    [
        {"$tensor": {"kind": "parameter"}},
        {"$tensor": 5},
        {"$tensor": {"leaf": 5}},
        {"$dict": [[1]]},
        {"$dict": 7},
        {"$deque": []},
        {"$namedtuple": ["m"]},
        {"$state_dict": [[["a", 1]]]},
        {"$dict": [[{"$npscalar": ["<f8", "AA=="]}, 1]]},
    ],
)
def test_a_tree_that_is_not_of_its_form_is_damage(forged: Any) -> None:
    with pytest.raises(DamagedError):
        outline(forged)


@pytest.mark.parametrize("forged", [{"$bytes": "!"}, {"$enum": []}, {"$npscalar": ["<f8", "AA=="]}, {"$flag": [1]}])
def test_a_value_that_is_not_of_its_form_is_damage(forged: Any) -> None:
    with pytest.raises(DamagedError):
        value_text(forged)


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_as_deep_as_can_be_saved_and_no_deeper() -> None:
    deepest = outline(nest(tree.MAX_DEPTH - 1))
    assert len(list(deepest.walk())) == tree.MAX_DEPTH
    assert "... (1 in all)" in summary(deepest)
    for depth in (tree.MAX_DEPTH + 1, 900, 5000):
        with pytest.raises(DamagedError, match="too deeply"):
            outline(nest(depth))
