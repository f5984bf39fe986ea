"""A scheme that cannot be had on the nodes that are there is named, with what there is instead."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import stepwell
from stepwell.levels.level_spec import Pairs, Partner, Protection, ReedSolomon, Single, Xor
from stepwell.levels.protect.effective_scheme import compare
from tests.training.loop.small import Small


@pytest.mark.parametrize(
    ("asked", "domains", "found", "is_less"),
    [
        (Pairs(), "aaaa", "as with Single()", True),
        (Xor(4), "aa", "as with Single()", True),
        (Xor(8), "abcd", "with 4 nodes there are sets of 4: 1 of each may be lost, for 33% more bytes", False),
        (
            ReedSolomon(8, 4),
            "abc",
            "with 3 nodes there are sets of 3: 2 of each may be lost, for 200% more bytes",
            True,
        ),
        (ReedSolomon(4, 2), "abcd", None, False),
        (Partner(), "ab", None, False),
        (Single(), "a", None, False),
        (None, "a", None, False),
    ],
)
def test_what_is_not_as_asked_for(asked: Protection | None, domains: str, found: str | None, is_less: bool) -> None:
    differs = compare(asked, domains)
    assert (differs is None) == (found is None)
    if differs is not None and found is not None:
        assert found in differs.text() and f"protect={asked}" in differs.text() and differs.is_less == is_less
        assert differs.severity() == (logging.WARNING if is_less else logging.INFO)


def test_one_line_at_the_start(run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Small(run_dir, {"levels": [stepwell.Node(tmp_path / "cache", protect=stepwell.Xor(4))]})
    with caplog.at_level(logging.INFO, "stepwell"):
        run.ckpt.restore()
    assert "protect=Xor(n=4): all ranks are on one node" in caplog.text
    run.ckpt.close()


def test_deltas_do_not_use_the_cache_and_that_is_logged(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    monkeypatch.setenv("STEPWELL_CACHE", str(tmp_path / "cache"))
    run = Small(run_dir, {"deltas": stepwell.LC(bits=3)})
    with caplog.at_level(logging.INFO, "stepwell"):
        run.ckpt.restore()
    assert f"Ignoring STEPWELL_CACHE={tmp_path / 'cache'}: deltas= " in caplog.text
    run.ckpt.close()
