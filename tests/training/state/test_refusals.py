"""What cannot be represented is refused at save time, with its path and what to do."""

from __future__ import annotations

import enum
import threading
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stepwell
from stepwell.errors import StateError
from stepwell.events.journal import read_events
from stepwell.storage.format import document, tree
from tests.training.state.same import difference
from tests.training.state.through import round_trip
from tests.training.state.zoo import Colour, Pair


def deep(levels: int, wrap: Any = lambda inner: [inner]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


def contains_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def local_enum() -> Any:
    class Hidden(enum.Enum):
        ONE = 1

    return Hidden.ONE


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


class Subclass(torch.Tensor):
    pass


class Text(str):
    pass


class Impostor(enum.Enum):
    """Hides behind another class of the same name."""

    ONE = 1


Hidden, Impostor = Impostor, Colour  # type: ignore[misc, assignment]

VALUES: dict[str, Any] = {
    "lambda": lambda: lambda: 1,
    "object": object,
    "module": lambda: torch.nn.Linear(1, 1),
    "class": lambda: Pair,
    "python module": lambda: torch,
    "generator": torch.Generator,
    "lock": threading.Lock,
    "path": lambda: Path("x"),
    "str subclass": lambda: Text("x"),
    "defaultdict with a function": lambda: defaultdict(lambda: 1),
    "local enum": local_enum,
    "hidden enum": lambda: Hidden.ONE,
    "local named tuple": lambda: namedtuple("Nowhere", "a")(1),
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "quantised": quantised,
    "meta": lambda: torch.empty(2, device="meta"),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "tensor subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "lazy parameter": torch.nn.UninitializedParameter,
    "masked array": lambda: numpy.ma.masked_array([1, 2]),
    "matrix": lambda: numpy.asmatrix([[1]]),
    "array of objects": lambda: numpy.array([object()]),
    "array of texts of any length": lambda: numpy.array(["a"], dtype=numpy.dtypes.StringDType()),
    "structured array": lambda: numpy.zeros(2, dtype=[("a", "<i4"), ("b", "<f8")]),
    "structured scalar": lambda: numpy.zeros(1, dtype=[("a", "<i4")])[0],
    "array without size": lambda: numpy.zeros(2, dtype="V0"),
    "list in itself": contains_itself,
    "deep list": lambda: deep(100_000),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("name", VALUES, ids=lambda name: name.replace(" ", "_"))
def test_refused_with_its_path(name: str) -> None:
    with pytest.raises(StateError) as caught:
        round_trip({"a": [1, {"b c": VALUES[name]()}]})
    assert str(caught.value).startswith("value/a/1/b c")
    assert str(caught.value.fields["path"]).startswith("value/a/1/b c")


def test_refused_as_a_key() -> None:
    with pytest.raises(StateError, match="value/a/key <object object"):
        round_trip({"a": {object(): 1}})


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: Pair(v, 0), lambda v: {("t",): v}],
    ids=["list", "tuple", "dict", "typed dict", "named tuple", "tuple key"],
)
def test_what_is_not_too_deep_comes_back_even_from_a_deep_stack(wrap: Any) -> None:
    value = deep(tree.MAX_DEPTH - 2, wrap)

    def from_below(frames: int) -> Any:
        return from_below(frames - 1) if frames else round_trip(value)

    assert difference(from_below(300), value) is None
    with pytest.raises(StateError, match="nested deeper than 100"):
        round_trip(deep(tree.MAX_DEPTH + 1, wrap))


def test_a_stack_that_is_used_up_is_an_error_with_a_path() -> None:
    def use_up() -> Any:
        try:
            return use_up()
        except RecursionError:
            return round_trip_from_here(deep(90))

    def round_trip_from_here(value: Any) -> Any:
        return tree.encode(value, ("value",), lambda value, path: NotImplemented)

    with pytest.raises((StateError, RecursionError)):
        use_up()


def test_a_document_that_could_not_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", 1000)
    assert document.seal({"format": "x", "values": [1] * 200})
    with pytest.raises(StateError, match=r"more than 1000.*store long lists of numbers as tensors"):
        document.seal({"format": "x", "values": [1] * 500})


def test_a_real_save_refuses_and_training_goes_on(run_dir: Path) -> None:
    state: dict[str, Any] = {"fine": 1}
    with stepwell.Checkpointer(run_dir, policy=stepwell.Every(steps=1), track={"values": state}) as ckpt:
        ckpt.step()
        ckpt.wait(60)
        state["odd"] = [lambda: 1]
        ckpt.step()  # the policy asks for a snapshot: refused with an event, not an exception
        with pytest.raises(StateError, match="values/odd/0"):
            ckpt.save()
        del state["odd"]
        ckpt.step()
        assert ckpt.save().wait(60)
    refused = [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "snapshot-refused"]
    assert any("values/odd/0" in event["reason"] for event in refused)
