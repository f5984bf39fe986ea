"""Who sees a change that happens while a leaf is being copied: the guard, `verify_snapshots`, or nobody.

`docs/guarantees.md` has the same table; the last test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stepwell
from stepwell import faults
from stepwell.training.snapshot.snapshotter import Snapshotter
from tests.training.snapshot.truth import Case, Outcome, run

Change = Callable[[nn.Linear, torch.optim.Optimizer], None]
GUARANTEES = Path(__file__).parents[3] / "docs" / "guarantees.md"


def in_place(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        layer.weight.add_(1.0)


def foreach(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        torch._foreach_add_([layer.weight], 1.0)


def through_data(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.data.add_(1.0)


def through_numpy(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.detach().numpy()[:] += 1.0


def new_storage(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.data = layer.weight.data + 1.0


def step_without_gate(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()


def optimizer_state(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[layer.weight]["exp_avg"].mul_(0.5)


def optimizer_state_replaced(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[layer.weight]
    state["exp_avg"] = state["exp_avg"] * 0.5


# How it happens -> (the change, seen by the guard, seen by verify_snapshots, bytes would be wrong without both)
CHANGES: dict[str, tuple[Change, bool, bool, bool]] = {
    "in-place operation under no_grad": (in_place, True, True, True),
    "torch._foreach operation": (foreach, True, True, True),
    "write through .data": (through_data, False, True, True),
    "write through numpy": (through_numpy, False, True, True),
    "parameter.data = other tensor": (new_storage, True, False, False),
    "optimizer step past the gate": (step_without_gate, True, True, True),
    "fused optimizer step past the gate": (step_without_gate, True, True, True),
    "optimizer state changed in place": (optimizer_state, True, True, True),
    "optimizer state replaced": (optimizer_state_replaced, True, False, False),
}


def changed_run(change: Change, where: Path, *, verify: bool, fused: bool = False) -> Outcome:
    """One snapshot, and the change right after its trigger while the slowed copy waits."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), fused=fused)

    def body(ckpt: stepwell.Checkpointer, number: int) -> None:
        if number == 1:
            change(layer, optimizer)
            return
        layer(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    case = Case({"layer": layer, "optimizer": optimizer}, body, {"verify_snapshots": verify})
    return run(case, where, steps=2, every=1)


@pytest.fixture(autouse=True)
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_slow_copy", 0.1)


def first_void(outcome: Outcome) -> str | None:
    found = [event for event in outcome.events if event["kind"] == "snapshot-void" and event["step"] == 1]
    return found[0]["seen_by"] if found else None


@pytest.mark.parametrize("how", CHANGES)
def test_who_sees_it(how: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, guard_sees, verify_sees, is_torn = CHANGES[how]
    if change is step_without_gate:
        monkeypatch.setattr(Snapshotter, "gate", lambda self: 0.0)
    fused = how.startswith("fused")
    plain = changed_run(change, run_dir / "plain", verify=False, fused=fused)
    assert (first_void(plain) == "version guard") is guard_sees
    monkeypatch.setattr("stepwell.training.snapshot.guard.Guard.changed", lambda self: None)
    verified = changed_run(change, run_dir / "verified", verify=True, fused=fused)
    assert (first_void(verified) == "verify_snapshots") is verify_sees
    neither = changed_run(change, run_dir / "neither", verify=False, fused=fused)
    torn = [problem for problem in neither.wrong() if problem.startswith("step 1: ") and "no checkpoint" not in problem]
    assert bool(torn) is is_torn


def test_void_snapshot_is_taken_again_blocking(run_dir: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())

    def body(ckpt: stepwell.Checkpointer, number: int) -> None:
        if number == 1:
            in_place(layer, optimizer)
        layer(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    outcome = run(Case({"layer": layer, "optimizer": optimizer}, body), run_dir, steps=4, every=1)
    assert first_void(outcome) == "version guard"
    taken = {event["step"]: event["strategy"] for event in outcome.events if event["kind"] == "snapshot"}
    assert taken[2] == "blocking"
    assert [problem for problem in outcome.wrong() if "step 1" not in problem] == []


def test_the_documented_table_is_this_one() -> None:
    rows = dict(
        re.findall(
            r"^\| ([^|]+?) \| ((?:yes|no) \| (?:yes|no) \| (?:yes|no)) \|$", GUARANTEES.read_text(), re.MULTILINE
        )
    )
    words = {True: "yes", False: "no"}
    for how, (_, guard_sees, verify_sees, is_torn) in CHANGES.items():
        assert rows[how] == f"{words[guard_sees]} | {words[verify_sees]} | {words[is_torn]}", how
