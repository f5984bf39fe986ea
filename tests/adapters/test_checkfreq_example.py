"""What an unmodified script of CheckFreq's sees after a resume: its DALI's sizes, positions and learning rates."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.adapters import checkfreq
from stepwell.adapters.checkfreq import CFCheckpoint, CFIterator, CFManager, CFMode
from tests.adapters.patched_dali import PatchedIterator, Reader
from tests.adapters.scripts import Script
from tests.adapters.small import Small, same
from tests.crash.harness import Server, wait_for

SCRIPT = Path(__file__).parent / "train_patched.py"
SAMPLES, BATCH, BATCHES = 40, 4, 10


@pytest.fixture(scope="module")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    where = tmp_path_factory.mktemp("whole") / "run"
    script = Script(server, where.parent, str(SCRIPT), str(where))
    assert script.run(CF_MODE="MANUAL") == 0, script.output
    return script.last_line(), ledger(where)


def ledger(where: Path) -> list[str]:
    return Path(f"{where}.ledger.0").read_text().splitlines()


@pytest.mark.parametrize(
    ("mode", "freq", "kill"),
    [
        ("MANUAL", "3", "0:8,1:4"),  # in mid-epoch, twice
        ("AUTO", "3", "1:17"),
        ("MANUAL", "0", "1:0"),  # right after an epoch, of which only the end is saved
        ("AUTO", "0", "2:tail"),  # after the last one
        ("MANUAL", "7", "0:tail,2:39"),  # before what follows the loop; in the last batch
    ],
)
def test_the_example_goes_on_where_it_was_killed(
    server: Server, run_dir: Path, uninterrupted: tuple[str, list[str]], mode: str, freq: str, kill: str
) -> None:
    weights, history = uninterrupted
    script = Script(server, run_dir.parent, str(SCRIPT), str(run_dir))
    for moment in kill.split(","):
        assert script.run(CF_MODE=mode, CF_FREQ=freq, CF_KILL=moment) == -signal.SIGKILL, script.output
    assert script.run(CF_MODE=mode, CF_FREQ=freq) == 0, script.output
    assert list(dict.fromkeys(ledger(run_dir))) == history, "the same samples, learning rates and losses, none missing"
    assert script.last_line() == weights
    assert "skip as many" not in script.output, "the iterator has brought the loader there"


def test_what_follows_the_loop_is_saved_when_the_next_epoch_begins(server: Server, run_dir: Path) -> None:
    """A schedule after the loop: the checkpoint of the end of the epoch is before it, and must not be the last word."""
    whole = Script(server, run_dir.parent, str(SCRIPT), str(run_dir.with_name("whole")))
    assert whole.run(CF_MODE="MANUAL", CF_TAIL="1") == 0, whole.output
    script = Script(server, run_dir.parent, str(SCRIPT), str(run_dir))
    assert script.run(CF_MODE="MANUAL", CF_TAIL="1", CF_KILL="1:0") == -signal.SIGKILL, script.output
    assert script.run(CF_MODE="MANUAL", CF_TAIL="1") == 0, script.output
    assert script.last_line() == whole.last_line()


def test_an_accumulation_that_goes_over_the_end_of_an_epoch(run_dir: Path) -> None:
    """The gradient of the last batches is in no checkpoint: what followed the loop is saved after the step it is in."""

    def train(small: Small, batches: int) -> list[torch.Tensor]:
        small.model.eval()  # no statistics, no dropout: what else is of the last batch
        while batches:
            for batch in small.iterator:
                small.model(batch / 24).pow(2).mean().backward()
                at = small.iterator.state_dict()
                if at["steps_so_far"] % 4 == 0:  # of six batches
                    small.manager.weight_update()
                    small.optimizer.zero_grad()
                batches -= 1
                if not batches:
                    return small.weights()
            small.optimizer.param_groups[0]["weight_decay"] += 0.1
        return small.weights()

    whole = Small(run_dir / "whole", mode=CFMode.MANUAL)
    expected = train(whole, 17)
    whole.manager.close()
    for stop in (7, 9):  # before the step that uses them, and after it
        first = Small(run_dir / str(stop), mode=CFMode.MANUAL)
        train(first, stop)
        assert (2 in first.steps_on_disk()) == (stop == 9)
        first.manager.close()
        again = Small(run_dir / str(stop), mode=CFMode.MANUAL, restore="before", seed=0)
        done = 0 if again.restored is None else again.restored["steps_so_far"]
        assert same(train(again, 17 - done), expected)
        again.manager.close()


def endless(iterator: CFIterator) -> Iterator[torch.Tensor]:
    while True:
        yield from iterator


def make(where: Path, *, restored: dict[str, Any] | None = None, by: int = 1, **options: Any) -> CFIterator:
    start = restored or {"epoch": 0, "start_index": 0}
    reader = Reader(SAMPLES, index=start["start_index"], epoch=start["epoch"])
    loader = PatchedIterator(reader, BATCH, SAMPLES, resume_size=SAMPLES - start["start_index"], by=by)
    return CFIterator(loader, bs=BATCH, **options)


def test_the_size_is_that_of_a_whole_epoch_also_in_the_one_that_goes_on(run_dir: Path) -> None:
    iterator = make(run_dir, restored={"epoch": 1, "start_index": 24}, epoch=1, steps_this_epoch=6)
    assert (iterator._size, len(iterator)) == (SAMPLES, BATCHES)
    assert len(list(iterator)) == BATCHES - 6
    iterator.reset()
    assert (iterator._size, len(list(iterator))) == (SAMPLES, BATCHES)
    assert iterator.state_dict() == {"epoch": 3, "iter": 0, "start_index": 0, "steps_so_far": 30}


def test_an_epoch_ends_when_the_loader_says_so_and_not_when_its_size_does(run_dir: Path) -> None:
    """Several pipelines in one iterator: fewer batches than the size says, and one of another batch size: more."""
    assert len(list(make(run_dir, by=2))) == BATCHES / 2
    small = Small(run_dir, mode=CFMode.MANUAL, is_wrapped=False)

    class Underrated:
        """Says that it is half as long as it is."""

        _size = SAMPLES // 2

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.full((4, 8), float(number)) for number in range(BATCHES)])

    iterator = CFIterator(Underrated(), bs=BATCH, chk_freq=4, cf_manager=small.manager)
    small.iterator = iterator
    for batch in iterator:
        small.update(batch)
    assert iterator.state_dict() == {"epoch": 1, "iter": 0, "start_index": 0, "steps_so_far": BATCHES}
    # The agent prunes after it has committed.
    wait_for(lambda: small.steps_on_disk() == [8, 10], "and the fifth batch was not taken for the last one")
    small.manager.close()


def test_the_loops_counter_goes_on(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Small(run_dir, mode=CFMode.MANUAL, chk_freq=4)
    first.train(batches=5)
    first.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL, restore="before")
    assert next(checkfreq.enumerate(again.iterator, 1))[0] == 5
    assert next(checkfreq.enumerate("ab", 3)) == (3, "a") and list(checkfreq.enumerate([])) == []
    assert "starts at 0 again" not in caplog.text
    again.manager.close()
    plain = Small(run_dir, mode=CFMode.MANUAL, restore="before")
    with caplog.at_level("INFO", "stepwell"):
        assert next(iter(enumerate(plain.iterator)))[0] == 0
    assert "continuing at batch 4 of epoch 0: enumerate() in the loop starts at 0 again" in caplog.text
    plain.manager.close()


def test_memory_levels_and_deltas_are_those_of_the_checkpointer(run_dir: Path, tmp_path: Path) -> None:
    import stepwell

    model = torch.nn.Linear(2, 2)
    with pytest.raises(stepwell.ConfigError, match="memory="):
        CFManager(str(run_dir), CFCheckpoint(model=model), memory=3).checkpointer()  # type: ignore[arg-type]
    levels = [stepwell.Node(str(tmp_path / "cache")), stepwell.Shared(every=2)]
    manager = CFManager(str(run_dir), CFCheckpoint(model=model), mode=CFMode.MANUAL, levels=levels)
    iterator = CFIterator([torch.ones(1)] * 3, bs=1, chk_freq=1, cf_manager=manager)
    assert len(list(iterator)) == 3
    manager.close()
    assert list((tmp_path / "cache").rglob("manifest.json"))
    manager = CFManager(
        str(run_dir / "memory"), CFCheckpoint(model=model), mode=CFMode.MANUAL, memory=stepwell.Every(steps=1)
    )
    assert len(list(CFIterator([torch.ones(1)] * 3, bs=1, cf_manager=manager))) == 3
    manager.checkpointer().wait()
    assert manager.checkpointer().status().memory_step == 3
    manager.close()
    small = Small(run_dir / "deltas", mode=CFMode.MANUAL, is_wrapped=False)
    chk = CFCheckpoint(model=small.model, optimizer=small.optimizer)
    small.manager = CFManager(str(run_dir / "deltas"), chk, mode=CFMode.MANUAL, deltas=stepwell.LC(bits=3))
    small.iterator = CFIterator(small.loader, chk_freq=2, cf_manager=small.manager)
    batches = endless(small.iterator)
    wait_for(
        lambda: small.update(next(batches)) or small.manager.checkpointer().status().delta_step, "a record after a base"
    )
    small.manager.close()
