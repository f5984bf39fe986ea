"""Whatever prevents checkpoints for long is a warning with its reason, and in status()."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepwell import Every
from stepwell.training.loop import overdue
from tests.training.loop.small import Small


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "_LEAST_SECONDS", 0.05)
    monkeypatch.setattr(overdue, "_FIRST_SECONDS", 0.05)


def endless(small: Small) -> Iterator[torch.Tensor]:
    for _ in small.ckpt.epochs(10**6):
        yield from small.ckpt.data


def test_an_agent_that_is_stopped_is_named_as_the_reason(run_dir: Path) -> None:
    small = Small(run_dir, {"policy": Every(steps=1)})
    small.ckpt.restore()
    small.ckpt.save().wait(30)
    agent, before = small.ckpt.status().agent_pid, time.time()
    os.kill(agent, signal.SIGSTOP)
    batches = endless(small)
    while "all buffers" not in (small.ckpt.status().overdue_because or ""):
        assert time.time() < before + 30
        small.update(next(batches))
    since = small.ckpt.status().overdue_since
    assert since is not None and since > before - 1
    os.kill(agent, signal.SIGCONT)
    while small.ckpt.status().overdue_since is not None:
        assert time.time() < before + 60
        small.update(next(batches))
    small.ckpt.close()
    late, again = small.events("overdue"), small.events("on-time")
    assert late[0]["since_step"] <= late[0]["step"] and again[0]["step"] >= late[0]["since_step"]


def test_a_checkpoint_in_time_is_no_news(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "_LEAST_SECONDS", 60.0)
    small = Small(run_dir, {"policy": Every(steps=2)})
    small.ckpt.restore()
    for batch in small.ckpt.data:
        small.update(batch)
        assert small.ckpt.status().overdue_since is None
    small.ckpt.close()
    assert not small.events("overdue") and small.events("commit")
