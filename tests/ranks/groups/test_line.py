"""The line: what arrives, who is lost, and that a sender never waits."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from stepwell.errors import GroupError
from stepwell.ranks.groups.local import LocalGroup
from stepwell.ranks.line import line_connection as wire_module
from stepwell.ranks.line.line import Line
from tests.ranks.groups.circle import Circle
from tests.ranks.groups.ends import KEY, SECONDS, Caller, End, frame, frame_of, open_all, read_body, sealed

# What arrives


@pytest.mark.parametrize("size", [2, 5])
def test_both_directions_in_order(stack: ExitStack, size: int) -> None:
    leader, *others = ends = open_all(stack, size)
    for number in range(500):
        for end in ends:
            end.line.send({"n": number})
    leader.until(lambda: len(leader.heard) == 500 * len(others))
    for rank, other in enumerate(others, 1):
        other.until(lambda other=other: len(other.heard) == 500)  # type: ignore[misc]
        assert [message["n"] for sender, message in leader.heard if sender == rank] == list(range(500))
        assert other.heard == [(0, {"n": number}) for number in range(500)]
    assert leader.threads == {"stepwell-line"}


def test_to_one_rank_only(stack: ExitStack) -> None:
    leader, first, second = open_all(stack, 3)
    leader.line.send({"n": 1}, to=2)
    leader.line.send({"n": 2})
    second.until(lambda: len(second.heard) == 2)
    first.until(lambda: len(first.heard) == 1)
    assert first.heard == [(0, {"n": 2})]
    assert second.heard == [(0, {"n": 1}), (0, {"n": 2})]


def test_a_large_message_arrives_whole(stack: ExitStack) -> None:
    leader, other = open_all(stack, 2)
    other.line.send({"text": "x" * (20 << 20)})
    leader.until(lambda: bool(leader.heard))
    assert len(leader.heard[0][1]["text"]) == 20 << 20


def test_what_was_sent_is_what_it_was_then(stack: ExitStack) -> None:
    leader, other = open_all(stack, 2)
    message = {"n": 1}
    leader.line.send(message)
    message["n"] = 2
    other.until(lambda: bool(other.heard))
    assert other.heard == [(0, {"n": 1})]


def test_a_callback_that_fails_does_not_end_the_line(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    leader, other = open_all(stack, 2)
    with caplog.at_level(logging.ERROR, logger="stepwell"):
        other.line.send({"raise": True})
        other.line.send({"n": 1})
        leader.until(lambda: len(leader.heard) == 2)
    assert "a callback of the line failed" in caplog.text


def test_alone_nothing_happens() -> None:
    before = threading.active_count()
    line = Line(LocalGroup(), KEY, lambda rank, message: None, lambda rank: None)
    line.open()
    line.send({"n": 1})
    assert threading.active_count() == before
    line.close()
    line.close()


def test_ranks_that_have_no_line_are_refused(stack: ExitStack) -> None:
    leader, other = open_all(stack, 2)
    for end, to in ((leader, 0), (other, 1)):
        with pytest.raises(GroupError, match="has no line to"):
            end.line.send({}, to=to)
    with pytest.raises(GroupError, match="at most"):
        other.line.send({"text": "x" * (65 << 20)})


# Who is lost


@pytest.mark.parametrize(
    "last_words",
    [
        lambda sock: b"",
        lambda sock: struct.pack("<Q", (64 << 20) + 1),
        lambda sock: struct.pack("<Q", 1 << 63),
        lambda sock: frame_of(sock, b"\xff\xff\xff\xff"),
        lambda sock: frame(sock, [1, 2]),
        lambda sock: frame(sock, "text"),
        lambda sock: frame_of(sock, b"[" * 400_000),
        lambda sock: frame(sock, {"n": 2})[:-1] + b"x",
        lambda sock: struct.pack("<Q", 0) + bytes(32),
        lambda sock: frame(sock, {"n": 2}, rank=0),
        lambda sock: frame(sock, {"n": 2}, kind=7),
        lambda sock: sealed(sock, b"\0\0"),
    ],
    ids=[
        "nothing",
        "a long message",
        "a huge length",
        "no text",
        "a list",
        "a string",
        "too deep",
        "a wrong tag",
        "a goodbye of somebody else",
        "as another rank",
        "no kind of frame",
        "less than a head",
    ],
)
def test_a_peer_that_ends_or_talks_nonsense_is_lost_once(
    stack: ExitStack, last_words: Callable[[socket.socket], bytes]
) -> None:
    caller = Caller(stack)
    sock = caller.connect()
    caller.join()
    sock.sendall(frame(sock, {"n": 1}) + last_words(sock))
    sock.shutdown(socket.SHUT_WR)
    caller.leader.until(lambda: caller.leader.lost == [1])
    assert caller.leader.heard == [(1, {"n": 1})]
    caller.leader.line.send({"n": "to nobody"})
    caller.leader.line.close()
    assert caller.leader.lost == [1]


def test_a_peer_that_closes_is_not_lost(stack: ExitStack) -> None:
    leader, first, second = open_all(stack, 3)
    first.line.send({"n": 1})
    first.line.close()
    second.line.send({"n": 2})
    leader.until(lambda: len(leader.heard) == 2)
    leader.line.close()
    second.line.close()
    assert [leader.lost, first.lost, second.lost] == [[], [], []]


def test_a_slow_reader_does_not_hold_the_sender(stack: ExitStack) -> None:
    caller = Caller(stack)
    sock = caller.connect()
    caller.join()
    text = "x" * (1 << 20)
    slowest = 0.0
    for number in range(30):
        began = time.monotonic()
        caller.leader.line.send({"n": number, "text": text})
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.5
    with sock.makefile("rb") as stream:
        for number in range(30):
            assert json.loads(read_body(sock, stream))["n"] == number
    assert caller.leader.lost == []


def test_a_peer_that_never_reads_is_lost(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "_STUCK_SECONDS", 0.3)
    caller = Caller(stack)
    caller.connect()
    caller.join()
    for _ in range(10):
        caller.leader.line.send({"text": "x" * (9 << 20)})
    caller.leader.until(lambda: caller.leader.lost == [1])


# The end


def test_close_sends_what_is_queued(stack: ExitStack) -> None:
    caller = Caller(stack)
    sock = caller.connect()
    caller.join()
    sock.sendall(frame(sock, {"unread": "x" * 1000}))  # a socket closed with unread bytes would take back what it sent
    for number in range(100):
        caller.leader.line.send({"n": number, "text": "x" * 100_000})
    closing = stack.enter_context(ThreadPoolExecutor(1)).submit(caller.leader.line.close)
    with sock.makefile("rb") as stream:
        for number in range(100):
            assert json.loads(read_body(sock, stream))["n"] == number
        assert read_body(sock, stream) == b"" and stream.read() == b""
    closing.result(SECONDS)
    caller.leader.line.close()
    caller.leader.line.send({"n": "too late"})
    assert not any(thread.name == "stepwell-line" for thread in threading.enumerate())


def test_close_stays_until_the_bytes_are_with_the_peer(stack: ExitStack) -> None:
    """They are in our kernel's hands, and a message that meets a closed socket would make it drop them."""
    caller = Caller(stack)
    sock = caller.connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.join()
    caller.leader.line.send({"text": "x" * 200_000})
    closing = stack.enter_context(ThreadPoolExecutor(1)).submit(caller.leader.line.close)
    with pytest.raises(TimeoutError):
        closing.result(0.3)
    sock.sendall(frame(sock, {"n": "meanwhile"}))
    with sock.makefile("rb") as stream:
        assert json.loads(read_body(sock, stream)) == {"text": "x" * 200_000}
        assert read_body(sock, stream) == b"" and stream.read() == b""
    closing.result(SECONDS)


