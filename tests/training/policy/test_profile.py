"""What is remembered of iterations: little, however long a checkpoint is under way, and the account stays right."""

from __future__ import annotations

import tracemalloc

import pytest

from stepwell.training.policy.profile import Profile

CLEAN = 0.010


def warm() -> Profile:
    profile = Profile()
    for _ in range(20):
        profile.note_iteration(CLEAN, stall=0.0, is_busy=False)
    return profile


def settle(profile: Profile) -> float:
    """End the stretch; what a checkpoint of it took from training."""
    for _ in range(4):
        profile.note_iteration(CLEAN, stall=0.0, is_busy=False)
    assert profile.checkpoint is not None
    return profile.checkpoint


def test_a_checkpoint_that_is_always_under_way_takes_no_memory_per_step() -> None:
    profile = warm()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(2):
            for number in range(20_000):
                profile.note_iteration(CLEAN + number * 1e-9, stall=1e-6 * number, is_busy=True)
                profile.note_checkpoint(1.0, is_odd=False)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 100_000, "100 bytes a step would be 2,000,000"


@pytest.mark.parametrize("iterations", [100, 10_000])
def test_the_account_of_a_long_stretch_is_that_of_each_of_its_iterations(iterations: int) -> None:
    profile = warm()
    for number in range(iterations):
        is_pause = number == iterations // 3  # the user's
        profile.note_iteration(5.0 if is_pause else CLEAN + 0.002, stall=0.001, is_busy=True)
        if number % (iterations // 10) == iterations // 10 - 1:
            profile.note_checkpoint(1.0, is_odd=False)
    assert settle(profile) == pytest.approx(iterations * 0.002 / 10, rel=0.05)
