"""Iterations on a device are timed by the device: what the host needs to launch them tells nothing."""

from __future__ import annotations

import pytest
import torch

from stepwell.training.cuda.ticks import Ticks

pytestmark = pytest.mark.gpu


def test_durations_are_those_of_the_device() -> None:
    ticks: Ticks[int] = Ticks()
    clock = 50_000_000  # cycles: some 30 ms
    torch.cuda.synchronize()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    torch.cuda._sleep(clock)
    after.record()
    found = ticks.tick(-1)
    for number in range(4):
        torch.cuda._sleep(clock)
        found += ticks.tick(number)
    assert len(found) < 4, "nothing waited for the device"
    torch.cuda.synchronize()
    ticks.skip()
    found += ticks.tick(4)
    assert [number for _, number in found] == [0, 1, 2, 3]
    one = before.elapsed_time(after) / 1e3
    assert all(seconds == pytest.approx(one, rel=0.2) for seconds, _ in found)
