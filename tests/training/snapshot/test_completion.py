"""Callbacks of saves: run in a thread of their own, by the end of the run, and in forked children too."""

from __future__ import annotations

import os
import threading

import pytest

from stepwell.training.loop.completion import Completion, finish_callbacks


def test_whoever_ends_the_run_waits_for_callbacks() -> None:
    future: Completion[int] = Completion()
    go, told = threading.Event(), []
    future.add_done_callback(lambda done: (go.wait(10), told.append(done.result())))
    future.set_result(3)
    assert told == []
    go.set()
    finish_callbacks(10)
    assert told == [3]


def test_one_that_takes_longer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    future: Completion[int] = Completion()
    go = threading.Event()
    future.add_done_callback(lambda done: go.wait(10))
    future.set_result(3)
    finish_callbacks(0.01)
    assert "a callback of a save still runs after 0 s" in caplog.text
    go.set()
    finish_callbacks(10)


def test_a_callback_may_end_the_run() -> None:
    future: Completion[int] = Completion()
    told = threading.Event()
    future.add_done_callback(lambda done: (finish_callbacks(60), told.set()))
    future.set_result(3)
    assert told.wait(10)
    finish_callbacks(10)


def test_a_child_that_is_forked_from_a_callback_has_callbacks_of_its_own() -> None:
    """The thread that runs them is not there."""
    go, is_there = threading.Event(), threading.Event()
    future: Completion[int] = Completion()
    future.add_done_callback(lambda done: (is_there.set(), go.wait(10)))
    future.set_result(3)
    assert is_there.wait(10)
    pid = os.fork()
    if not pid:
        told: list[int] = []
        mine: Completion[int] = Completion()
        mine.add_done_callback(lambda done: told.append(done.result()))
        mine.set_result(4)
        finish_callbacks(10)
        os._exit(0 if told == [4] else 1)
    go.set()
    finish_callbacks(10)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
