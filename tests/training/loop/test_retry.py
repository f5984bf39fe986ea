"""Somebody catches an exception and makes another Checkpointer, in a notebook or a retry loop: nothing piles up."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError, StateError
from tests.levels.peer_node import until
from tests.training.loop.small import Small


def held() -> dict[str, object]:
    """What this process has: descriptors, threads by name, and children."""
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("stepwell"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threads, "children": len(children)}


def test_the_next_one_of_the_same_run_ends_the_one_that_was_left_open(run_dir: Path) -> None:
    held()  # what tests before this one left is collected
    found = []
    for attempt in range(3):
        small = Small(run_dir)
        small.ckpt.restore()
        with contextlib.suppress(RuntimeError):
            for batch in small.ckpt.data:
                if small.ckpt.status().step:
                    until(lambda pool=small.ckpt._snapshotter.pool: pool.is_ready)  # or the steps are over before
                small.update(batch)
                if small.ckpt.status().step == 3 + 2 * attempt:
                    raise RuntimeError("out of memory, say")
        found.append(held())
    small.ckpt.close(save=False)
    assert found[0] == found[1] == found[2]
    assert small.events("restore")[-1]["step"] >= 2
    assert ["another Checkpointer" in event["reason"] for event in small.events("ended")][:2] == [True, True]


def test_one_that_gave_way_says_so(run_dir: Path) -> None:
    first = Small(run_dir)
    first.train(stop_after=3)
    first.ckpt.save()
    second = Small(run_dir)
    assert second.ckpt.restore()
    with pytest.raises(ConfigError, match="closed"):
        first.ckpt.save()
    second.ckpt.close()


def test_a_restore_that_is_refused_leaves_nothing(run_dir: Path) -> None:
    before = held()  # tests before this one may have left something open
    Small(run_dir).train(epochs=1)
    found = []
    for _ in range(3):
        other = torch.nn.Linear(3, 3)
        ckpt = stepwell.Checkpointer(run_dir, model=other)
        with pytest.raises(StateError):
            ckpt.restore()
        found.append(held())
    assert found[0] == found[1] == found[2]
    assert found[0]["threads"] == before["threads"]


def test_after_a_refused_restore_another_try_works(run_dir: Path) -> None:
    Small(run_dir).train(epochs=1)
    again = Small(run_dir)
    with pytest.raises(stepwell.RestoreError):
        again.ckpt.restore(step=999)
    assert again.ckpt.restore()
    again.ckpt.close()


def test_a_start_that_fails_half_way_leaves_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    small = Small(run_dir)
    monkeypatch.setattr(small.ckpt._ending, "listen", lambda: (_ for _ in ()).throw(MemoryError("here")))
    with pytest.raises(MemoryError):
        small.ckpt.restore()
    assert held() == before
