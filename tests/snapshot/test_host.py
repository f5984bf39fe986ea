"""Copies by the host that several threads share."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from stepwell.snapshot.host import HostCopy, HostWork


def test_after_a_stop_no_thread_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the slot of a lost snapshot would be written to while the next one fills it."""
    source, target = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    copies = [HostCopy(source[n : n + 1], target.data_ptr() + n, 1, start=n) for n in range(8)]
    begun, may_go_on, run = threading.Event(), threading.Event(), HostCopy.run

    def slow(self: HostCopy) -> None:
        begun.set()
        may_go_on.wait(30)
        run(self)

    monkeypatch.setattr(HostCopy, "run", slow)
    work = HostWork(copies, lambda start: None)
    helper = threading.Thread(target=work.help)
    helper.start()
    assert begun.wait(30)
    stopper = threading.Thread(target=work.stop, args=(RuntimeError("lost"),))
    stopper.start()
    deadline = time.monotonic() + 30
    while work._count > 1 and time.monotonic() < deadline:  # the stopper passes over what is left
        time.sleep(0.001)
    assert work._count == 1
    assert stopper.is_alive()  # it waits for the one that was begun
    may_go_on.set()
    stopper.join(30)
    assert not stopper.is_alive()
    after = target.clone()
    helper.join(30)
    assert torch.equal(target, after)
    assert target.sum() == 1
