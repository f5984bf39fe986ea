"""What changed between two moments: seen in live tensors, copies and arrays, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from stepwell.training.state.capture import Capture
from stepwell.training.state.fingerprint import Fingerprint
from stepwell.training.state.tracked import track


class Copies:
    """Tells of copies of what it has."""

    def __init__(self) -> None:
        self.value = torch.ones(1000)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def change_array(target: Any) -> None:
    target["value"][3] += 1


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "copies": (Copies, lambda target: target.value.add_(1)),
    "generator": (torch.Generator, lambda target: torch.rand(3, generator=target)),
    "array": (lambda: {"value": numpy.zeros(1000)}, change_array),
    "woven array": (lambda: {"value": numpy.zeros((9, 4)).T}, change_array),
    "tensor": (lambda: {"value": torch.ones(1000)}, lambda target: target["value"].add_(1)),
    "view": (lambda: {"value": torch.ones(1000)[:10]}, lambda target: target["value"].add_(1)),
    "module": (lambda: torch.nn.Linear(2, 2), lambda target: torch.nn.init.ones_(target.weight)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_seen_and_nothing_else(kind: str) -> None:
    make, change = KINDS[kind]
    target = make()
    capture = Capture(track({"target": target, "other": Copies()}))
    before = Fingerprint.of(capture.flatten())
    in_the_way = [torch.ones(1000) for _ in range(5)]  # what is made anew now lies elsewhere
    assert before.changed(Fingerprint.of(capture.flatten())) == []
    change(target)
    assert before.changed(Fingerprint.of(capture.flatten())) == ["target"]
    del in_the_way


def test_a_live_tensor_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one may lie on a device."""
    capture = Capture(track({"target": {"value": torch.ones(10)}, "module": torch.nn.Linear(2, 2)}))
    monkeypatch.setattr("stepwell.training.state.fingerprint.content_digest", lambda tensor: pytest.fail("it was read"))
    Fingerprint.of(capture.flatten())
