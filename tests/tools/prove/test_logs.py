"""Logged values: every occurrence of a step counts, and nothing may be missing or new."""

from __future__ import annotations

from typing import Any

from stepwell.tools.prove.logged_values import NOTHING, LogDifference, compare_logs


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
    found = compare_logs(REFERENCE, killed, resumed={1: 0, 2: 1})
    assert found.is_equal and found.first is None and found.names == {}
    assert (found.steps, found.values, found.repeated) == (3, 4, 5)


def test_one_wrong_occurrence_is_enough() -> None:
    killed = [*REFERENCE, log(3, 2, loss=0.3)]
    found = compare_logs(REFERENCE, killed, resumed={1: 0, 2: 1})
    assert found.first == LogDifference(3, "loss", "NaN", "0.3", 2)
    assert found.names == {"loss": 1}


def test_the_first_step_is_named_not_the_first_line() -> None:
    killed = [log(1, loss=0.1), log(3, loss=9), log(2, 2, loss=0.7), log(2, 2, accuracy=0.5)]
    found = compare_logs(REFERENCE, killed, resumed={1: 0, 2: 1})
    assert found.first == LogDifference(2, "loss", "0.2", "0.7", 2)
    assert found.names == {"loss": 2}


def test_the_last_bit_counts() -> None:
    assert not compare_logs([log(1, loss=0.1)], [log(1, loss=0.1 + 2**-56)], resumed={1: 0}).is_equal
    assert not compare_logs([log(1, loss=1)], [log(1, loss=1.0)], resumed={1: 0}).is_equal


def test_a_missing_value_and_a_new_one_are_differences() -> None:
    assert compare_logs(REFERENCE, REFERENCE[:-1], resumed={1: 0}).first == LogDifference(
        3, "loss", "NaN", NOTHING, None
    )
    new = compare_logs(REFERENCE, [*REFERENCE, log(4, loss=0.4)], resumed={1: 0})
    assert new.first == LogDifference(4, "loss", NOTHING, "0.4", 1)
    twice = compare_logs([log(1, loss=1)], [log(1, loss=1), log(1, loss=1)], resumed={1: 0})
    assert twice.first == LogDifference(1, "loss", NOTHING, "1", 1)


def test_ignored_names_are_not_looked_at() -> None:
    one, two = [log(1, loss=1, seconds=0.1)], [log(1, loss=1, seconds=0.2)]
    assert compare_logs(one, two, resumed={1: 0}).first is not None
    assert compare_logs(one, two, resumed={1: 0}, ignore=["seconds"]).is_equal


def test_nothing_logged_is_equal_and_says_that_it_is_nothing() -> None:
    found = compare_logs([], [], resumed={})
    assert found.is_equal and found.values == 0


def test_values_that_died_with_a_trainer_are_lost_not_different() -> None:
    reference = [log(step, loss=step) for step in range(1, 11)]
    # Lineage 1 wrote up to step 3 and was killed; the snapshot of step 5 was complete, lineage 2 went on from it.
    before, after = reference[:3], [log(step, 2, loss=step) for step in range(6, 11)]
    found = compare_logs(reference, before + after, resumed={1: 0, 2: 5})
    assert found.is_equal and found.lost == 2


def test_control_values_that_no_kill_explains_are_missing() -> None:
    reference = [log(step, loss=step) for step in range(1, 11)]
    before, after = reference[:3], [log(step, 2, loss=step) for step in range(7, 11)]
    found = compare_logs(reference, before + after, resumed={1: 0, 2: 5})  # step 6 was the new lineage's to log
    assert found.first == LogDifference(6, "loss", "6", NOTHING, None)
    hole = [*reference[:1], *reference[2:5], *(log(step, 2, loss=step) for step in range(6, 11))]
    assert compare_logs(reference, hole, resumed={1: 0, 2: 5}).first == LogDifference(2, "loss", "2", NOTHING, None)
