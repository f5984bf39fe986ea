"""How a run ends, beside the matrix: finished early, in an error, and with more than one Checkpointer."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from stepwell import Never
from stepwell.events.journal import read_events
from tests.crash.harness import Server, start_script
from tests.training.loop.small import Small

PAIR = Path(__file__).parent / "pair.py"


def pair(server: Server, where: Path, *more: str) -> tuple[int, str]:
    log = where.parent / f"{where.name}.log"
    log.unlink(missing_ok=True)
    return start_script(server, PAIR, where, *more, log=log, STEPWELL_LINGER="0").wait(), log.read_text()


@pytest.mark.parametrize(("more", "other"), [((), 5), (("idle",), 3)])
def test_two_checkpointers_are_both_saved_when_told_to_leave(
    more: tuple[str, ...], other: int, server: Server, tmp_path: Path
) -> None:
    status, text = pair(server, tmp_path / "run", *more)
    assert status == 75, text
    status, text = pair(server, tmp_path / "run", "idle")
    assert f"restored True True 5 {other}" in text
    left = [json.loads(line) for line in (tmp_path / "run" / "one" / "events.jsonl").read_text().splitlines()]
    assert next(event["step"] for event in left if event["kind"] == "left") == 5


def test_finished_early_trains_no_further(run_dir: Path) -> None:
    def train(**wish: Any) -> Small:
        run = Small(run_dir, {"policy": Never()})
        run.ckpt.restore(**wish)
        for epoch in run.ckpt.epochs(5):
            for batch in run.ckpt.data:
                run.seen.append((epoch, [int(value) for value in batch[:, 0]]))
                run.update(batch)
            if epoch == 1 and not wish:
                run.ckpt.finish()  # and no break: there is no epoch left
        return run

    assert len(train().seen) == 12
    again = train()
    assert again.seen == []
    assert again.ckpt.status().is_finished
    assert [(event["early"], event["again"]) for event in again.events("finished")] == [(True, False), (True, True)]
    assert len(train(step=12).seen) == 18, "restore(step=) goes on"


def test_an_error_says_what_is_on_disk_and_what_is_done_again(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Small(run_dir, {"policy": Never()})
    with pytest.raises(RuntimeError, match="boom"), run.ckpt as ckpt:
        ckpt.restore()
        for number, batch in enumerate(ckpt.data):
            run.update(batch)
            if number == 1:
                ckpt.save().wait(60)
            if number == 4:
                raise RuntimeError("boom")
    assert "Training ended at step 4 (RuntimeError); step 2 is on disk: a restart redoes 2 steps" in caplog.messages


@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_an_exit_from_inside_a_step_saves_nothing_half_done(where: str, run_dir: Path) -> None:
    """sys.exit() in a signal handler of the user's may come anywhere."""
    run = Small(run_dir, {"policy": Never()})

    def leave(*_: Any) -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit), run.ckpt as ckpt:
        ckpt.restore()
        for number, batch in enumerate(itertools.islice(ckpt.data, 5)):
            if number == 3 and where == "forward":
                run.model[1].register_forward_hook(leave)
            if number == 3 and where == "optimizer":
                run.optimizer.register_step_pre_hook(leave)
            run.update(batch)
            if number == 1:
                ckpt.save().wait(60)
    assert [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "commit"] == [2]


def test_an_exit_after_a_step_is_an_orderly_one(run_dir: Path) -> None:
    run = Small(run_dir, {"policy": Never()})
    with pytest.raises(SystemExit), run.ckpt as ckpt:
        ckpt.restore()
        for number, batch in enumerate(ckpt.data):
            run.update(batch)
            if number == 3:
                raise SystemExit(0)
    assert [event["step"] for event in run.events("commit")] == [4]


@pytest.mark.parametrize("is_put_off", [False, True])
def test_what_is_to_follow_the_last_save_has_run_when_the_run_is_closed(is_put_off: bool, run_dir: Path) -> None:
    """The process may end right after it."""
    run = Small(run_dir, {"policy": Never()})
    told: list[str] = []
    with run.ckpt as ckpt:
        ckpt.restore()
        batches = iter(ckpt.data)
        run.update(next(batches))
        if is_put_off:
            run.model(next(batches) / 24).pow(2).mean().backward()
        handle = ckpt.save()
        handle.upload_completion.add_done_callback(lambda done: (time.sleep(0.2), told.append(done.result())))
    assert told == ["step-000000000001.l0001"]
    assert handle.upload_completion.done() and handle.staging_completion.done()
