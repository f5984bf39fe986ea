"""A snapshot whose copies cannot be issued is void, and nobody waits for it."""

from __future__ import annotations

from typing import Any

import torch

from stepwell.handover.memory import Arena, ArenaShape
from stepwell.training.snapshot.device_copy import DeviceJob
from stepwell.training.snapshot.inflight import Inflight
from stepwell.training.snapshot.quiet_moment import Between


class Stream:
    """Stands for one of a device: notes that it was waited for."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def synchronize(self) -> None:
        self._said.append("synchronized")


def job(said: list[str], failing: bool) -> DeviceJob:
    streams: Any = (Stream(said), Stream(said))
    nothing: Any = None
    made = DeviceJob(torch.device("cpu"), "overlap", nothing, nothing, (0, 0), True, streams, nothing, [], done=nothing)
    if failing:
        made.issue = fail  # type: ignore[method-assign]
    return made


def fail() -> None:
    raise RuntimeError("no memory for a stream")


def test_the_second_job_is_not_waited_for_when_the_first_cannot_be_issued() -> None:
    arena = Arena.allocate(ArenaShape(1, 1, 4096, 0))
    said: list[str] = []
    jobs = [job(said, True), job(said, False)]
    plan: Any = None
    inflight = Inflight(step=1, sequence=1, slot=0, arena=arena, plan=plan, strategy="overlap", jobs=jobs)
    inflight.complete(
        lambda: said.append("announced"), lambda host: None, lambda settled: said.append("settled"), Between()
    )
    assert all(each.issued.is_set() for each in jobs), "an optimizer may be at the gate"
    assert said == ["synchronized"] * 4 + ["settled"], "what was issued is over before the slot is free"
    assert inflight.void is not None and "no memory for a stream" in inflight.void.seen_by
    assert arena.is_void(0, 1)
    arena.close()
