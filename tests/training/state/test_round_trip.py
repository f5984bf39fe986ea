"""What goes into a checkpoint comes out of it with its types and bits: in one process, and through a real save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stepwell
from tests.training.state import zoo
from tests.training.state.same import difference
from tests.training.state.through import names, round_trip

GROUPS = {"tensors": zoo.tensors, "plain": zoo.plain, "arrays": zoo.arrays, "dtypes": zoo.every_dtype}
CASES = [(group, name) for group, make in GROUPS.items() for name in make()]


@pytest.mark.parametrize(("group", "name"), CASES, ids=lambda text: text.replace(" ", "_"))
def test_every_kind_of_value_comes_back_as_it_was(group: str, name: str) -> None:
    assert difference(round_trip(GROUPS[group]()[name]), GROUPS[group]()[name]) is None


def test_every_element_type_of_this_torch_is_known_or_quantised() -> None:
    kinds = {str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    assert kinds - zoo.every_dtype().keys() == {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


def test_ties_stay_ties_and_are_stored_once() -> None:
    found = round_trip(zoo.ties())
    assert found["tensor"][0] is found["tensor"][2] is found["tensor"][1]["again"]
    first, second, detached = found["parameter"]
    assert first is second
    assert type(detached) is torch.Tensor and not detached.requires_grad
    assert detached.data_ptr() == first.data_ptr()
    assert found["array"][0] is found["array"][1]
    assert names(zoo.ties()) == ["value/tensor/0", "value/parameter/0", "value/array/0"]


def test_views_of_other_shape_are_stored_on_their_own() -> None:
    base = torch.arange(6.0)
    found = round_trip([base, base[:3], base.view(2, 3)])
    assert difference(found, [base, base[:3], base.view(2, 3)]) is None
    assert len({tensor.data_ptr() for tensor in found}) == 3


def test_arrays_come_back_writable() -> None:
    found = round_trip({"a": numpy.arange(3), "s": zoo.arrays()["read only"]})
    found["a"][0] = 9
    found["s"][0] = 9
    assert found["a"].tolist() == [9, 1, 2]


def test_names_are_unique_ascii_and_reversible() -> None:
    keys: list[Any] = ["a/b", "a%2Fb", "a~2", "a", "\u00fc", "\udc80", "", "0", 0, (0,), "__metadata__"]
    found = names({key: torch.tensor(float(i)) for i, key in enumerate(keys)})
    assert len(set(found)) == len(keys)
    assert all(name.isascii() and name.isprintable() for name in found)
    assert names(torch.zeros(1)) == ["value"]


# -- through a real Checkpointer and a fresh process ------------------------------------------------------------------

RESTORE = """
import sys, torch, stepwell
from tests.training.state import zoo
from tests.training.state.same import difference
from tests.training.state.test_round_trip import Tied
values, ties, model, empty = {}, {}, Tied(seed=9), []
ckpt = stepwell.Checkpointer(sys.argv[1], policy=stepwell.Never(), values=values, ties=ties, model=model, empty=empty)
assert ckpt.restore()
print("difference:", difference(values, zoo.zoo()))
print("ties:", ties["tensor"][0] is ties["tensor"][1]["again"], ties["parameter"][0] is ties["parameter"][1])
print("model:", difference(model.state_dict(), Tied(seed=1).state_dict()), model.head.weight is model.body.weight)
print("empty:", empty)
ckpt.close(save=False)
"""


class Tied(torch.nn.Module):
    """Tied weights, a buffer, extra state, and a parameter that is not contiguous."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4)
        self.head.weight = self.body.weight
        self.across = torch.nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("count", torch.tensor(seed))
        self.note: Any = {"seed": seed, ("a", 1): None}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_a_real_save_comes_back_in_a_fresh_process(run_dir: Path) -> None:
    with stepwell.Checkpointer(
        run_dir, policy=stepwell.Never(), values=zoo.zoo(), ties=zoo.ties(), model=Tied(seed=1), empty=[]
    ) as ckpt:
        ckpt.step()
        directory = ckpt.save().wait(60)
    found = subprocess.run(
        [sys.executable, "-c", RESTORE, str(run_dir)], capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["difference: None", "ties: True True", "model: None True", "empty: []"]
    assert (run_dir / directory).is_dir()
