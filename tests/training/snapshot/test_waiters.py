"""Other threads may wait for snapshots: that opens the gate for none that comes later."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import Every, faults
from stepwell.events.journal import read_events
from stepwell.training.snapshot.inflight import Inflight


def test_a_thread_that_waited_for_one_snapshot_leaves_the_next_one_guarded(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(2, 600)] * 9
    ckpt = stepwell.Checkpointer(run_dir, model=model, optimizer=optimizer, data=batches, policy=Every(steps=1))
    ckpt.restore()
    snapshotter, has_waited, has_begun = ckpt._snapshotter, threading.Event(), threading.Event()
    wait = Inflight.wait

    def wait_long(inflight: Inflight) -> None:
        wait(inflight)
        if threading.current_thread() is waiter:
            has_waited.set()
            assert has_begun.wait(30)

    def update() -> None:
        model(next(batches_left)).sum().backward()
        optimizer.step()

    monkeypatch.setattr(Inflight, "wait", wait_long)
    waiter = threading.Thread(target=snapshotter.drain)
    batches_left = iter(ckpt.data)
    update()
    update()
    assert snapshotter.pool.wait_prepared(30)
    model(next(batches_left))
    before = snapshotter._inflight
    assert before is not None
    waiter.start()
    before.gate()  # this thread is the one that clears it
    assert has_waited.wait(30)
    monkeypatch.setattr(faults, "_slow_copy", 0.5)
    optimizer.step()
    next(batches_left)
    assert snapshotter._inflight not in (None, before)
    has_begun.set()
    waiter.join(30)
    optimizer.step()
    ckpt.close()
    assert [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "snapshot-void"] == []
