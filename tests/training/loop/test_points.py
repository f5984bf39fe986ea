"""Saves at every point of the loop are exact: in a step, after it, in the code after an epoch."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import stepwell
from stepwell import DataError, Every, Keep, Never, StateError
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.paths import RunPaths
from tests.training.loop.small import Numbers, Small, same


def committed(where: Path) -> list[str]:
    return sorted(str(entry.id) for entry in scan(RunPaths(where)) if entry.is_good)


class Accumulating(Small):
    """Steps after every fourth batch; an epoch has six."""

    def work(self, batch: torch.Tensor, number: int) -> None:
        self.model(batch / 24).pow(2).mean().backward()
        if number % 4 == 3:
            self.optimizer.step()
            self.optimizer.zero_grad()


def open_run(where: Path, policy: Any = None, **options: Any) -> Accumulating:
    run = Accumulating(where, {"policy": policy or Never(), **options})
    run.ckpt.restore()
    return run


# -- in the middle of a step ------------------------------------------------------------------------------------------


def test_a_save_in_a_step_is_taken_at_its_end(run_dir: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    note.write_text("x")
    run = open_run(run_dir)
    handle = None
    for number, batch in enumerate(itertools.islice(run.ckpt.data, 5)):
        run.work(batch, number)
        if number == 1:
            handle = run.ckpt.save(name="early", files={"note": note})
            assert handle.step == 1
    assert handle is not None
    assert handle.wait(60) == "step-000000000001.l0001"
    assert (run_dir / handle.wait() / "rank-00000.file.note").exists()
    assert [event["step"] for event in run.events("put-off")] == [1]
    run.ckpt.close(save=False)


@pytest.mark.parametrize("way", ["wait", "upload", "staging", "exception"])
def test_waiting_for_it_in_the_step_is_refused(way: str, run_dir: Path) -> None:
    run = open_run(run_dir)
    run.work(next(iter(run.ckpt.data)), 0)
    batches = iter(run.ckpt.data)
    run.work(next(batches), 1)
    handle = run.ckpt.save()
    waits = {
        "wait": handle.wait,
        "upload": handle.upload_completion.result,
        "staging": handle.staging_completion.result,
        "exception": handle.upload_completion.exception,
    }
    with pytest.raises(StateError, match=r"in the middle of step 1.*after optimizer\.step\(\)"):
        waits[way]()
    assert not handle.upload_completion.done()
    run.ckpt.close()


def test_another_thread_may_wait_for_it(run_dir: Path) -> None:
    run = open_run(run_dir)
    found: list[str] = []
    waiter = None
    for number, batch in enumerate(itertools.islice(run.ckpt.data, 5)):
        run.work(batch, number)
        if number == 1:
            handle = run.ckpt.save()
            waiter = threading.Thread(target=lambda handle=handle: found.append(handle.wait(60)))  # type: ignore[misc]
            waiter.start()
    assert waiter is not None
    waiter.join(60)
    assert found == ["step-000000000001.l0001"]
    run.ckpt.close(save=False)


def test_the_end_of_the_run_takes_it(run_dir: Path) -> None:
    run = open_run(run_dir)
    for number, batch in enumerate(itertools.islice(run.ckpt.data, 2)):
        run.work(batch, number)
    batches = iter(run.ckpt.data)
    next(batches)
    handle = run.ckpt.save(name="late")
    run.ckpt.close()
    assert handle.wait(0) == "step-000000000000.l0001"


def test_without_an_end_it_fails(run_dir: Path) -> None:
    run = open_run(run_dir)
    batches = iter(run.ckpt.data)
    run.work(next(batches), 0)
    handle = run.ckpt.save()
    run.ckpt.close(save=False)
    with pytest.raises(stepwell.PersistError, match="postponed to the end of its step, and the run ended before"):
        handle.wait(0)


def test_a_save_before_the_optimizer_of_an_own_loop(run_dir: Path) -> None:
    """Nothing was delivered by us: the gradients tell that a step is under way."""
    run = open_run(run_dir, data=None)
    for number in range(3):
        run.model(torch.rand(4, 8)).mean().backward()
        handle = run.ckpt.save() if number == 1 else None
        assert handle is None or not handle.upload_completion.done()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.ckpt.step()
        if handle is not None:
            assert handle.wait(60) == "step-000000000002.l0001"
            assert run.ckpt.save().wait(60) == "step-000000000002.l0001.r1", "after step() it is taken at once"
    run.ckpt.close(save=False)


@pytest.mark.parametrize("taken", range(1, 7))
def test_a_break_in_an_accumulation_goes_on_with_its_gradients(taken: int, run_dir: Path, tmp_path: Path) -> None:
    def train(run: Accumulating, count: int) -> None:
        for epoch in run.ckpt.epochs(2):
            for number, batch in enumerate(run.ckpt.data, run.ckpt.data.index):
                run.seen.append((epoch, [int(value) for value in batch[:, 0]]))
                run.work(batch, number)
                count -= 1
                if not count:
                    return

    straight = open_run(tmp_path / "straight")
    train(straight, 99)
    first = open_run(run_dir)
    train(first, taken)
    first.ckpt.close()
    second = open_run(run_dir)
    train(second, 99)
    assert first.seen + second.seen == straight.seen
    assert same(second.parameters(), straight.parameters())
    assert len(second.events("resumed-in-part")) == bool(taken % 4)


def test_gradients_that_wait_between_two_epochs_are_saved_with_them(run_dir: Path) -> None:
    run = open_run(run_dir)
    for number, batch in enumerate(run.ckpt.data):
        run.work(batch, number)
    waiting = [parameter.grad.clone() for parameter in run.model.parameters() if parameter.grad is not None]
    run.ckpt.save().wait(60)
    run.ckpt.close(save=False)
    again = open_run(run_dir)
    assert waiting and same([p.grad for p in again.model.parameters() if p.grad is not None], waiting)
    assert again.ckpt.data.at == (1, 0, 0)
    again.ckpt.close(save=False)


# -- what ends an epoch -----------------------------------------------------------------------------------------------


def test_every_epoch_is_saved_although_no_step_ends_with_it(run_dir: Path) -> None:
    run = open_run(run_dir, Every(epochs=1), keep=Keep(last=2, epochs=True))
    for _ in run.ckpt.epochs(4):
        for number, batch in enumerate(run.ckpt.data):
            run.work(batch, number)
        run.ckpt.wait()
    assert [name.split(".")[0] for name in committed(run_dir)] == [f"step-{step:012d}" for step in (1, 2, 3, 4, 4)]


def test_an_epoch_whose_length_nobody_knows_is_saved_too(run_dir: Path) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        """Twelve rows, which it does not say."""

        at = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.at < 12:
                self.at += 1
                yield torch.full((8,), float(self.at))
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    run = open_run(run_dir, Every(epochs=1), data=DataLoader(Stream(), batch_size=4))
    for _ in run.ckpt.epochs(3):
        for batch in run.ckpt.data:
            run.update(batch)
    assert [event["step"] for event in run.events("commit")] == [3, 6, 9]


@pytest.mark.parametrize("count", [1, 2])
def test_rounds_without_epochs_are_epochs_for_the_policy(count: int, run_dir: Path) -> None:
    run = open_run(run_dir, Every(epochs=count))
    for _ in range(4):
        for batch in run.ckpt.data:
            run.update(batch)
        run.ckpt.wait()
    run.ckpt.close(save=False)
    assert [event["step"] for event in run.events("commit")] == [6 * n for n in range(count, 5, count)]


def test_an_own_loader_is_saved_where_the_next_epoch_begins(run_dir: Path) -> None:
    run = open_run(run_dir, Every(epochs=1), data=None)
    for _ in run.ckpt.epochs(3):
        for _ in range(5):
            run.update(torch.rand(4, 8))
            run.ckpt.step()
        run.ckpt.wait()
    assert [event["step"] for event in run.events("commit")] == [5, 10, 15]


def test_an_own_loader_without_epochs_is_told_that_none_ever_ends(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run(run_dir, Every(epochs=1), data=None)
    for _ in range(3):
        run.update(torch.rand(4, 8))
        run.ckpt.step()
    run.ckpt.close(save=False)
    (line,) = [
        record.message for record in caplog.records if record.levelno == logging.WARNING and "epoch" in record.message
    ]
    assert line.startswith("policy=Every(steps=None, seconds=None, epochs=1) never happens")


# -- the code after an epoch ------------------------------------------------------------------------------------------


def test_what_comes_after_a_save_between_epochs_is_saved_again(run_dir: Path) -> None:
    run = open_run(run_dir)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    run.ckpt.close(save=False)
    ckpt = stepwell.Checkpointer(
        run_dir, model=run.model, optimizer=run.optimizer, scheduler=scheduler, data=run.loader, policy=Never()
    )
    ckpt.restore()
    for epoch in ckpt.epochs(3):
        for batch in ckpt.data:
            run.update(batch)
        if epoch == 0:
            ckpt.save()
            scheduler.step()
        elif epoch == 1:
            break
    ckpt.wait()
    assert [(event["step"], event["changed"]) for event in run.events("saved-again")] == [
        (6, ["optimizer", "scheduler"])
    ]
    assert committed(run_dir)[:2] == ["step-000000000006.l0002", "step-000000000006.l0002.r1"]
    ckpt.close()


def test_a_save_that_nothing_follows_is_not_repeated(run_dir: Path) -> None:
    run = open_run(run_dir)
    for _ in run.ckpt.epochs(3):
        for batch in run.ckpt.data:
            run.update(batch)
        run.ckpt.save()
    assert run.events("saved-again") == []
    assert [event["step"] for event in run.events("commit")] == [6, 12, 18, 18]


def test_leaving_an_epoch_in_its_middle_says_that_its_code_runs_again(run_dir: Path) -> None:
    run = open_run(run_dir)
    counts = {"epochs": 0}
    run.ckpt.close(save=False)
    ckpt = stepwell.Checkpointer(
        run_dir, model=run.model, optimizer=run.optimizer, counts=counts, data=run.loader, policy=Never()
    )
    ckpt.restore()
    for _ in ckpt.epochs(3):
        for number, batch in enumerate(ckpt.data):
            run.update(batch)
            if number == 2:
                break
        counts["epochs"] += 1
        break
    ckpt.close()
    (event,) = run.events("left-in-epoch")
    assert (event["epoch"], event["batches"], event["changed"]) == (0, 3, ["counts"])


# -- what the loop has used -------------------------------------------------------------------------------------------


def steps_and_rest(run: Accumulating) -> tuple[list[int], list[int]]:
    """Saved and opened again: the samples used so far are not among those that come."""
    used = [index for _, batch in run.seen for index in batch]
    run.ckpt.save().wait(60)
    run.ckpt.close(save=False)
    again = open_run(run.where)
    rest = [int(value) for batch in again.ckpt.data for value in batch[:, 0]]
    again.ckpt.close(save=False)
    return used, rest


def test_accumulation_with_a_call_only_where_the_optimizer_steps(run_dir: Path) -> None:
    run = open_run(run_dir)
    for number, batch in enumerate(itertools.islice(run.ckpt.data, 4)):
        run.seen.append((0, [int(value) for value in batch[:, 0]]))
        run.work(batch, number)
        if number % 4 == 3:
            run.ckpt.step()
    used, rest = steps_and_rest(run)
    assert sorted(used + rest) == list(range(24))


def test_a_batch_that_is_skipped_before_the_call(run_dir: Path) -> None:
    run = open_run(run_dir)
    for number, batch in enumerate(itertools.islice(run.ckpt.data, 4)):
        run.seen.append((0, [int(value) for value in batch[:, 0]]))
        if number == 2:
            continue
        run.update(batch)
        run.ckpt.step()
    used, rest = steps_and_rest(run)
    assert sorted(used + rest) == list(range(24))


@pytest.mark.parametrize("explicit", [True, False])
def test_a_loop_that_reads_ahead_is_refused_at_its_first_step(explicit: bool, run_dir: Path) -> None:
    run = open_run(run_dir)
    batches = iter(run.ckpt.data)
    held = [next(batches), next(batches)]
    run.update(held.pop(0))
    with pytest.raises(DataError, match=r"ckpt\.step\(batches=n\)"):
        if explicit:
            run.ckpt.step()
        else:
            next(batches)
    run.ckpt.close(save=False)


def test_a_peek_at_the_first_batch_costs_nothing(run_dir: Path) -> None:
    run = open_run(run_dir)
    peeked = next(iter(run.ckpt.data))
    seen = []
    for batch in run.ckpt.data:
        seen += [int(value) for value in batch[:, 0]]
        run.update(batch)
    assert seen[:4] == [int(value) for value in peeked[:, 0]]
    assert sorted(seen) == list(range(24))
    run.ckpt.close(save=False)


def test_an_older_iterator_is_refused(run_dir: Path) -> None:
    run = open_run(run_dir)
    with pytest.raises(DataError, match=r"another iterator over ckpt\.data was started"):
        for _ in zip(run.ckpt.data, run.ckpt.data, strict=True):
            pass
    run.ckpt.close(save=False)


def test_a_consumer_that_stops_after_all_batches_goes_on_with_the_next_round(run_dir: Path) -> None:
    run = open_run(run_dir)
    for _ in range(3):
        for batch in itertools.islice(run.ckpt.data, len(run.ckpt.data)):
            run.update(batch)
    run.ckpt.close()
    assert run.ckpt.status().step == 18
    again = open_run(run_dir)
    assert again.ckpt.data.at.epoch == 3 or again.ckpt.data.is_at_end
    again.ckpt.close(save=False)


def test_the_index_goes_on_in_mid_epoch(run_dir: Path) -> None:
    run = open_run(run_dir)
    assert run.ckpt.data.index == 0
    for batch in itertools.islice(run.ckpt.data, 4):
        run.update(batch)
    run.ckpt.close()
    again = open_run(run_dir)
    assert [number for number, _ in enumerate(again.ckpt.data, again.ckpt.data.index)] == [4, 5]
    assert again.ckpt.data.index == 0, "the next round is another epoch"
    again.ckpt.close(save=False)


def test_own_loaders_have_an_index_too_and_are_told(run_dir: Path) -> None:
    run = open_run(run_dir, data=None)
    for epoch in run.ckpt.epochs(2):
        for _ in range(3 + epoch):
            run.update(torch.rand(4, 8))
            run.ckpt.step()
        if epoch == 1:
            break
    run.ckpt.close()
    again = open_run(run_dir, data=None)
    assert (again.ckpt.data.at.epoch, again.ckpt.data.index) == (1, 4)
    (event,) = again.events("own-loader")
    assert (event["epoch"], event["batches"]) == (1, 4)
    again.ckpt.close(save=False)


def test_a_loop_that_draws_its_batches_is_not_told_to_skip(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its generators are restored: batches that it skips would be lost. The library cannot tell which loop it is."""
    caplog.set_level("INFO", logger="stepwell")
    drawn = []
    for _ in range(2):
        run = open_run(run_dir, data=None)
        (line,) = [line for line in caplog.messages if " follows " in line] or [None]
        for _ in range(3):
            drawn.append(torch.rand(4, 8))
            run.update(drawn[-1])
            run.ckpt.step()
        run.ckpt.close()
    assert (
        line is not None
        and "follows 3 batches of epoch 0 (or of all epochs without ckpt.epochs()). If they come from" in line
    )
    assert "draws its batches from the global generators" in line and "skips nothing: stepwell restores these" in line
    assert len({batch.sum().item() for batch in drawn}) == 6, "the second start drew on"


