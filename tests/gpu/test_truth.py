"""On CUDA: a checkpoint taken at step n equals the state at step n, for every strategy and however slow the copy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.training.snapshot import arrange, device_copy
from stepwell.training.snapshot.guard import Guard
from stepwell.training.snapshot.snapshotter import Snapshotter
from stepwell.training.state.roles import Role, assign_roles
from tests.training.snapshot.cases import CASES, CUDA_CASES
from tests.training.snapshot.truth import Case, Outcome, run

pytestmark = pytest.mark.gpu
SLOW_CYCLES = 40_000_000  # about 20 ms of the side stream before anything is copied


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    issue = device_copy.DeviceJob.issue

    def sleeping(self: device_copy.DeviceJob) -> None:
        with torch.cuda.stream(self.streams[0]):
            torch.cuda._sleep(SLOW_CYCLES)
        issue(self)

    monkeypatch.setattr(device_copy.DeviceJob, "issue", sleeping)
    yield


def strategies(outcome: Outcome) -> set[str]:
    return {event["strategy"] for event in outcome.events if event["kind"] == "snapshot"}


@pytest.mark.parametrize("strategy", ["overlap", "device", "blocking"])
@pytest.mark.parametrize("name", CUDA_CASES)
def test_checkpoint_equals_state_at_its_step(name: str, strategy: str, run_dir: Path, slow_copy: None) -> None:
    case = CUDA_CASES[name]("cuda")
    case.options["snapshot"] = strategy
    outcome = run(case, run_dir)
    assert outcome.wrong() == []
    assert len(outcome.found) >= 2
    assert strategies(outcome) == {strategy}
    assert "snapshot-void" not in outcome.kinds()


@pytest.mark.parametrize("name", ["adam", "adam-foreach", "adamw-fused", "sgd"])
def test_control_without_the_gate(name: str, run_dir: Path, slow_copy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshotter, "gate", lambda self: 0.0)
    monkeypatch.setattr(Guard, "changed", lambda self: None)
    case = CUDA_CASES[name]("cuda")
    case.options["snapshot"] = "overlap"
    assert any("weight" in problem for problem in run(case, run_dir, steps=3).wrong())


@pytest.mark.parametrize("name", ["adam", "spectral", "ema"])
def test_control_without_the_clone(name: str, run_dir: Path, slow_copy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_late(*arguments: Any) -> list[Role]:
        return [Role("managed", role.meaning, role.live) for role in assign_roles(*arguments)]

    monkeypatch.setattr(arrange, "assign_roles", all_late)
    case = CUDA_CASES[name]("cuda")
    case.options["snapshot"] = "overlap"
    assert run(case, run_dir, steps=4).wrong()


def big_case() -> Case:
    """About 200 MB on the device."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def body(ckpt: Any, number: int) -> None:
        model(torch.randn(8, 2048, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Case({"model": model, "optimizer": optimizer}, body)


def test_device_snapshot_without_room_falls_back(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory really is held until less than the state is spare: no out-of-memory, the event has the reason."""
    case = big_case()
    for number in range(2):
        case.body(None, number)  # the optimizer's state is there now
    hold = device_copy.spare_bytes(torch.device("cuda", 0)) - (100 << 20)
    held = torch.empty(hold, dtype=torch.uint8, device="cuda")
    case.options["snapshot"] = "device"
    outcome = run(case, run_dir)
    del held
    assert outcome.wrong() == []
    assert strategies(outcome) == {"overlap"}
    reasons = [event["reason"] for event in outcome.events if event["kind"] == "strategy"]
    assert len(reasons) == 1 and "do not fit" in reasons[0]


OUT_OF_MEMORY = """
import sys
from pathlib import Path
import torch
from stepwell.training.snapshot import strategy as choice
from tests.training.snapshot.truth import Case, run

choice.spare_bytes = lambda device: 1 << 60  # the estimate is wrong: only the allocator says no
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=False)

def body(ckpt, number):
    model(torch.randn(8, 2048, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

body(None, 0)
torch.cuda.empty_cache()
parameters = sum(p.nbytes for p in model.parameters())
# Room for the gradients and a little more, so the state (parameters and momentum) cannot be cloned.
held = torch.empty(torch.cuda.mem_get_info()[0] - int(1.4 * parameters), dtype=torch.uint8, device="cuda")
outcome = run(Case({"model": model, "optimizer": optimizer}, body, {"snapshot": "device"}), Path(sys.argv[1]), steps=3)
assert outcome.wrong() == []
reasons = [event["reason"] for event in outcome.events if event["kind"] == "strategy"]
assert "the device is out of memory" in reasons, reasons
"""


def test_out_of_memory_in_the_clone_falls_back(run_dir: Path) -> None:
    """In a process of its own: what other tests leave in the allocator must not become room."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", OUT_OF_MEMORY, str(run_dir)], env=environment, check=True, timeout=100)


def test_automatic_choice_gives_the_same_bytes(run_dir: Path) -> None:
    case = big_case()
    outcome = run(case, run_dir, steps=12)
    assert outcome.wrong() == []


def test_arena_is_page_locked(run_dir: Path) -> None:
    outcome = run(big_case(), run_dir, steps=3)
    assert [event["page_locked"] for event in outcome.events if event["kind"] == "arena"] == [True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_noticed(bad: float, run_dir: Path) -> None:
    case = CASES["adam"]("cuda")
    inner, model = case.body, case.tracked["model"]

    def body(ckpt: Any, number: int) -> None:
        inner(ckpt, number)
        if number == 3:
            with torch.no_grad():
                model[4].weight[3, 5] = bad

    case.body = body
    outcome = run(case, run_dir, steps=4)
    suspects = [(event["step"], event["first"]) for event in outcome.events if event["kind"] == "suspect"]
    assert suspects == [(4, "model/4.weight")]


def test_large_finite_values_are_not_suspect(run_dir: Path) -> None:
    """A norm that overflows is no proof: the values themselves are looked at."""
    case = CASES["sgd"]("cuda")
    with torch.no_grad():
        case.tracked["model"][0].weight.fill_(3e38)
    case.body = lambda ckpt, number: ckpt._steps.on_optimizer_step()
    outcome = run(case, run_dir, steps=2)
    assert "suspect" not in outcome.kinds()
