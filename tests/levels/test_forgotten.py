"""A start that cannot reach what is whole on the nodes does not go back without a word: the shared place knows it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.errors import ConfigError, RestoreError
from stepwell.storage.store.nodes_mark import read_mark
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import wait_for
from tests.tools.cli.commands import good
from tests.training.loop.small import Small


def levels(cache: Path, every: int = 99) -> dict[str, Any]:
    return {"levels": [stepwell.Node(cache), stepwell.Shared(every=every)]}


def train(run: Small, steps: int) -> None:
    """So many more, each with time for its checkpoint."""
    done = 0
    for _ in run.ckpt.epochs(100):
        for batch in run.ckpt.data:
            run.update(batch)
            run.ckpt.wait(60)
            if (done := done + 1) == steps:
                return


def train_on_nodes(run_dir: Path, cache: Path, *, flushed: bool = False) -> int:
    """Leave a run whose newest checkpoint lies on its node only; step 2 in the shared place, if `flushed`."""
    run = Small(run_dir, levels(cache))
    run.ckpt.restore()
    train(run, 2)
    if flushed:
        run.ckpt.save().wait(60)
        wait_for(lambda: run.ckpt.status().shared_step, "it is in the shared place")
    while (run.ckpt.status().committed_step or 0) <= 2:
        train(run, 1)
    step = run.ckpt.status().committed_step
    assert step is not None
    run.ckpt.close(save=False)
    return step


def test_what_is_whole_on_the_nodes_is_known_in_the_shared_place(run_dir: Path, tmp_path: Path) -> None:
    step = train_on_nodes(run_dir, tmp_path / "cache")
    mark = read_mark(RunPaths(run_dir))
    assert mark is not None and mark.newest.step == step and mark.cache == str(tmp_path / "cache")


WRONG: dict[str, Any] = {
    "another cache": lambda tmp_path: levels(tmp_path / "other"),
    "no levels": lambda tmp_path: {},
    "never looked at": lambda tmp_path: {"levels": []},
    "deltas": lambda tmp_path: {"deltas": stepwell.LC(bits=3)},
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("flushed", [False, True])
def test_a_start_that_would_forget_it_is_refused(
    how: str, flushed: bool, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    step = train_on_nodes(run_dir, cache, flushed=flushed)
    if how == "deltas":
        pytest.importorskip("zstandard")
        monkeypatch.setenv("STEPWELL_CACHE", str(cache))
    wrong = Small(run_dir, WRONG[how](tmp_path))
    with pytest.raises(RestoreError, match=f"step {step} .* in the caches of its nodes") as raised:
        wrong.ckpt.restore()
    assert str(cache) in str(raised.value) and "nodes.json" in str(raised.value)
    wrong.ckpt.close()
    again = Small(run_dir, levels(cache))
    assert again.ckpt.restore() and again.ckpt.status().step == step
    again.ckpt.close(save=False)


def test_a_loop_without_restore_is_refused_too(run_dir: Path, tmp_path: Path) -> None:
    train_on_nodes(run_dir, tmp_path / "cache")
    run = Small(run_dir, levels(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"call ckpt\.restore"):
        run.train(stop_after=1)
    run.ckpt.close()


def test_ways_to_start_over_deliberately(run_dir: Path, tmp_path: Path) -> None:
    """A named step; or the file is removed."""
    train_on_nodes(run_dir, tmp_path / "cache", flushed=True)
    named = Small(run_dir)
    assert named.ckpt.restore(step=2) and named.ckpt.status().step == 2
    named.ckpt.close(save=False)
    later = Small(run_dir)  # another history: what lies on the nodes is of no use any more
    assert later.ckpt.restore() and later.ckpt.status().step == 2
    later.ckpt.close(save=False)


def test_a_fresh_start_after_the_file_was_removed(run_dir: Path, tmp_path: Path) -> None:
    train_on_nodes(run_dir, tmp_path / "cache")
    (run_dir / "nodes.json").unlink()
    run = Small(run_dir)
    assert not run.ckpt.restore()
    run.ckpt.close(save=False)
    back = Small(run_dir, levels(tmp_path / "cache"))
    assert not back.ckpt.restore(), "that history was given up"
    back.ckpt.close(save=False)


def test_nodes_that_are_lost_are_named_and_the_shared_place_has_an_older_one(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    step = train_on_nodes(run_dir, cache, flushed=True)
    shutil.rmtree(cache)
    run = Small(run_dir, levels(cache))
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert run.ckpt.restore() and run.ckpt.status().step == 2
    assert f"Step {step} was complete on the nodes" in caplog.text and "goes back to step 2" in caplog.text
    run.ckpt.close(save=False)


def test_without_an_older_one_nothing_begins_at_zero(run_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    train_on_nodes(run_dir, cache)
    shutil.rmtree(cache)
    run = Small(run_dir, levels(cache))
    with pytest.raises(RestoreError, match="nodes"):
        run.ckpt.restore()
    run.ckpt.close()


def test_a_mark_that_cannot_be_read_is_refused(run_dir: Path, tmp_path: Path) -> None:
    train_on_nodes(run_dir, tmp_path / "cache")
    (run_dir / "nodes.json").write_bytes(b"{}")
    run = Small(run_dir)
    with pytest.raises(RestoreError, match=r"nodes\.json"):
        run.ckpt.restore()
    run.ckpt.close()


def test_why_tells_of_it(run_dir: Path, tmp_path: Path) -> None:
    step = train_on_nodes(run_dir, tmp_path / "cache")
    text = " ".join(good("why", run_dir).out.split())
    assert f"step {step} or a newer one is complete in the caches" in text and "starts fresh" not in text
