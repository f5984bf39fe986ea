"""What a run learned about itself, across processes, and what a forged file can do: nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.storage.format.document import seal
from stepwell.storage.store.learned import (
    CLOSED,
    FAILED,
    KIND,
    RUNNING,
    TOLD,
    HistoryFile,
    Learned,
    age_of_this_process,
    read_history,
)


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "history.json", lambda call: call())
    assert file.open() == Learned()
    long = Learned(1e6, 12, 34.5, RUNNING, 9.0, 0.25, 4.0, {"device": "x" * 200, "state": "ab"})
    for history in (long, Learned(), replace(long, ended=CLOSED)):
        file.update(history)
        assert read_history(tmp_path / "history.json") == history
    file.close()
    file.update(long)
    assert read_history(tmp_path / "history.json").ended == CLOSED


@pytest.mark.parametrize(("ended", "failures"), [(RUNNING, 3), (FAILED, 3), (CLOSED, 2), (TOLD, 2)])
def test_what_counts_as_a_failure(ended: str, failures: int) -> None:
    """Who was killed never wrote how it ended. Being told to leave is no failure."""
    after = Learned(uptime=100, failures=2, seconds=50, ended=ended).next()
    assert (after.failures, after.uptime, after.seconds, after.ended) == (failures, 150, 0, RUNNING)


def test_mean_time_between_failures() -> None:
    assert Learned(uptime=500).mtbf(None) is None, "nothing is known"
    assert Learned(uptime=500, failures=2, seconds=100).mtbf(None) == 300
    assert Learned().mtbf(3600.0) == 3600
    assert Learned(uptime=400, failures=3).mtbf(3600.0) == 1000


def test_it_converges_whatever_the_first_guess() -> None:
    history = Learned(ended=FAILED)
    for _ in range(200):
        history = replace(history.next(), seconds=50.0)
    assert history.mtbf(1e4) == pytest.approx(100, rel=0.02)
    assert history.mtbf(1.0) == pytest.approx(50, rel=0.01)
    assert history.mtbf(None) == 50


@pytest.mark.parametrize(
    "change",
    [
        {"uptime": -1},
        {"uptime": 1e300},
        {"uptime": "5"},
        {"failures": 1.5},
        {"failures": True},
        {"ended": "well"},
        {"restart": []},
        {"checkpoint": -0.1},
        {"measured_on": [1]},
        {"measured_on": {"device": 5}},
    ],
)
def test_a_forged_file_is_not_believed(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(seal({"format": KIND, **asdict(Learned(uptime=5, failures=1)), **change}))
    assert read_history(path) == Learned()


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100, b"[" * 100_000, b"0" * (1 << 17)])
def test_garbage_is_an_empty_history(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(data)
    assert read_history(path) == Learned()
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert read_history(path) == Learned()


def test_a_torn_file_is_an_empty_history(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    whole = seal({"format": KIND, **asdict(Learned(uptime=5, failures=1))})
    assert json.loads(whole)["failures"] == 1
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert read_history(path) == Learned()


def test_a_process_knows_its_age() -> None:
    assert 0 < age_of_this_process() < 86_400