# -- what the script set ----------------------------------------------------------------------------------------------


def test_a_changed_learning_rate_is_named_once(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(rate: float) -> Small:
        small = Small(run_dir, {"policy": Never()})
        small.optimizer.param_groups[0]["lr"] = rate
        small.ckpt.restore()
        for batch in itertools.islice(small.ckpt.data, 1):
            small.update(batch)
        small.ckpt.close()
        return small

    for rate in (0.01, 0.01, 0.05, 0.05):
        last = run(rate)
    assert last.optimizer.param_groups[0]["lr"] == 0.01, "the checkpoint's holds"
    lines = [record.message for record in caplog.records if "in the script" in record.message]
    assert len(lines) == 1
    assert "optimizer.param_groups.0.lr was 0.01, is 0.05 in the script, and stays 0.01" in lines[0]


def test_the_seed_of_the_script_is_the_order_of_a_new_run(tmp_path: Path) -> None:
    def first_batches(name: str, seed: int, generator: torch.Generator | None = None) -> list[int]:
        torch.manual_seed(seed)
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator)
        ckpt = stepwell.Checkpointer(tmp_path / name, values={"x": 1}, data=loader, policy=Never())
        ckpt.restore()
        rows = [int(value) for batch in ckpt.data for value in batch[:, 0]]
        ckpt.close(save=False)
        return rows

    one, again, other = (first_batches(f"run-{i}", seed) for i, seed in enumerate((3, 3, 4)))
    assert one == again != other
    own = [first_batches(f"own-{i}", i, torch.Generator().manual_seed(2**64 - 1)) for i in range(2)]
    assert own[0] == own[1]
