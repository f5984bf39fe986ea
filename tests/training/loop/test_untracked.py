"""Training that goes past the tracked objects is named at the terminal, as is one that nothing steps."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import stepwell
from tests.training.loop.small import Small


@pytest.fixture(autouse=True)
def at_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")


def test_an_optimizer_that_takes_the_place_of_the_tracked_one(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(run_dir)
    small.optimizer = torch.optim.SGD(small.model.parameters(), lr=0.01)
    small.train(epochs=9)
    found = [line for line in caplog.messages if "SGD steps parameters of model= but is not tracked" in line]
    assert len(found) == 1 and "optimizer= has the same parameters" in found[0]
    assert any("50 batches since step 0" in line for line in caplog.messages)


def test_an_optimizer_that_was_never_tracked(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(run_dir / "unused")
    ckpt = stepwell.Checkpointer(run_dir / "run", model=small.model, data=small.loader)
    for _ in ckpt.epochs(1):
        for batch in ckpt.data:
            small.update(batch)
    assert sum("Adam steps parameters of model= but is not tracked" in line for line in caplog.messages) == 1
    assert not any("same parameters" in line for line in caplog.messages)
    small.ckpt.close()


def test_a_model_and_an_optimizer_that_are_made_anew(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(run_dir)
    small.model = torch.nn.Linear(8, 1)
    small.optimizer = torch.optim.Adam(small.model.parameters())
    small.train(epochs=20)
    waits = [line for line in caplog.messages if "no tracked optimizer has stepped" in line]
    assert [line.split()[0] for line in waits] == ["50", "100"]


def test_nothing_is_said_where_all_is_well(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither of a tracked wrapper whose inner optimizer steps, nor of others' parameters, nor of long accumulation."""

    class Wrapper(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], lr=0.0)
            self.inner = inner

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.inner.step()

    model, other = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    optimizer = Wrapper(torch.optim.Adam(model.parameters()))
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    batches = [torch.ones(2, 8)] * 70
    ckpt = stepwell.Checkpointer(run_dir, model=model, optimizer=optimizer, data=batches)
    for _ in ckpt.epochs(2):
        for number, batch in enumerate(ckpt.data):
            model(batch).sum().backward()
            other(batch).sum().backward()
            foreign.step()
            if number == 69:
                optimizer.step()
                optimizer.zero_grad()
    assert not [line for line in caplog.messages if "tracked" in line]


def test_the_hook_is_gone_with_the_run(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(run_dir)
    small.train(epochs=1)
    optimizer = torch.optim.SGD(small.model.parameters(), lr=0.01)
    optimizer.step()
    assert not [line for line in caplog.messages if "not tracked" in line]


def test_a_loop_that_is_left_early_is_named(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(run_dir)
    small.train(epochs=3, stop_after=8)
    small.ckpt.close()
    found = [line for line in caplog.messages if "a restart trains on" in line]
    assert found == [
        "The loop ended in epoch 2 of 3, at step 8: a restart trains on. To end the run there, call ckpt.finish() "
        "instead of break"
    ]
    caplog.clear()
    again = Small(run_dir)
    assert again.ckpt.restore()
    again.train(epochs=3)
    assert not [line for line in caplog.messages if "a restart trains on" in line]
