"""Fixed frequencies: what they answer at every moment."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.errors import ConfigError
from stepwell.training.policy.every import Every, Moment, Never


def moment(**changes: Any) -> Moment:
    facts = {"step": 100, "steps_since": 0, "seconds_since": 0.0, "epochs_since": 0, "is_epoch_end": False}
    return Moment(**{**facts, **changes})


@pytest.mark.parametrize(
    ("policy", "changes", "is_due"),
    [
        (Every(steps=10), {"steps_since": 9}, False),
        (Every(steps=10), {"steps_since": 10}, True),
        (Every(steps=10), {"steps_since": 11}, True),
        (Every(steps=10), {"seconds_since": 1e9}, False),
        (Every(seconds=5), {"seconds_since": 4.9}, False),
        (Every(seconds=5), {"seconds_since": 5.0}, True),
        (Every(epochs=1), {"is_epoch_end": True}, True),
        (Every(epochs=2), {"is_epoch_end": True}, False),
        (Every(epochs=2), {"is_epoch_end": True, "epochs_since": 1}, True),
        (Every(epochs=1), {"epochs_since": 5}, False),
        (Every(steps=10, seconds=5), {"seconds_since": 6.0}, True),
        (Every(steps=10, seconds=5), {"steps_since": 12}, True),
        (Never(), {"steps_since": 10**9, "seconds_since": 1e9, "is_epoch_end": True}, False),
    ],
)
def test_due(policy: Every | Never, changes: dict[str, Any], is_due: bool) -> None:
    assert policy.is_due(moment(**changes)) is is_due


@pytest.mark.parametrize("options", [{}, {"steps": 0}, {"steps": -1}, {"seconds": 0}, {"seconds": -1.0}, {"epochs": 0}])
def test_what_makes_no_sense_is_refused_with_what_to_do(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give at least one of steps"):
        Every(**options)
