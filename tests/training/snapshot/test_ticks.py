"""Durations of iterations by the host's clock."""

from __future__ import annotations

import pytest

from stepwell.training.cuda import ticks as module
from stepwell.training.cuda.ticks import Ticks


def test_each_iteration_comes_back_with_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 3.5, 10.0, 11.0])
    monkeypatch.setattr(module, "_now", lambda: next(times))
    ticks: Ticks[str] = Ticks()
    assert ticks.tick("nothing before it") == []
    assert ticks.tick("a") == [(2.0, "a")]
    assert ticks.tick("b") == [(0.5, "b")]
    ticks.skip()
    assert ticks.tick("a pause") == []
    assert ticks.tick("c") == [(1.0, "c")]
