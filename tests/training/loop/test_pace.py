"""When, in real runs: the automatic frequency decides, tells why, and remembers across processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError
from stepwell.storage.store.learned import CLOSED, RUNNING, read_history
from tests.crash.harness import Server, start_script
from tests.ranks.conftest import soak
from tests.training.loop.small import Small


class Longer(Small):
    """With more batches, so that there is something to measure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.numbers.count = 80_000

    def train_until_decided(self, commits: int = 1) -> None:
        """Until there is an interval, and so many checkpoints are committed."""
        for batch in self.ckpt.data:
            self.update(batch)
            if self.ckpt.status().policy.startswith("Saving every") and len(self.events("commit")) >= commits:
                return
        raise AssertionError(self.ckpt.status().policy)


def automatic(where: Path, **options: Any) -> Longer:
    return Longer(where, {"policy": None, **options})


def test_it_decides_and_says_why(tmp_path: Path) -> None:
    small = automatic(tmp_path / "run")
    small.ckpt.restore()
    assert "is measuring the first checkpoint" in small.ckpt.status().policy
    small.train_until_decided(commits=4)
    text = small.ckpt.status().policy
    small.ckpt.close()
    decisions = small.events("decision")
    assert decisions and len(small.events("commit")) >= 3
    for decision in decisions:
        floors = max(decision["checkpoint_seconds"] / decision["overhead_bound"], decision["durable_seconds"])
        assert decision["seconds"] == pytest.approx(floors), "no failure rate is known"
        assert decision["term"] in ("overhead", "storage") and decision["predicted_overhead"] <= 0.035 * 1.0001
    assert text == decisions[-1]["sentence"] or text.startswith("Saving every")


def test_the_first_one_is_measured_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to become durable."""
    small = automatic(tmp_path / "run")
    monkeypatch.setattr(small.ckpt._pace, "end", lambda sequence, is_durable: None)
    monkeypatch.setattr(small.ckpt._outcomes.uploads, "_on_decided", lambda sequence, is_durable: None)
    small.train(stop_after=60)
    small.ckpt.wait()
    small.ckpt.close(save=False)
    assert len(small.events("snapshot")) == 1 and not small.events("snapshot-skipped")[5:]


def test_a_shorter_way_to_say_it(tmp_path: Path) -> None:
    small = Longer(tmp_path / "run", {"policy": None, "overhead": 0.2})
    small.train_until_decided()
    small.ckpt.close()
    assert {decision["overhead_bound"] for decision in small.events("decision")} == {0.2}
    with pytest.raises(ConfigError, match=r"policy=Auto\(overhead=...\) says both"):
        Longer(tmp_path / "other", {"overhead": 0.2})


def test_a_recovery_point_that_cannot_be_met_is_told(tmp_path: Path) -> None:
    small = automatic(tmp_path / "run", policy=stepwell.Auto(recovery_point=1e-6))
    small.train_until_decided()
    small.ckpt.close()
    assert "cannot limit lost work" in small.events("infeasible")[0]["problem"]
    assert "cannot limit lost work" in small.events("decision")[-1]["sentence"]


def test_what_was_measured_is_remembered(tmp_path: Path) -> None:
    first = automatic(tmp_path / "run")
    first.train_until_decided()
    first.ckpt.close()
    history = read_history(tmp_path / "run" / "history.json")
    assert history.ended == CLOSED and history.checkpoint is not None and history.durable
    again = automatic(tmp_path / "run")
    again.ckpt.restore()
    again.train(stop_after=2)
    known = again.events("decision")
    assert known[-1]["step"] <= again.ckpt.status().step and again.ckpt.status().policy.startswith("Saving every")
    again.ckpt.close()
    assert not again.events("measure-again")


def test_and_measured_again_when_the_state_is_another_one(tmp_path: Path) -> None:
    first = automatic(tmp_path / "run")
    first.train_until_decided()
    first.ckpt.close()
    again = automatic(tmp_path / "run")
    again.model[0] = torch.nn.Linear(8, 16).double()
    again.ckpt.restore(strict=False)
    assert "is measuring the first checkpoint" in again.ckpt.status().policy
    again.ckpt.close()
    assert again.events("measure-again")[0]["changed"] == ["state"]


def wait_for_a_note(small: Small) -> None:
    """The history is written by a thread: until there is something of this process in it."""
    while not read_history(small.where / "history.json").seconds:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("end", "failures"),
    [("os.kill(os.getpid(), 9)", 1), ("sys.exit(3)", 0), soak("raise ValueError", 1), soak("small.ckpt.close()", 0)],
)
def test_what_counts_as_a_failure(server: Server, tmp_path: Path, end: str, failures: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, pathlib; from tests.training.loop.test_pace import automatic, wait_for_a_note\n"
        "small = automatic(pathlib.Path(sys.argv[1])); small.train(stop_after=30)\n"
        "small.ckpt.save().wait(); wait_for_a_note(small)\n" + end
    )
    trainer = start_script(server, script, tmp_path / "run", log=tmp_path / "log", STEPWELL_LINGER="0")
    status = trainer.wait()
    assert (status == 0) == ("close" in end), trainer.log()
    assert (read_history(tmp_path / "run" / "history.json").ended == RUNNING) == ("kill" in end)
    assert ("kill" in end) == (status == -signal.SIGKILL)
    small = automatic(tmp_path / "run")
    assert small.ckpt.restore()
    small.train(stop_after=3)
    small.ckpt.close()
    history = read_history(tmp_path / "run" / "history.json")
    assert history.failures == failures and history.uptime > 0
    assert history.restart is not None and history.restart > 0
    assert (history.mtbf(None) is None) == (failures == 0)
