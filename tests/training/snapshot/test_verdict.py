"""Who may say that nothing changed under a copy: torch counts a change when it is over, not when it begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.library import Library

import stepwell
from stepwell import Every, faults
from stepwell.training.snapshot.guard import Guard
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.snapshot.quiet_moment import Between
from tests.training.snapshot.truth import Case, Outcome, run

FLOATS = 1 << 22


class Sweep:
    """An in-place operation of torch's own make: half of the tensor, a wait until the copier has looked, the rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_running = False
        self.copier_looked = threading.Event()
        changed, main = Guard.changed, threading.current_thread()

        def noted(guard: Guard) -> str | None:
            found = changed(guard)
            if threading.current_thread() is not main:
                self.copier_looked.set()
            return found

        monkeypatch.setattr(Guard, "changed", noted)

    def kernel(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.view(-1)
        flat[: flat.numel() // 2].add_(1.0)
        assert self.copier_looked.wait(30)
        flat[flat.numel() // 2 :].add_(1.0)
        return tensor


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    made, library = Sweep(monkeypatch), Library("stepwell_test", "FRAGMENT")
    library.define("sweep_(Tensor(a!) tensor) -> Tensor(a!)")

    def counted(keys: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # as torch generates it for its own
            below = keys & torch._C._after_ADInplaceOrView_keyset
            torch.ops.stepwell_test.sweep_.default.redispatch(below, tensor)
        torch.autograd.graph.increment_version(tensor)
        return tensor

    library.impl("sweep_", made.kernel, "CPU")
    library.impl("sweep_", counted, "ADInplaceOrView", with_keyset=True)
    yield made
    library._destroy()


def problems(outcome: Outcome) -> list[str]:
    """Checkpoints that hold other bytes than those of their trigger; one that is missing is none."""
    return [problem for problem in outcome.wrong() if "no checkpoint" not in problem]


def test_a_change_that_runs_while_the_copier_looks_is_seen(
    sweep: Sweep, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_slow_copy", 0.1)
    layer = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def body(ckpt: stepwell.Checkpointer, number: int) -> None:
        if number == 1:
            with torch.no_grad():
                torch.ops.stepwell_test.sweep_(layer.weight)
        else:
            layer(torch.randn(8, 64)).sum().backward()
            optimizer.step()

    outcome = run(Case({"layer": layer, "optimizer": optimizer}, body), run_dir, steps=4, every=1)
    voids = [(event["step"], event["seen_by"]) for event in outcome.events if event["kind"] == "snapshot-void"]
    assert voids == [(1, "version guard")]
    assert problems(outcome) == []


def test_a_long_operation_of_torch_never_tears_a_checkpoint(run_dir: Path) -> None:
    """The same with what torch brings: whenever the copy ends, what is committed is the state at the trigger."""
    weight = nn.Parameter(torch.rand(FLOATS))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.zeros(FLOATS)

    def body(ckpt: stepwell.Checkpointer, number: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                weight.sin_()
        optimizer.step()

    outcome = run(Case({"w": {"weight": weight}, "optimizer": optimizer}, body), run_dir, steps=8, every=1)
    assert problems(outcome) == []


class Loop:
    """A run of one layer that takes a snapshot at each step."""

    def __init__(self, where: Path) -> None:
        self.layer = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.ckpt = stepwell.Checkpointer(where, policy=Every(steps=1), layer=self.layer, optimizer=self.optimizer)
        self.ckpt.save().wait(30)  # the arena is ready

    def step(self) -> Inflight:
        """The snapshot that was begun."""
        self.layer(torch.randn(2, 4)).sum().backward()
        self.optimizer.step()
        self.ckpt.step()
        inflight = self.ckpt._snapshotter._inflight
        assert inflight is not None
        return inflight


def test_the_main_thread_need_not_come_back_to_us(run_dir: Path) -> None:
    """An evaluation of an hour follows the last step of an epoch: a kill in it must not cost the epoch."""
    loop = Loop(run_dir)
    inflight = loop.step()
    deadline = time.monotonic() + 30
    while not inflight.done.is_set() and time.monotonic() < deadline:
        pass  # the user's own code
    assert inflight.done.is_set() and inflight.void is None
    loop.ckpt.close()


def test_a_training_thread_of_its_own_clears_a_snapshot_when_it_comes_back(run_dir: Path) -> None:
    """The main thread's moments say nothing about it."""
    made: list[Loop] = []
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    found: list[Inflight] = []

    def train() -> None:
        made.append(Loop(run_dir))
        found.append(made[0].step())
        begun.set()
        assert may_go_on.wait(30)
        found[0].wait()
        ended.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60) and found[0].copied.wait(30)
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        found[0].look()  # from another thread: it may only void
    assert not found[0].done.is_set()
    may_go_on.set()
    assert ended.wait(30) and found[0].void is None
    thread.join()
    made[0].ckpt.close()


def test_who_waits_in_the_training_thread_is_not_waited_for(run_dir: Path) -> None:
    loop = Loop(run_dir)
    loop.step()
    for future in loop.ckpt._outcomes.uploads.pending():
        assert "step-" in future.result(30)
    handle = loop.ckpt.save()
    handle.staging_completion.result(30)
    assert loop.ckpt.wait(30) is None and handle.upload_completion.done()
    loop.ckpt.close()


def test_a_moment_inside_an_operation_does_not_count() -> None:
    between, is_over, found = Between(), threading.Event(), []
    waiting = threading.Thread(target=lambda: found.append(between.wait(is_over)))
    with torch._C._AutoDispatchBelowADInplaceOrView():  # as in an operation that is written in Python
        waiting.start()
        deadline = time.monotonic() + 30
        while between._heard < 3 and time.monotonic() < deadline:
            pass
        assert between._heard >= 3 and not found
    while not found and time.monotonic() < deadline:
        pass
    assert found == [True]
    waiting.join()


def test_a_moment_may_come_in_a_function_without_builtins() -> None:
    """`__new__` of a named tuple is such a function. The call failed there, and training with it."""
    between, never, is_over = Between(), threading.Event(), threading.Event()

    def ask() -> None:
        for _ in range(20):
            assert between.wait(never)
        is_over.set()

    stay = eval("lambda is_over, numbers: [None for _ in numbers if not is_over()]", {"__builtins__": {}})
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while not is_over.is_set():
        stay(is_over.is_set, range(100_000))
    asking.join()


def test_the_next_one_that_waits_takes_the_call_of_the_last() -> None:
    """A call is never freed: a thousand Checkpointers in one process made a thousand of them."""
    never = threading.Event()

    def wait() -> Between:
        between, found = Between(), threading.Event()
        threading.Thread(target=lambda: (between.wait(never), found.set()), daemon=True).start()
        deadline = time.monotonic() + 30
        while not found.is_set() and time.monotonic() < deadline:
            pass
        assert found.is_set()
        return between

    first = wait()
    call = first._call
    first.close()
    second = wait()
    assert second._call is call
    second.close()
