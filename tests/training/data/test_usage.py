"""Which batches the loop has used: counted where that can be known, refused with the way out where it cannot."""

from __future__ import annotations

import threading

import pytest

from stepwell.errors import DataError
from stepwell.training.data.cursor import Cursor
from stepwell.training.data.usage import Usage


def at(batches: int) -> Cursor:
    return Cursor(0, batches)


class Reader:
    """A loop, batch by batch."""

    def __init__(self) -> None:
        self.usage, self.taken, self._has_trained = Usage(), 0, False

    def take(self, *, has_trained: bool = False) -> None:
        """Ask for a batch; `has_trained`: gradients came since the last request."""
        self.usage.come_back(has_trained=has_trained)
        self.taken += 1
        self.usage.deliver(at(self.taken))

    def step(self, batches: int | None = None) -> Cursor:
        self.usage.note_trained()
        self.usage.use(batches)
        return self.usage.at


def test_one_batch_a_step() -> None:
    loop = Reader()
    for number in range(1, 4):
        loop.take()
        assert loop.step() == at(number)
    assert loop.usage.keeps_up


def test_accumulation_uses_all_of_them() -> None:
    loop = Reader()
    loop.take()
    for _ in range(3):
        loop.take(has_trained=True)
    assert loop.step() == at(4)


def test_a_loop_that_reads_ahead_is_refused_until_it_says_so() -> None:
    loop = Reader()
    loop.take()
    loop.take()
    with pytest.raises(DataError, match=r"2 batches were taken .*ckpt\.step\(batches=n\).*before `continue`"):
        loop.step()
    assert loop.step(1) == at(1)
    loop.take()
    assert loop.step(1) == at(2)


def test_a_batch_that_is_read_just_before_the_step_is_refused_until_the_loop_says_so() -> None:
    loop = Reader()
    loop.take()
    loop.take(has_trained=True)
    loop.usage.note_trained(has_trained=False)
    with pytest.raises(DataError, match=r"2 batches were taken .*ckpt\.step\(batches=n\)"):
        loop.usage.use(None)
    loop.usage.use(1)
    assert loop.usage.at == at(1)


def test_a_skipped_batch_is_used_once_it_is_known_that_the_loop_keeps_up() -> None:
    loop = Reader()
    loop.take()
    loop.step()
    loop.take()
    loop.take()  # `continue`: nothing was done with the one before
    assert loop.step() == at(3)


def test_a_skipped_batch_at_the_very_start_is_refused() -> None:
    loop = Reader()
    loop.take()
    loop.take()
    assert loop.usage.is_unclear
    loop.usage.keeps_up = True  # a checkpoint knew
    assert not loop.usage.is_unclear
    assert loop.step() == at(2)


@pytest.mark.parametrize("is_hearsay", [True, False])
def test_what_counts_as_skipped_by_hearsay_is_told_once(is_hearsay: bool) -> None:
    """The script may read ahead since the restart, which looks the same."""
    loop, told = Reader(), list[int]()
    loop.usage.keeps_up, loop.usage.is_hearsay, loop.usage.on_skipped = True, is_hearsay, told.append
    for _ in range(2):
        loop.take()
        loop.take()
        loop.step()
    assert told == [1] * is_hearsay
    assert loop.usage.at == at(4)


def test_a_loop_that_goes_on_as_before_is_told_nothing() -> None:
    loop, told = Reader(), list[int]()
    loop.usage.keeps_up, loop.usage.is_hearsay, loop.usage.on_skipped = True, True, told.append
    loop.take()
    loop.take(has_trained=True)
    loop.step()
    loop.take()
    loop.step()
    assert told == []


def test_another_thread_that_reads_has_to_be_declared() -> None:
    loop = Reader()
    reader = threading.Thread(target=loop.take)
    reader.start()
    reader.join()
    with pytest.raises(DataError, match="another thread than the training thread reads"):
        loop.step()
    assert loop.step(1) == at(1)


def test_a_peek_comes_again() -> None:
    loop = Reader()
    loop.take()
    assert loop.usage.take_back() == at(0)
    assert loop.usage.is_empty


def test_what_was_trained_on_does_not_come_again() -> None:
    loop = Reader()
    loop.take()
    loop.usage.note_trained()
    assert loop.usage.take_back() == at(1)


def test_what_a_loop_that_reads_ahead_holds_does_not_come_again() -> None:
    loop = Reader()
    loop.take()
    loop.take()
    loop.step(1)
    loop.take()
    assert loop.usage.take_back() == at(3)


def test_in_the_middle_of_a_step_the_newest_counts_if_it_was_trained_on() -> None:
    loop = Reader()
    loop.take()
    loop.step()
    loop.take()
    loop.take(has_trained=True)
    assert loop.usage.reached(is_over=False) == at(2)
    assert loop.usage.reached(is_over=True) == at(3)
    loop.usage.is_newest_trained = True
    assert loop.usage.reached(is_over=False) == at(3)


def test_what_a_save_in_the_body_has_counted_is_not_counted_again() -> None:
    loop = Reader()
    for _ in range(3):
        loop.take()
    loop.usage.note_trained()
    loop.usage.use(1)
    loop.take()
    loop.usage.note_trained()
    early = loop.usage.use_body()
    loop.usage.use(1, early=early)
    assert loop.usage.at == at(2)
