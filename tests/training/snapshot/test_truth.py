"""A checkpoint taken at step n equals the state at step n, however slow the copy and whatever the optimizer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import stepwell
from stepwell import faults
from stepwell.training.snapshot import arrange, host_copy, program
from stepwell.training.snapshot.guard import Guard
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.training.state.roles import Role, assign_roles
from tests.ranks.conftest import soak
from tests.training.snapshot.cases import CASES, averaged_through_data
from tests.training.snapshot.truth import Case, Outcome, run


@pytest.fixture(autouse=True)
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_slow_copy", 0.01)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("auto", name) for name in CASES]
    + [("blocking", name) if name == "several" else soak("blocking", name) for name in CASES],
)
def test_checkpoint_equals_state_at_its_step(name: str, strategy: str, run_dir: Path) -> None:
    case = CASES[name]("cpu")
    case.options["snapshot"] = strategy
    outcome = run(case, run_dir)
    assert outcome.wrong() == []
    assert len(outcome.found) >= 2
    assert "snapshot-void" not in outcome.kinds()


def late(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The same loop; the first snapshot's copies begin only after the next iteration's optimizer step."""
    may_copy, inner = threading.Event(), case.body
    monkeypatch.setattr(host_copy, "slow_copy", lambda: may_copy.wait(30))

    def body(ckpt: stepwell.Checkpointer, number: int) -> None:
        inner(ckpt, number)
        if ckpt._snapshotter._inflight is not None:
            may_copy.set()  # for good: what comes after a void snapshot is taken blocking
            ckpt._snapshotter._inflight.copied.wait(30)

    return Case(case.tracked, body, case.options)


@pytest.mark.parametrize("name", ["adam", "adam-foreach", "sgd", "several"])
def test_control_without_the_gate(name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gate the guard voids snapshots; without the guard too, the bytes are wrong."""
    monkeypatch.setattr(Snapshotter, "gate", lambda self: 0.0)
    outcome = run(late(CASES[name]("cpu"), monkeypatch), run_dir / "guarded", steps=3)
    assert outcome.wrong()
    assert "snapshot-void" in outcome.kinds()
    monkeypatch.setattr(Guard, "changed", lambda self: None)
    outcome = run(late(CASES[name]("cpu"), monkeypatch), run_dir / "bare", steps=3)
    assert any(problem.endswith("weight") for problem in outcome.wrong())


@pytest.mark.parametrize("name", ["adam", "ema", "spectral"])
def test_control_without_the_clone(name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied late like managed leaves, buffers and averages that change in forward or after the step are torn."""

    def all_late(*arguments: object) -> list[Role]:
        roles = assign_roles(*arguments)  # type: ignore[arg-type]
        return [Role("managed", role.meaning, role.live) for role in roles]

    monkeypatch.setattr(arrange, "assign_roles", all_late)
    monkeypatch.setattr(program, "TINY_BYTES", -1)
    assert run(CASES[name]("cpu"), run_dir, steps=4).wrong()


def test_frozen_leaves_are_stored_once_and_by_reference(run_dir: Path) -> None:
    outcome = run(CASES["frozen-base"]("cpu"), run_dir, steps=7)
    assert outcome.wrong() == []
    frozen = sorted(run_dir.glob("step-*/rank-00000.frozen.safetensors"))
    assert len(frozen) == 3
    assert len({path.stat().st_ino for path in frozen}) == 1


def test_average_that_looks_frozen_is_not_believed(run_dir: Path) -> None:
    """Changed through `.data` no version shows it: the sample does, from the first step on."""
    outcome = run(averaged_through_data("cpu"), run_dir, steps=7)
    assert outcome.wrong() == []
    assert not list(run_dir.glob("step-*/*.frozen.safetensors"))


def test_frozen_leaf_that_starts_to_move(run_dir: Path) -> None:
    """Unfreezing later: the stale reference is never committed as the truth."""
    case = CASES["frozen-base"]("cpu")
    inner, model = case.body, case.tracked["model"]

    def body(ckpt: object, number: int) -> None:
        inner(ckpt, number)  # type: ignore[arg-type]
        if number >= 3:
            for parameter in model.parameters():
                parameter.data.add_(1.0)

    case.body = body
    outcome = run(case, run_dir, steps=9)
    wrong = [problem for problem in outcome.wrong() if "no checkpoint" not in problem]
    assert wrong == []
    assert max(outcome.found) >= 6
    void = [event for event in outcome.events if event["kind"] == "snapshot-void"]
    assert void and void[0]["seen_by"] == "fingerprint of a frozen leaf"


def test_outcome_sees_a_wrong_byte(run_dir: Path) -> None:
    """Control of the comparison itself."""
    outcome = run(CASES["sgd"]("cpu"), run_dir, steps=3)
    name = next(name for name in outcome.found[2] if name.endswith("weight"))
    outcome.found[2][name].view(-1)[0] += 1
    assert outcome.wrong() == [f"step 2: {name}"]
    assert Outcome({1: {}}, {}, []).wrong() == ["step 1: no checkpoint"]
