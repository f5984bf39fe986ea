"""The end of a run has its last step on disk, or raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import Every
from stepwell.errors import PersistError
from stepwell.events.journal import read_events
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.lineage import create_next
from stepwell.storage.store.paths import RunPaths
from stepwell.training.snapshot import host_copy
from stepwell.training.snapshot.inflight import Inflight


class Loop:
    """A checkpoint every third step, of leaves that are copied while training runs."""

    def __init__(self, where: Path) -> None:
        self.layer = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        tracked = {"layer": self.layer, "optimizer": self.optimizer}
        self.ckpt = stepwell.Checkpointer(where, policy=Every(steps=3), data=[torch.ones(1, 64)] * 99, **tracked)
        self.ckpt.restore()
        self.ckpt.save().wait(30)
        self._batches = iter(self.ckpt.data)

    def train(self, steps: int) -> None:
        """The last of these steps is over when the next batch is asked for."""
        for _ in range(steps):
            self.layer(next(self._batches)).sum().backward()
            self.optimizer.step()

    def ask(self) -> None:
        next(self._batches)


def close(loop: Loop) -> None:
    loop.ckpt.close()


def leave(loop: Loop) -> None:
    with loop.ckpt:
        pass


@pytest.mark.parametrize("end", [close, leave])
def test_a_copy_that_turns_void_at_the_end_is_taken_again(
    end: Callable[[Loop], None], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(run_dir)
    loop.train(2)
    may_copy, wait = threading.Event(), Inflight.wait

    def let_copy(inflight: Inflight) -> None:
        may_copy.set()
        wait(inflight)

    monkeypatch.setattr(host_copy, "slow_copy", lambda: may_copy.wait(30))
    monkeypatch.setattr(Inflight, "wait", let_copy)
    loop.train(1)
    loop.ask()
    with torch.no_grad():
        loop.layer.weight.add_(1.0)
    end(loop)
    voids = [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "snapshot-void"]
    assert voids == [3]
    assert max(entry.id.step for entry in scan(RunPaths(run_dir)) if entry.is_good) == 3


def test_a_last_save_that_was_given_up_raises(run_dir: Path) -> None:
    """Another process has taken the run over."""
    loop = Loop(run_dir)
    create_next(loop.ckpt._paths, parent=1, step=0)
    loop.train(1)
    with pytest.raises(PersistError, match="lineage"):
        loop.ckpt.close()
