"""Sizes and ages for people."""

from __future__ import annotations

import pytest

from stepwell.tools.cli import wording


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (9_951, "10 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (16_100_000_000, "16 GB"),
        (10**18, "1000 PB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert wording.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (3600, "1 h"), (47 * 3600, "47 h"), (86400 * 3, "3 days")],
)
def test_span(seconds: float, text: str) -> None:
    assert wording.span(seconds) == text
    assert wording.age(1000.0, now=1000.0 + seconds) == text


def test_long_spans() -> None:
    assert wording.span(86400 * 400) == "13 months"


def test_count() -> None:
    assert [wording.count(n, "entry") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert wording.count(2, "file") == "2 files"
    assert wording.count(3, "box") == "3 boxes"


def test_stamp_is_utc() -> None:
    assert wording.stamp(0.0) == "1970-01-01T00:00:00.000+00:00"
