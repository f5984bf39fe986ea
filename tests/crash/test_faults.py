"""File operations that fail under a real training run: it goes on to its end, says what happened, and ends the same.

`tests/agent/test_faults.py` fails every operation one by one; here a whole run lives through many.
"""

from __future__ import annotations

import errno
import itertools

import pytest

from stepwell.faults import OPERATIONS
from stepwell.storage.store import catalog
from tests.crash.conftest import MakeRun
from tests.crash.harness import Ending, Run
from tests.crash.scenes import check_no_snapshot_lost
from tests.crash.trainer import BATCHES
from tests.ranks.conftest import soak

ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")
PER_COMMIT = {"open": 3, "write": 3, "fallocate": 1, "truncate": 1, "fsync": 3, "fsync_dir": 4, "rename": 2, "mkdir": 1,
              "link": 1, "unlink": 3, "rmdir": 1}  # fmt: skip
"""How often a commit (with its prune) calls each operation; only used to spread the faults over the run."""


def test_the_table_is_complete() -> None:
    assert set(PER_COMMIT) == set(OPERATIONS)


@pytest.mark.parametrize("error", ERRORS)
def test_training_goes_on_through_faults(error: str, run: Run, reference: Ending) -> None:
    """One fault of each operation, strewn over the checkpoints of one run."""
    faults = [
        f"{op}:{error}:{count * (2 + number % 7) + number % count + 1}"
        for number, (op, count) in enumerate(PER_COMMIT.items())
    ]
    trainer = run.start(STEPWELL_FAULT="agent!" + ",".join(faults), TRAIN_WAIT="1")
    assert trainer.wait() == 0, trainer.log()
    failures = run.events("persist-failed") + run.events("prune-failed")
    assert len(failures) >= 5, failures
    assert all(f"[Errno {getattr(errno, error)}]" in failure["error"] for failure in failures)
    assert not run.events("agent-death")
    for entry in run.good():
        run.verify(entry)
    run.check_identical(reference)
    run.check_nothing_left()


def test_short_writes(run: Run, reference: Ending) -> None:
    trainer = run.start(STEPWELL_FAULT="agent!write:SHORT:1+")
    assert trainer.wait() == 0, trainer.log()
    assert not run.events("persist-failed")
    check_no_snapshot_lost(run)
    run.check_identical(reference)
    run.check_nothing_left()


@pytest.mark.parametrize(
    ("op", "memory"), [("write", None), soak("mkdir", None), soak("fsync", None), ("link", None), ("fsync", "one slot")]
)
def test_a_disk_that_stays_broken_is_an_error_only_at_the_end(
    op: str, memory: str | None, make_run: MakeRun, reference: Ending
) -> None:
    run = make_run(**({} if memory is None else {"TRAIN_HOST_MEMORY": "28672"}))
    healthy = PER_COMMIT[op] * 4
    trainer = run.start(STEPWELL_FAULT=f"agent!{op}:ENOSPC:{healthy}+", STEPWELL_CLOSE_SECONDS="1")
    assert trainer.wait() == 1
    assert "PersistError" in trainer.log(), trainer.log()
    logged = [event["step"] for event in run.events("log")]
    assert logged == list(range(1, reference.step + 1)), "training stopped before its end"
    committed = [event["step"] for event in run.events("commit")]
    good = run.good()
    assert len(good) >= 2 and {entry.id.step for entry in good} == set(committed[-2:])
    for entry in good:
        run.verify(entry)
    slots = {event["slots"] for event in run.events("arena")}
    assert slots == {2 if memory is None else 1}
    run.wait_gone()
    run.finish()  # the disk works again
    began = run.opening(run.trainers[-1])
    assert began is not None and began["step"] == committed[-1]
    run.check_identical(reference)
    run.check_nothing_left()


@pytest.mark.parametrize(
    ("op", "error"),
    [
        ("open", "ENOSPC"),
        ("write", "EIO"),
        soak("fsync", "EROFS"),
        soak("fsync_dir", "EDQUOT"),
        ("link", "EIO"),
        ("mkdir", "EROFS"),
    ],
)
def test_a_trainer_that_cannot_open_its_run_says_so(op: str, error: str, make_run: MakeRun) -> None:
    """Every operation of opening a run fails in turn: an error that names it, and never half a run."""
    for nth in itertools.count(1):
        run = make_run(f"run-{nth}", TRAIN_EPOCHS="1")
        trainer = run.start(STEPWELL_FAULT=f"trainer!{op}:{error}:{nth}")
        status = trainer.wait()
        run.wait_gone()
        if status == 0 and run.paths.progress.exists():
            break  # there is no nth operation
        if status != 0:
            last = trainer.log().strip().splitlines()[-1]
            assert last.startswith("stepwell.errors.ConfigError: the run in"), trainer.log()
            assert f"[Errno {getattr(errno, error)}]" in last
            assert not any(entry.is_committed for entry in catalog.scan(run.paths))
            run.finish()
        assert run.ending().step == BATCHES
        run.check_nothing_left()
    assert nth > 1, "nothing failed"


def test_events_that_cannot_be_written_cost_nothing_else(run: Run, reference: Ending) -> None:
    run.paths.events.mkdir(parents=True)
    trainer = run.start()
    assert trainer.wait() == 0, trainer.log()
    assert "stepwell drops events" in trainer.log()
    entry = run.newest()
    assert entry is not None
    shards = {file.name: (entry.path / file.name).read_bytes() for file in run.verify(entry).files}
    assert shards == reference.shards
