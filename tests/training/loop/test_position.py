"""Where in the data a restart goes on: at the next sample, whatever the size of the batches, and never by guessing."""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stepwell
from stepwell.errors import DataError
from stepwell.events.journal import read_events
from stepwell.storage.store.lineage import newest_number
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Server, start_script


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Training:
    """A loop that is left by break, over and over, each time with another loader."""

    def __init__(self, where: Path, loader: Any, *, strict: bool = True, **options: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        options = {"policy": stepwell.Never(), "seed": 7, "data": loader, **options}
        self.ckpt = stepwell.Checkpointer(where, model=self.model, optimizer=self.optimizer, **options)
        self.strict = strict

    def update(self, batch: torch.Tensor) -> None:
        self.model(batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int, epochs: int) -> tuple[list[tuple[int, int]], bool]:
        """What was trained on, as (epoch, sample), and whether the end was reached. Closing saves the last step."""
        self.ckpt.restore(strict=self.strict)
        seen = []
        for epoch in self.ckpt.epochs(epochs):
            for batch in self.ckpt.data:
                seen += [(epoch, int(value)) for value in batch[:, 0]]
                self.update(batch)
                steps -= 1
                if not steps:
                    self.ckpt.close()
                    return seen, False
        return seen, True


@pytest.mark.parametrize("chance", range(4))
def test_batch_size_and_workers_change_with_every_restart(chance: int, run_dir: Path) -> None:
    """Over three epochs each sample comes once in each, in the order of the run that was never stopped."""
    dice, count = random.Random(chance), 97
    whole, _ = Training(run_dir / "whole", DataLoader(Numbers(count), batch_size=5, shuffle=True)).run(10**6, 3)
    seen: list[tuple[int, int]] = []
    is_over, starts = False, 0
    while not is_over:
        starts += 1
        loader = DataLoader(
            Numbers(count),
            batch_size=dice.choice([1, 3, 8, 20]),
            shuffle=True,
            num_workers=dice.choice([0, 0, 0, 2]) if starts < 5 else 0,
        )
        more, is_over = Training(run_dir / "often", loader).run(dice.randint(1, 9), 3)
        seen += more
    assert starts > 3
    assert seen == whole
    assert set(Counter(seen).values()) == {1} and len(seen) == 3 * count


def test_another_number_of_samples_is_refused_in_the_middle_of_an_epoch(run_dir: Path) -> None:
    Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True)).run(2, 3)
    refused = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True))
    before = [value.clone() for value in refused.model.state_dict().values()]
    with pytest.raises(DataError, match="had 20 samples and has 21 now, in the middle of epoch 0"):
        refused.run(1, 3)
    assert all(map(torch.equal, before, refused.model.state_dict().values())), "nothing was changed"
    assert newest_number(RunPaths(run_dir)) == 1, "and the run is as it was"
    told = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True), strict=False)
    seen, _ = told.run(100, 1)
    assert len(seen) == 13
    problems = [event["problems"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "mismatch"]
    assert problems == [["the data set had 20 samples and has 21 now, in the middle of epoch 0"]]


def test_another_number_of_samples_is_fine_between_epochs(run_dir: Path) -> None:
    Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True)).run(100, 1)
    seen, _ = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True)).run(100, 2)
    assert sorted(seen) == [(1, index) for index in range(21)]


def test_another_number_of_samples_is_fine_at_the_last_batch(run_dir: Path) -> None:
    """A checkpoint of the epoch's last step: nothing of it is left, however long it would be now."""
    Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True)).run(5, 3)
    seen, _ = Training(run_dir, DataLoader(Numbers(33), batch_size=4, shuffle=True)).run(100, 2)
    assert sorted(seen) == [(1, index) for index in range(33)]


def test_another_order_is_refused_in_the_middle_of_an_epoch(run_dir: Path) -> None:
    Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True)).run(2, 3)
    with pytest.raises(DataError, match="in the order feistel6/1 and are in sequential now"):
        Training(run_dir, DataLoader(Numbers(20), batch_size=4)).run(1, 3)


def test_a_refused_restore_leaves_later_steps_alive(run_dir: Path) -> None:
    """The refused one asked for an older step: what came after it must not become an abandoned branch."""
    first = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True), keep=9)
    first.ckpt.restore()
    for batch in itertools.islice(first.ckpt.data, 4):
        first.update(batch)
        first.ckpt.save()
    first.ckpt.close()
    refused = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True))
    with pytest.raises(DataError):
        refused.ckpt.restore(step=2)
    again = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
    assert again.ckpt.restore() and again.ckpt.status().step == 4
    again.ckpt.close(save=False)


