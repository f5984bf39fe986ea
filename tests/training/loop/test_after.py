"""What a script still calls when training is over, and an end in the middle of the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell import Checkpointer, ConfigError, Never
from tests.training.loop.small import Small


def finished(where: Path) -> Small:
    run = Small(where, {"policy": Never()})
    run.ckpt.restore()
    run.train(epochs=2)
    return run


def test_values_are_logged_after_the_end(run_dir: Path) -> None:
    """A script that logs its test result ended with an error after complete training, and so did each restart."""
    for starts in (1, 2):
        run = finished(run_dir)
        run.ckpt.log(accuracy=0.5)
        found = [(event["step"], event["values"]) for event in run.events("log")]
        assert found == [(13, {"accuracy": 0.5})] * starts
    run.ckpt.close()


def test_values_are_not_logged_into_a_run_that_was_closed_before_its_end(run_dir: Path) -> None:
    run = Small(run_dir)
    run.ckpt.restore()
    run.ckpt.close()
    with pytest.raises(ConfigError, match="is closed; create a new one"):
        run.ckpt.log(loss=1.0)


CALLS: list[Callable[[Checkpointer], object]] = [
    lambda ckpt: ckpt.save(name="final"),
    lambda ckpt: next(iter(ckpt.data)),
    lambda ckpt: ckpt.step(),
    lambda ckpt: list(ckpt.epochs(3)),
    lambda ckpt: ckpt.finish(),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_comes_too_late_is_refused_with_what_to_do(call: Callable[[Checkpointer], object], run_dir: Path) -> None:
    run = finished(run_dir)
    with pytest.raises(ConfigError, match=r"the last epoch of ckpt.epochs\(\) is over.*last in the last epoch"):
        call(run.ckpt)


def test_finish_in_the_inner_loop_ends_both_loops_without_break(run_dir: Path) -> None:
    """The loop went on: what it trained was in no checkpoint, and the next finish() said "closed"."""
    run = Small(run_dir, {"policy": Never()})
    tails = 0
    with run.ckpt:
        run.ckpt.restore()
        for epoch in run.ckpt.epochs(3):
            for batch in run.ckpt.data:
                run.seen.append((epoch, []))
                run.update(batch)
                if len(run.seen) >= 8:
                    run.ckpt.finish()
                    run.ckpt.finish()
            tails += 1
        run.ckpt.log(seen=len(run.seen))
        with pytest.raises(ConfigError, match=r"ckpt.finish\(\) has saved the last step.*break"):
            run.ckpt.save()
    assert (len(run.seen), tails) == (8, 2)
    again = Small(run_dir)
    assert again.ckpt.restore() and again.ckpt.status().step == 8
    assert not list(again.ckpt.epochs(3))


def test_a_loop_does_not_go_on_after_close(run_dir: Path) -> None:
    """It trained on, and nothing was saved any more."""
    run = Small(run_dir)
    run.ckpt.restore()
    with pytest.raises(ConfigError, match="is closed"):
        for batch in run.ckpt.data:
            run.update(batch)
            run.ckpt.close()


@pytest.mark.parametrize("shares", [True, False])
def test_one_that_was_left_open_is_named_by_the_next_with_its_optimizer(
    shares: bool, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A caught exception left it open, with agent and threads, and it went on saving, without a word."""
    caplog.set_level("INFO", logger="stepwell")
    left, other = Small(run_dir / "left"), Small(run_dir / "other")
    other.ckpt.close(save=False)
    left.ckpt.restore()
    run = left if shares else other
    with Checkpointer(run_dir / "next", model=run.model, optimizer=run.optimizer) as ckpt:
        ckpt.restore()
    left.ckpt.close()
    with Checkpointer(run_dir / "last", model=run.model, optimizer=run.optimizer) as ckpt:
        ckpt.restore()
    found = [line for line in caplog.messages if "is still open in this process" in line]
    assert len(found) == shares and all(f"{run_dir}/left is still open" in line for line in found)
