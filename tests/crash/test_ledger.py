"""Each sample of each epoch is trained on once, with the bytes it has in a run that nothing happens to.

The ledger is written by the training step itself, from the tensors it got. What survives is, for each step, its last
entry: the ones before were rolled back with the weights.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.crash.conftest import MakeRun
from tests.crash.harness import HERE, Run, report, wait_for
from tests.crash.ledger_trainer import COUNT, EPOCHS, SIZE
from tests.ranks.conftest import soak

Used = list[Any]


class How(NamedTuple):
    """How batches are loaded and used."""

    workers: int
    prefetch: int = 2
    method: str = "fork"
    persistent: bool = False
    accumulate: int = 1

    def __str__(self) -> str:
        kept = "persistent" if self.persistent else "new"
        return f"{self.workers}-{self.prefetch}-{self.method}-{kept}-{self.accumulate}"

    def environment(self, pace: float) -> dict[str, str]:
        return {
            "LEDGER_WORKERS": str(self.workers),
            "LEDGER_PREFETCH": str(self.prefetch),
            "LEDGER_METHOD": self.method,
            "LEDGER_PERSISTENT": str(int(self.persistent)),
            "LEDGER_ACCUMULATE": str(self.accumulate),
            "LEDGER_PACE": str(pace),
        }


CHOSEN = [
    How(0),
    How(0, accumulate=4),
    How(1, 2, "fork", False, 4),
    How(1, 16, "spawn", True, 1),
    How(4, 16, "fork", True, 4),
    How(4, 2, "fork", False, 1),
]
"""Each value of each option, and most pairs of them."""
ALL = [How(0), How(0, accumulate=4), *itertools.starmap(How, itertools.product(
    (1, 4), (2, 16), ("fork", "spawn"), (False, True), (1, 4)
))]  # fmt: skip


class Ledger:
    """What a run wrote down, in the order of writing."""

    def __init__(self, run: Run) -> None:
        self._path = Path(f"{run.where}.ledger")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def resumed(self) -> list[int]:
        return [line["resumed"] for line in self.lines() if "resumed" in line]

    def survived(self) -> dict[int, Used]:
        return {line["step"]: line["used"] for line in self.lines() if "step" in line}


def problem(ledger: Ledger, reference: dict[int, Used]) -> str | None:
    """What is wrong with a run's surviving history."""
    survived = ledger.survived()
    times = Counter((epoch, sample) for used in survived.values() for epoch, samples, _ in used for sample in samples)
    whole = {(epoch, sample) for epoch in range(EPOCHS) for sample in range(COUNT)}
    if missed := sorted(whole - times.keys()):
        return f"missed: {missed}"
    if repeated := [pair for pair, count in times.items() if count > 1]:
        return f"repeated: {repeated}"
    if other := [step for step in reference if survived.get(step) != reference[step]]:
        return f"other batches, or other bytes, in the steps {other}"
    return None


def straight(make_run: MakeRun, how: How, **env: str) -> dict[int, Used]:
    """The ledger of a run that nothing happens to."""
    run = make_run("straight", **how.environment(0.0), **env)
    run.script = HERE / "ledger_trainer.py"
    assert run.start().wait() == 0, run.log.read_text()
    return Ledger(run).survived()


def wait_for_step(run: Run, step: int) -> None:
    """Until it is committed, or the run is over."""
    trainer = run.trainers[-1]
    wait_for(lambda: trainer.has_ended() or run.newest_step() >= step, f"step {step} is committed")


def interrupted(make_run: MakeRun, how: How, kills: int, seed: int, **env: str) -> Ledger:
    """Kill the trainer with its workers at random moments, each after the first commit of a step."""
    chance, steps = random.Random(seed), EPOCHS * COUNT // SIZE // how.accumulate
    run = make_run("interrupted", **how.environment(0.02), **env)
    run.script = HERE / "ledger_trainer.py"
    ledger = Ledger(run)
    trainer = run.start()
    for number in range(kills):
        wait_for_step(run, run.newest_step() + chance.randint(2, max(3, steps // kills)))
        if trainer.has_ended(chance.uniform(0, 0.05)):
            break
        os.killpg(trainer.pid, signal.SIGKILL)
        assert trainer.wait() in (-signal.SIGKILL, 0), trainer.log()
        if number % 2:
            run.kill_agents()  # nothing in memory: the disk has to do
        trainer = run.start()
    assert trainer.wait() == 0, trainer.log()
    assert len(run.trainers) > 1, "it ended before the first kill"
    assert all(step > 0 for step in ledger.resumed()[1:]), "every restart resumed"
    run.check_resumes()
    return ledger


@pytest.mark.slow
@pytest.mark.parametrize("how", [*CHOSEN[1:5], soak(CHOSEN[0]), soak(CHOSEN[5])], ids=str)
def test_each_sample_once_with_the_same_bytes(how: How, make_run: MakeRun) -> None:
    reference = straight(make_run, how if not how.workers else How(1, accumulate=how.accumulate))
    found = interrupted(make_run, how, 2 if how.method == "spawn" else 3, CHOSEN.index(how))
    assert problem(found, reference) is None


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ALL, ids=str)
def test_in_every_way_to_load(how: How, make_run: MakeRun) -> None:
    drawn = int(os.environ.get("STEPWELL_SOAK_SEED") or secrets.randbits(20))
    reference = straight(make_run, how if not how.workers else How(1, accumulate=how.accumulate))
    found = interrupted(make_run, how, 5, drawn)
    assert problem(found, reference) is None, f"STEPWELL_SOAK_SEED={drawn}"
    report(f"ledger {how}: resumed from the steps {found.resumed()[1:]}; STEPWELL_SOAK_SEED={drawn}")


# -- controls: the same test must see each of these (one kill could hit an epoch's edge, four cannot) -----------------


def test_control_counting_prefetched_batches_misses_samples(make_run: MakeRun) -> None:
    how = How(1, 16)
    found = interrupted(make_run, how, 4, 1, LEDGER_CONTROL="prefetched")
    assert str(problem(found, straight(make_run, how))).startswith("missed: ")


def test_control_unkeyed_randomness_gives_other_bytes(make_run: MakeRun) -> None:
    how = How(1, 2)
    found = interrupted(make_run, how, 4, 2, LEDGER_CONTROL="unkeyed")
    reference = straight(make_run, how, LEDGER_CONTROL="unkeyed")  # only the kill makes the difference
    assert str(problem(found, reference)).startswith("other batches, or other bytes")
