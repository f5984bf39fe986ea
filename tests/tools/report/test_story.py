"""The story of a run, told from its event lines."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.tools.report.axis import Gap, TimeAxis
from stepwell.tools.report.story import Point, tell


def line(kind: str, time: float, *, lineage: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": 100.0 + time, "lineage": lineage, **fields}


LINES = [
    line("fresh", -1.0, lineage=0, where="run"),
    line("start", 0.0, step=0),
    line("log", 1.0, step=1, values={}),
    line("log", 1.5, step=2, values={}),
    line("snapshot", 1.6, step=2, stall_seconds=0.1),
    line("commit", 1.7, step=2),
    line("log", 2.0, step=3, values={}),
    line("restore", 8.9, lineage=0, step=2, source="memory", seconds=0.2),
    line("start", 9.0, lineage=2, step=2),
    line("log", 9.5, lineage=2, step=3, values={}),
    line("log", 9.6, lineage=2, step=4, values={}),  # the end of an epoch, logged for the step to come
    line("log", 10.0, lineage=2, step=4, values={}),
    line("snapshot-void", 10.1, lineage=2, step=4),
    line("log", 10.2, lineage=2, step=5, values={}),  # after the last step
    line("finished", 10.3, lineage=2, step=4),
]


def test_a_story() -> None:
    story = tell(LINES)
    first, second = story.lineages
    assert (story.began, story.steps) == (100.0, 4)
    assert (first.source, second.source, second.restore_seconds) == (None, "memory", 0.2)
    assert second.start == Point(9.0, 2)
    assert [point.step for point in first.path] == [0, 1, 2, 3]
    assert [point.step for point in second.path] == [2, 3, 4]
    assert (story.snapshots, story.commits) == ([Point(pytest.approx(1.6), 2)], [Point(pytest.approx(1.7), 2)])
    assert story.stalls == [Point(pytest.approx(1.6), 2, 0.1)]
    assert story.voids == [Point(pytest.approx(10.1), 4)]


def test_iterations_leave_out_the_first_of_each_life_and_take_the_last_sign_of_a_step() -> None:
    first, second = tell(LINES).lineages
    # Step 2 was last seen by its snapshot.
    assert [(point.step, point.value) for point in first.iterations] == [
        (2, pytest.approx(0.6)),
        (3, pytest.approx(0.4)),
    ]
    assert [(point.step, point.value) for point in second.iterations] == [(4, pytest.approx(0.5))]


def test_an_empty_file_is_an_empty_story() -> None:
    story = tell([])
    assert (story.lineages, story.steps, story.seconds) == ([], 0, 0.0)


def test_the_axis_cuts_gaps_and_keeps_the_order() -> None:
    axis = TimeAxis(20.0, [Gap(5.0, 14.0), Gap(17.0, 17.1)])
    places = [axis.place(time) for time in (0.0, 5.0, 8.0, 14.0, 15.0, 17.0, 17.1, 20.0)]
    assert places == sorted(places)
    assert places[0] == 0.0 and places[1] == 5.0
    strip = places[3] - places[1]
    assert strip == pytest.approx(0.03 * 10.9)  # a share of the time that was spent training
    assert places[4] - places[3] == pytest.approx(1.0)  # training is drawn to scale
    assert places[6] - places[5] == pytest.approx(0.1)  # a gap shorter than the strip is not stretched
    assert axis.end == places[-1]


def test_ticks_count_seconds_of_training() -> None:
    axis = TimeAxis(20.0, [Gap(5.0, 14.0)])
    places, labels = axis.ticks()
    assert labels == [str(number) for number in range(12)]
    assert places[3] == 3.0
    assert places[6] == pytest.approx(axis.place(15.0))  # one second after the gap
    assert TimeAxis(0.0, []).ticks()[1][0] == "0"


def test_what_was_dropped_of_a_long_run_is_part_of_the_story() -> None:
    assert tell(LINES).dropped == 0
    assert tell([line("thinned", -2.0, lineage=0, dropped={"log": 900, "snapshot": 100}), *LINES]).dropped == 1_000