def test_close_does_not_wait_for_ever_for_one_that_does_not_read(stack: ExitStack) -> None:
    caller = Caller(stack)
    caller.connect()
    caller.join()
    caller.leader.line.send({"text": "x" * (30 << 20)})
    began = time.monotonic()
    caller.leader.line.close()
    assert 1.0 < time.monotonic() - began < 4.0


def test_close_in_a_callback(stack: ExitStack) -> None:
    circle = Circle(2)
    leader = End(circle, 0)
    other: Line = Line(circle.rank(1), KEY, lambda rank, message: other.close(), lambda rank: None)
    stack.callback(leader.line.close)
    stack.callback(other.close)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda line: line.open(SECONDS), [leader.line, other]))
    thread = other._thread
    assert thread is not None
    leader.line.send({})
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_no_descriptor_is_left(stack: ExitStack) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for end in open_all(stack, 3):
        end.line.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_never_calls_is_named(stack: ExitStack) -> None:
    caller = Caller(stack, seconds=0.3)
    with pytest.raises(GroupError, match="rank 1 could not connect to rank 0"):
        caller.join()


def test_a_forked_child_leaves_the_line_alone(stack: ExitStack) -> None:
    leader, other = open_all(stack, 2)
    fds = [wire.socket.fileno() for end in (leader, other) for wire in end.line._hub.wires.values()]
    pid = os.fork()
    if pid == 0:
        try:
            open_fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
            leader.line.send({"n": "from the child"})
            leader.line.close()
            other.line.close()
            os._exit(len(open_fds))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    leader.line.send({"n": 1})
    other.line.send({"n": 2})
    other.until(lambda: other.heard == [(0, {"n": 1})])
    leader.until(lambda: leader.heard == [(1, {"n": 2})])
    assert leader.lost == other.lost == []
