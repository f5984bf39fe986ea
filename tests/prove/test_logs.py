"""Logged values: every occurrence of a step counts, and nothing may be missing or new."""

from __future__ import annotations

from typing import Any

from stepwell.prove.logs import NOTHING, LogDifference, compare_logs


def log(step: int, lineage: int = 1, **values: Any) -> dict[str, Any]:
    return {"kind": "log", "lineage": lineage, "step": step, "values": values}


REFERENCE = [log(1, loss=0.1), log(2, loss=0.2), log(2, accuracy=0.5), log(3, loss=float("nan"))]


def test_equal_with_steps_done_again_and_a_value_cut_off_by_a_kill() -> None:
    # Lineage 1 was killed between the two values of step 2.
    killed = [
        log(1, loss=0.1),
        log(2, loss=0.2),
        log(2, 2, loss=0.2),
        log(2, 2, accuracy=0.5),
        log(3, 2, loss=float("nan")),
    ]
    found = compare_logs(REFERENCE, killed)
    assert found.is_equal and found.first is None and found.names == {}
    assert (found.steps, found.values, found.repeated) == (3, 4, 5)


def test_one_wrong_occurrence_is_enough() -> None:
    killed = [*REFERENCE, log(3, 2, loss=0.3)]
    found = compare_logs(REFERENCE, killed)
    assert found.first == LogDifference(3, "loss", "NaN", "0.3", 2)
    assert found.names == {"loss": 1}


def test_the_first_step_is_named_not_the_first_line() -> None:
    killed = [log(1, loss=0.1), log(3, loss=9), log(2, 2, loss=0.7), log(2, 2, accuracy=0.5)]
    found = compare_logs(REFERENCE, killed)
    assert found.first == LogDifference(2, "loss", "0.2", "0.7", 2)
    assert found.names == {"loss": 2}


def test_the_last_bit_counts() -> None:
    assert not compare_logs([log(1, loss=0.1)], [log(1, loss=0.1 + 2**-56)]).is_equal
    assert not compare_logs([log(1, loss=1)], [log(1, loss=1.0)]).is_equal


def test_a_missing_value_and_a_new_one_are_differences() -> None:
    assert compare_logs(REFERENCE, REFERENCE[:-1]).first == LogDifference(3, "loss", "NaN", NOTHING, None)
    new = compare_logs(REFERENCE, [*REFERENCE, log(4, loss=0.4)])
    assert new.first == LogDifference(4, "loss", NOTHING, "0.4", 1)
    twice = compare_logs([log(1, loss=1)], [log(1, loss=1), log(1, loss=1)])
    assert twice.first == LogDifference(1, "loss", NOTHING, "1", 1)


def test_ignored_names_are_not_looked_at() -> None:
    one, two = [log(1, loss=1, seconds=0.1)], [log(1, loss=1, seconds=0.2)]
    assert compare_logs(one, two).first is not None
    assert compare_logs(one, two, ignore=["seconds"]).is_equal


def test_nothing_logged_is_equal_and_says_that_it_is_nothing() -> None:
    found = compare_logs([], [])
    assert found.is_equal and found.values == 0
