"""Digests that are taken beside training: of one moment, or of nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from stepwell.training.snapshot import digests
from stepwell.training.snapshot.digests import Reading
from stepwell.training.snapshot.guard import Guard
from stepwell.training.state.capture import Capture
from stepwell.training.state.fingerprint import content_digest
from stepwell.training.state.tracked import track


class Setting:
    """A module with buffers, and an optimizer: parameters and moments are managed, buffers may change at any time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.found: dict[str, str] | None = None
        self.changed: list[str] = []
        self.is_told = threading.Event()
        self.backward()
        self.optimizer.step()
        self.capture = Capture(track({"model": self.model, "optimizer": self.optimizer}))
        self.leaves = self.capture.flatten().leaves
        self.before = {leaf.name: content_digest(leaf.local) for leaf in self.leaves}
        self.reading = Reading(self.tell)

    def backward(self) -> None:
        self.model(torch.randn(4, 64)).sum().backward()

    def tell(self, found: dict[str, str], changed: list[str]) -> None:
        self.found, self.changed = found, changed
        self.is_told.set()

    def begin(self, restless: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        pairs = list(zip(self.leaves, self.capture.find_roles(self.leaves), strict=True))
        self.reading.begin(pairs, restless)

    def step(self) -> None:
        self.reading.gate()
        self.optimizer.step()

    def heard(self) -> dict[str, str]:
        deadline = time.monotonic() + 30
        while not self.is_told.wait(0.001):  # in slices: it waits for a moment between two of these
            assert time.monotonic() < deadline
        assert self.found is not None
        return self.found


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.reading.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread of the reading hashes nothing until this is set; the training thread may."""
    free, inner = threading.Event(), Reading._help

    def help_later(self: Reading) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert free.wait(30)
        inner(self)

    monkeypatch.setattr(Reading, "_help", help_later)
    yield free
    free.set()


def test_the_digests_are_those_of_the_moment_of_its_beginning(setting: Setting) -> None:
    setting.begin()
    setting.backward()  # changes the statistics
    setting.step()
    assert setting.heard() == setting.before and setting.changed == []


def test_nothing_is_hashed_before_begin_returns(
    setting: Setting, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(tensor: torch.Tensor) -> str:
        threads.append(threading.current_thread())
        return content_digest(tensor)

    monkeypatch.setattr(digests, "content_digest", noted)
    setting.begin()
    assert not threads
    held.set()
    assert setting.heard() == setting.before
    assert threading.main_thread() not in threads


def test_the_gate_hashes_what_is_left_before_the_optimizer_goes_on(setting: Setting, held: threading.Event) -> None:
    setting.begin()
    setting.step()
    held.set()
    assert setting.heard() == setting.before and setting.changed == []


def test_control_without_the_gate_the_digests_are_void(setting: Setting, held: threading.Event) -> None:
    setting.begin()
    setting.optimizer.step()
    held.set()
    found = setting.heard()
    assert len(setting.changed) >= 12 and not set(found) & set(setting.changed)
    assert found == {name: digest for name, digest in setting.before.items() if name not in setting.changed}


def test_control_without_the_guard_they_are_wrong(
    setting: Setting, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "all_changed", lambda self: [])
    setting.begin()
    setting.optimizer.step()
    held.set()
    assert setting.heard() != setting.before


def test_what_changes_outside_of_a_step_has_no_digest_and_is_cloned_the_next_time(
    setting: Setting, held: threading.Event
) -> None:
    def change() -> None:
        with torch.no_grad():
            setting.model[0].bias.add_(1)

    setting.begin()
    change()
    setting.step()
    held.set()
    assert "model/0.bias" not in setting.heard() and setting.changed == ["model/0.bias"]
    again = Setting()
    again.begin({"model/0.bias"})
    with torch.no_grad():
        again.model[0].bias.add_(1)
    again.step()
    assert again.heard() == again.before and again.changed == []
    again.reading.close()


def test_it_needs_no_gate_where_no_optimizer_is(setting: Setting) -> None:
    setting.leaves = [leaf for leaf in setting.leaves if "running" in leaf.name]
    setting.begin()
    assert setting.heard() == {leaf.name: setting.before[leaf.name] for leaf in setting.leaves}


def test_a_training_thread_that_is_not_the_main_one_looks_itself() -> None:
    made: list[Setting] = []

    def train() -> None:
        made.append(Setting())
        made[0].begin()
        made[0].backward()
        made[0].step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(30)
    assert made[0].heard() == made[0].before
    made[0].reading.close()


def test_dropped_ones_tell_nothing_and_let_go(setting: Setting, held: threading.Event) -> None:
    setting.begin()
    setting.reading.drop()
    setting.reading.gate()  # nobody waits
    held.set()
    setting.reading.close()
    assert not setting.is_told.is_set()
    assert setting.reading.on_read is not setting.tell, "leaves would be held as long as it is"


def test_copies_have_the_digest_of_what_they_were_made_of() -> None:
    for tensor in (torch.empty(0), torch.arange(6).view(2, 3).t(), torch.tensor(2), torch.ones(2, dtype=torch.bool)):
        assert content_digest(digests._cloned(tensor)) == content_digest(tensor)