SAVE_AND_DIE = """
import os, signal, sys
from torch.utils.data import DataLoader
from tests.training.loop.test_position import Numbers, Training
from pathlib import Path
from typing import Any
training = Training(Path(sys.argv[1]), DataLoader(Numbers(20), batch_size=4, shuffle=True))
training.ckpt.restore()
for _, batch in zip(range(2), training.ckpt.data):
    training.update(batch)
training.ckpt.save().wait(30)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_second_try_still_finds_the_memory_of_the_first(server: Server, run_dir: Path) -> None:
    """The agent of the killed trainer was adopted by a restore that was refused."""
    script = run_dir.with_name("train.py")
    script.write_text(SAVE_AND_DIE)
    trainer = start_script(server, script, run_dir, log=run_dir.with_name("log"), STEPWELL_LINGER="30")
    assert trainer.wait() == -signal.SIGKILL, trainer.log()
    training = Training(run_dir, DataLoader(Numbers(21), batch_size=4, shuffle=True))
    with pytest.raises(DataError):
        training.ckpt.restore()
    assert training.ckpt.restore(strict=False)
    training.ckpt.close(save=False)
    (event,) = [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "restore"]
    assert event["source"] == "memory"


# -- loops that say themselves what a step is -------------------------------------------------------------------------


def rounds(training: Training, count: int, *, stop: int, explicit: bool) -> list[tuple[int, int]]:
    """A loop without `ckpt.epochs()`: each round over the data is an epoch."""
    seen: list[tuple[int, int]] = []
    for _ in range(count):
        for batch in training.ckpt.data:
            seen += [(training.ckpt.data.at.epoch, int(value)) for value in batch[:, 0]]
            training.update(batch)
            if explicit:
                training.ckpt.step()
            stop -= 1
            if not stop:
                return seen
    return seen


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("stop", range(1, 11))
def test_rounds_without_epochs_go_on_at_the_next_batch(stop: int, explicit: bool, run_dir: Path) -> None:
    def training() -> Training:
        made = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
        made.ckpt.restore()
        return made

    first = training()
    seen = rounds(first, 2, stop=stop, explicit=explicit)
    first.ckpt.close()
    second = training()
    seen += rounds(second, 3, stop=10 - stop, explicit=explicit) if stop < 10 else []
    second.ckpt.close()
    assert sorted(seen) == [(epoch, index) for epoch in (0, 1) for index in range(20)]


def test_a_round_that_only_began_is_not_skipped(run_dir: Path) -> None:
    """A batch of the second round was delivered, and the loop left before it was used."""
    first = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
    first.ckpt.restore()
    rounds(first, 1, stop=99, explicit=False)
    next(iter(first.ckpt.data))
    first.ckpt.save().wait(30)
    first.ckpt.close()
    second = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
    second.ckpt.restore()
    assert sorted(rounds(second, 1, stop=99, explicit=False)) == [(1, index) for index in range(20)]
    second.ckpt.close(save=False)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("used", range(1, 11))
def test_a_loop_that_reads_ahead_says_what_it_used(ahead: int, used: int, run_dir: Path) -> None:
    """Across the edge of an epoch too: what is in its hands comes again, what it used does not."""

    def batches(training: Training) -> Iterator[torch.Tensor]:
        held: list[torch.Tensor] = []
        for _ in range(2):
            for batch in training.ckpt.data:
                held.append(batch)
                if len(held) > ahead:
                    yield held.pop(0)
        yield from held

    def use(training: Training, count: int) -> list[int]:
        seen: list[int] = []
        for batch in itertools.islice(batches(training), count):
            seen += [int(value) for value in batch[:, 0]]
            training.update(batch)
            training.ckpt.step(batches=1)
        training.ckpt.save().wait(30)
        training.ckpt.close()
        return seen

    def training() -> Training:
        made = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
        made.ckpt.restore()
        return made

    seen = use(training(), used)
    if used < 10:
        seen += use(training(), 10 - used)
    assert set(Counter(seen).values()) == {2} and len(seen) == 40


def test_a_save_before_step_counts_the_batch_of_its_body(run_dir: Path) -> None:
    first = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
    first.ckpt.restore()
    seen = []
    for batch in itertools.islice(first.ckpt.data, 3):
        seen += [int(value) for value in batch[:, 0]]
        first.update(batch)
        first.ckpt.save()
        first.ckpt.step()
    first.ckpt.close()
    second = Training(run_dir, DataLoader(Numbers(20), batch_size=4, shuffle=True))
    second.ckpt.restore()
    assert second.ckpt.status().step == 3
    seen += [int(value) for batch in second.ckpt.data for value in batch[:, 0]]
    second.ckpt.close(save=False)
    assert sorted(seen) == list(range(20))
