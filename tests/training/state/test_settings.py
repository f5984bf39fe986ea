"""What the script set: a change between two starts is found, a schedule at work is none."""

from __future__ import annotations

from typing import Any

import torch

from stepwell.training.state.settings import differences, settings
from stepwell.training.state.tracked import track


def script(rate: float, size: int = 10) -> Any:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, size)
    return track({"model": model, "optimizer": optimizer, "scheduler": scheduler, "history": [0.1] * 100})


def test_a_changed_rate_is_named_with_all_three_values() -> None:
    before, now, in_use = settings(script(0.1)), settings(script(0.05)), settings(script(0.1))
    in_use["optimizer.param_groups.0.lr"] = 0.025
    found = differences(before, now, in_use)
    assert "optimizer.param_groups.0.lr was 0.1, is 0.05 in the script, and stays 0.025" in found
    assert any(line.startswith("scheduler.base_lrs.0 was 0.1") for line in found)


def test_a_changed_schedule_is_named() -> None:
    before, now = settings(script(0.1)), settings(script(0.1, size=3))
    assert differences(before, now, before) == [
        "scheduler.step_size was 10, is 3 in the script, and stays 10",
    ]


def test_nothing_is_said_of_what_training_changed() -> None:
    before, in_use = settings(script(0.1)), settings(script(0.1))
    in_use["optimizer.param_groups.0.lr"] = 0.001
    assert differences(before, before, in_use) == []


def test_an_older_checkpoint_does_not_know() -> None:
    assert differences(None, settings(script(0.1)), {}) == []


def test_data_and_weights_are_no_settings() -> None:
    found = settings(script(0.1))
    assert not any(name.startswith(("model", "history")) for name in found)
    assert len(settings(track({"many": {str(i): i for i in range(1000)}}))) == 64
