"""Copies by the host that several threads share."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from stepwell.training.snapshot import host_copy
from stepwell.training.snapshot.host_copy import HostCopy, HostWork
from stepwell.training.snapshot.program import CopySource


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


def test_many_small_leaves_are_copied_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as one by one, each start told once, and the right names for what is not finite."""
    dice = torch.Generator().manual_seed(1)
    kinds = [torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float64]
    tensors = []
    for number in range(700):
        kind = kinds[number // 40 % len(kinds)]
        shape = (int(torch.randint(1, 9, (), generator=dice)), 4) if number % 50 else (20_000, 2)
        tensors.append((torch.randn(shape, generator=dice) * 100).to(kind))
    tensors[100] = tensors[100].expand(3, *tensors[100].shape)[1:2]  # a view
    tensors[101] = torch.randn(8, 6, generator=dice).t()  # not contiguous
    tensors[10][0, 0], tensors[95][-1, -1] = float("nan"), float("inf")
    tensors[170] = tensors[170].conj()
    sources, start = [], 0
    for number, tensor in enumerate(tensors):
        start = -(-start // tensor.element_size()) * tensor.element_size()
        is_checked = tensor.is_floating_point() and number % 80 < 60
        sources.append(CopySource(f"leaf{number}", tensor, start, tensor.nbytes, True, is_checked))
        start += tensor.nbytes
    found = {}
    for many in (1, 10**9):
        monkeypatch.setattr(host_copy, "_MANY", many)
        image, told = torch.zeros(start, dtype=torch.uint8), []
        copies = host_copy.line_up(sources, image.data_ptr())
        assert any(isinstance(copy, host_copy.HostGroup) for copy in copies) == (many == 1)
        work = HostWork(copies, told.append)
        threads = [threading.Thread(target=work.help) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert work.error is None and work.copied.is_set()
        assert sorted(told) == sorted({copy.start for copy in copies})
        found[many] = (image, set(work.suspects))
    assert found[1][1] == found[10**9][1] == {"leaf10", "leaf95"}
    assert torch.equal(found[1][0], found[10**9][0])
