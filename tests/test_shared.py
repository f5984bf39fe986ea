"""Ranks agree on who stores what: several of them in one process, with messages in place of the line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stepwell.errors import GroupError, PersistError
from stepwell.events.rank_events import Sharing
from stepwell.ranks import share_rounds
from stepwell.ranks.claims import Message
from stepwell.ranks.share_rounds import ShareRounds
from stepwell.training.snapshot.digests import Reading
from stepwell.training.snapshot.guard import Guard
from stepwell.training.state.capture import Capture
from stepwell.training.state.flatten import Flat
from stepwell.training.state.tracked import track


class Rank:
    """One rank with a model, an optimizer and statistics of its own."""

    def __init__(self, job: Job, number: int, size: int) -> None:
        self.model = torch.nn.Linear(4, 8)
        with torch.no_grad():
            self.model.weight.copy_(torch.arange(32.0).view(8, 4))
            self.model.bias.fill_(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.own = {"seen": torch.full((3,), float(number))}
        self.capture = Capture(track({"model": self.model, "optimizer": self.optimizer, "own": self.own}))
        self.shared = ShareRounds(
            number,
            size,
            lambda message, on_refused, to: job.send(number, json.dumps(message), to),
            self.capture.find_roles,
            job.agreed.append,
        )

    def cut(self, step: int, *, block: bool = False) -> Flat | None:
        return self.shared.cut(self.capture.flatten(), step, block=block)

    def rows(self, step: int) -> dict[str, int]:
        flat = self.cut(step)
        assert flat is not None
        return {leaf.name: leaf.tensor.shape[0] for leaf in flat.leaves if not leaf.is_private}


class Job:
    def __init__(self, size: int) -> None:
        self.agreed: list[Sharing] = []
        self.sent: list[tuple[int, int | None, Message]] = []
        self.ranks: list[Rank] = []
        self.ranks += [Rank(self, number, size) for number in range(size)]

    def send(self, rank: int, text: str, to: int | None) -> None:
        message = json.loads(text)
        self.sent.append((rank, to, message))
        others = [0] if rank else [to] if to is not None else range(1, len(self.ranks))
        for other in others:
            self.ranks[other].shared.hear(rank, message)

    def agree(self, step: int) -> None:
        """As in a step: nobody waits, and the verdict comes at some time."""
        wait_for(lambda: [rank for rank in self.ranks if rank.cut(step) is None] == [])

    def close(self) -> None:
        for rank in self.ranks:
            rank.shared.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def make() -> Iterator[Callable[[int], Job]]:
    jobs: list[Job] = []

    def made(size: int) -> Job:
        jobs.append(Job(size))
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def test_equal_leaves_are_stored_once_and_own_ones_by_each(make: Any) -> None:
    job = make(4)
    assert all(rank.cut(1) is None for rank in job.ranks)
    job.agree(1)
    stored = [rank.rows(1) for rank in job.ranks]
    assert sum(rows.get("model/weight", 0) for rows in stored) == 8
    assert sum(rows.get("model/bias", 0) for rows in stored) == 8
    (said,) = job.agreed
    assert (said.ranks, said.shared, said.own) == (4, 2, 1)


def test_a_save_that_waits_gets_the_verdict_at_once(make: Any) -> None:
    job = make(2)
    found: dict[int, Flat | None] = {}

    def save(number: int) -> None:
        found[number] = job.ranks[number].cut(1, block=True)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] is not None and found[1] is not None


def test_the_training_thread_neither_hashes_nor_encodes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    inner = share_rounds.Claims.of
    monkeypatch.setattr(
        share_rounds.Claims, "of", lambda held: threads.append(threading.current_thread()) or inner(held)
    )
    job = make(3)
    job.agree(1)
    assert len(threads) == 3 and threading.main_thread() not in threads


def begin_slowly(job: Job, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """All ranks begin to look, and none of their threads gets anywhere before the event."""
    free, inner = threading.Event(), Reading._help

    def help_later(self: Reading) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert free.wait(30)
        inner(self)

    monkeypatch.setattr(Reading, "_help", help_later)
    for rank in job.ranks:
        assert rank.cut(1) is None
    return free


def test_a_step_under_the_look_is_held_back(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is on the state before it, on all ranks."""
    job = make(2)
    free = begin_slowly(job, monkeypatch)
    for rank in job.ranks:
        rank.model(torch.ones(1, 4)).sum().backward()
        rank.shared.gate()
        rank.optimizer.step()
    free.set()
    job.agree(2)
    assert not job.ranks[0].shared.is_torn and job.agreed[-1].shared == 2


def test_what_changes_under_the_look_is_nobodys_copy_until_all_look_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(2)
    free = begin_slowly(job, monkeypatch)
    with torch.no_grad():
        job.ranks[1].model.bias.add_(1)  # before it was hashed: nobody knows what the ranks had in common
    free.set()
    job.agree(1)
    assert (job.agreed[-1].shared, job.agreed[-1].own) == (1, 2)
    assert job.ranks[0].shared.is_torn, "rank 0 plans that all look again"
    with torch.no_grad():
        job.ranks[0].model.bias.add_(1)
    for rank in job.ranks:
        rank.shared.look_again()
    assert all(rank.cut(3) is None for rank in job.ranks)
    assert not job.ranks[0].shared.is_torn
    job.agree(3)
    assert (job.agreed[-1].shared, job.agreed[-1].own) == (2, 1)


def test_control_without_the_guard_unequal_tensors_are_taken_for_equal(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's tensor was another one at the trigger, and becomes equal while it is looked at."""
    for is_guarded in (True, False):
        if not is_guarded:
            monkeypatch.setattr(Guard, "all_changed", lambda self: [])
        job = make(2)
        with torch.no_grad():
            job.ranks[1].model.bias.fill_(7.0)
        with monkeypatch.context() as patch:
            free = begin_slowly(job, patch)
            with torch.no_grad():
                job.ranks[1].model.bias.fill_(1.0)
            free.set()
            job.agree(1)
        assert job.agreed[-1].shared == (1 if is_guarded else 2)


def test_ranks_that_do_not_tell_are_torn(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_rounds, "_TORN_SECONDS", 0.0)
    job = make(2)
    assert job.ranks[0].cut(1) is None
    wait_for(lambda: job.ranks[0].shared.is_torn)


def test_a_lost_rank_ends_the_wait(make: Any) -> None:
    job = make(2)
    assert job.ranks[0].cut(1) is None
    job.ranks[0].shared.lose(GroupError("rank 1 is gone", missing=[1], operation="sharing the state"))
    with pytest.raises(GroupError, match="rank 1 is gone"):
        job.ranks[0].cut(1, block=True)


def test_a_wait_has_an_end(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_rounds, "default_seconds", lambda: 0.05)
    job = make(2)
    with pytest.raises(PersistError, match=r"did not agree within 0\.05 s"):
        job.ranks[0].cut(1, block=True)


def test_claims_that_a_rank_has_left_behind_are_forgotten(make: Any) -> None:
    job = make(3)
    for step in range(1, 6):
        job.ranks[1].shared.look_again()
        job.ranks[1].cut(step)
        wait_for(lambda step=step: len(job.sent) == step)
    assert len(job.ranks[0].shared._heard) == 1


def test_equal_answers_are_one_message(make: Any) -> None:
    job = make(4)
    job.agree(1)
    assert [to for rank, to, message in job.sent if message["type"] == "shares"] == [None]
