"""Whether anything has changed since another moment, for CheckFreq's ends of epochs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from stepwell.adapters.checkfreq.moment import StateMoment


class Meter:
    """Keeps what it measured in an array."""

    def __init__(self, dtype: str) -> None:
        self.values = numpy.zeros(5000, dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_a_change_in_the_middle_of_a_large_array_is_seen(dtype: str) -> None:
    meter = Meter(dtype)
    before = StateMoment([meter])
    assert before == StateMoment([meter])
    meter.values[2500] = 1
    assert before != StateMoment([meter])
