"""The line on several nodes: what goes by way of each node's first rank, and who is lost with whom."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from stepwell.errors import GroupError
from stepwell.ranks.line import line as line_module
from stepwell.ranks.line.line_frame import MAX_BYTES
from stepwell.ranks.line.line_meeting import LineAddress
from tests.ranks.groups.circle import Circle
from tests.ranks.groups.ends import (
    CONNECTED,
    LISTENS,
    SECONDS,
    End,
    dial,
    frame,
    frame_of,
    is_hung_up,
    open_all,
    read_body,
)

NODES = [0, 0, 1, 1, 1, 2, 2]
"""Ranks 2 and 5 are the first of nodes 1 and 2."""


def die(end: End) -> None:
    """As its process would: all of its connections end at once, without a word."""
    thread, hub = end.line._thread, end.line._hub

    def fall() -> None:
        hub.let_go()
        hub.close()

    end.line._order(fall)
    assert thread is not None
    thread.join(SECONDS)


def said(end: End, rank: int) -> list[Any]:
    return [message["n"] for sender, message in end.heard if sender == rank]


# What arrives


def test_both_directions_in_order(stack: ExitStack) -> None:
    top, *others = ends = open_all(stack, len(NODES), NODES)
    for number in range(300):
        for end in ends:
            end.line.send({"n": number})
        top.line.send({"n": f"only {number}"}, to=1 + number % len(others))
    for rank, other in enumerate(others, 1):
        expected = [
            n for number in range(300) for n in (number, f"only {number}") if n == number or 1 + number % 6 == rank
        ]
        other.until(lambda other=other, expected=expected: len(other.heard) == len(expected))  # type: ignore[misc]
        assert said(other, 0) == expected
        top.until(lambda rank=rank: len(said(top, rank)) == 300)  # type: ignore[misc]
        assert said(top, rank) == list(range(300))
    assert all(end.lost == [] for end in ends)


@pytest.mark.parametrize("node_of", [[0] * 5, [0, 1, 2, 3, 4], [0, 1, 0, 1, 0]], ids=["one node", "one each", "dealt"])
def test_other_shapes(stack: ExitStack, node_of: list[int]) -> None:
    top, *others = ends = open_all(stack, 5, node_of)
    for end in ends:
        end.line.send({"n": "hello"})
    top.until(lambda: len(top.heard) == 4)
    assert sorted(top.heard, key=lambda item: item[0]) == [(rank, {"n": "hello"}) for rank in range(1, 5)]
    for other in others:
        other.until(lambda other=other: said(other, 0) == ["hello"])  # type: ignore[misc]


def test_large_and_small_stay_in_order_and_are_encoded_on_the_line_s_thread(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, threads = line_module.encode, []

    def encode(message: Any, rank: int) -> Any:
        threads.append((threading.current_thread().name, "text" in message))
        return honest(message, rank)

    monkeypatch.setattr(line_module, "encode", encode)
    top, *others = open_all(stack, len(NODES), NODES)
    for number in range(0, 40, 2):
        others[-1].line.send_large({"n": number, "text": "x" * 100_000}, lambda error: None)
        others[-1].line.send({"n": number + 1})
    top.until(lambda: len(top.heard) == 40)
    assert said(top, 6) == list(range(40))
    assert {name for name, is_large in threads if is_large} == {"stepwell-line"}
    assert {name for name, is_large in threads if not is_large} == {"MainThread"}


def test_a_large_message_that_is_too_long_is_told_and_the_line_goes_on(stack: ExitStack) -> None:
    top, other = open_all(stack, 2)
    refused: list[GroupError] = []
    other.line.send_large({"text": "x" * MAX_BYTES}, refused.append)
    other.line.send({"n": 1})
    top.until(lambda: said(top, 1) == [1])
    assert [str(error)[:12] for error in refused] == ["a message of"]


def test_what_waits_for_a_rank_0_that_does_not_read_is_bounded(stack: ExitStack) -> None:
    """Its callback takes long; meanwhile the ranks of a node send more than their first rank may keep."""
    goes_on = threading.Event()
    stack.callback(goes_on.set)
    top, *others = open_all(stack, len(NODES), NODES)
    honest = top.line._hub._on_message

    def slow(rank: int, message: dict[str, Any]) -> None:
        goes_on.wait(SECONDS)
        honest(rank, {"n": message["n"]})

    top.line._hub._on_message = slow
    text, count = "x" * (4 << 20), 12
    for number in range(count):
        for rank in (3, 4):
            others[rank - 1].line.send({"n": number, "text": text})
    above = others[1].line._hub.wires[0]
    deadline = time.monotonic() + SECONDS
    while not others[1].line._hub._is_muted and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # what does not happen cannot be waited for
    assert (16 << 20) < above._waiting_bytes < (16 << 20) + 2 * (4 << 20) + (2 << 20)
    goes_on.set()
    top.until(lambda: len(top.heard) == 2 * count)
    assert said(top, 3) == said(top, 4) == list(range(count))
    assert all(end.lost == [] for end in (top, *others))


# Who is lost


def test_a_rank_is_lost_after_its_last_message(stack: ExitStack) -> None:
    ends = open_all(stack, len(NODES), NODES)
    for number in range(100):
        ends[4].line.send({"n": number})
    ends[0].until(lambda: len(said(ends[0], 4)) == 100)
    die(ends[4])
    ends[0].until(lambda: ends[0].lost == [4])
    ends[3].line.send({"n": "still here"})
    ends[0].until(lambda: said(ends[0], 3) == ["still here"])
    assert ends[0].lost == [4] and all(end.lost == [] for end in ends[1:4] + ends[5:])


def test_the_ranks_of_a_node_are_lost_with_its_first_one(stack: ExitStack) -> None:
    ends = open_all(stack, len(NODES), NODES)
    ends[3].line.close()
    wait_until(lambda: 3 in ends[0].line._hub._gone)
    die(ends[2])
    ends[0].until(lambda: ends[0].lost == [2, 4])  # 3 had closed
    ends[4].until(lambda: ends[4].lost == [2])
    ends[0].line.send({"n": 1})
    for rank in (1, 5, 6):
        ends[rank].until(lambda rank=rank: said(ends[rank], 0) == [1])  # type: ignore[misc]
        assert ends[rank].lost == []
    for end in ends:
        end.line.close()
    assert ends[0].lost == [2, 4]


def test_all_hear_of_the_loss_of_rank_0(stack: ExitStack) -> None:
    top, *others = open_all(stack, len(NODES), NODES)
    die(top)
    for other in others:
        other.until(lambda other=other: other.lost == [0])  # type: ignore[misc]
        other.line.close()
        assert other.lost == [0]


# Who speaks for whom


class ByHand:
    """Ranks 0 and 1 on one node are lines; 2 and 3, on another, are played by hand, or 3 alone."""

    def __init__(self, stack: ExitStack, *, plays_first: bool) -> None:
        circle, node_of = Circle(4), [0, 0, 1, 1]
        self.ends = [End(circle, rank, node_of) for rank in range(2 if plays_first else 3)]
        self.groups = [circle.rank(rank) for rank in range(len(self.ends), 4)]
        self.stack, self.pool = stack, stack.enter_context(ThreadPoolExecutor(8))
        self.opening = [self.pool.submit(end.line.open, SECONDS) for end in self.ends]
        for end in self.ends:
            stack.callback(end.line.close)
        told = self.all_say(LISTENS, 1)
        self.top = LineAddress.from_plain(told[0])
        self.above = self.top if plays_first else self.top.beside(told[2])
        self.sock = dial(self.above, 2 if plays_first else 3)
        stack.callback(self.sock.close)
        self.all_say(CONNECTED, {})
        for opening in self.opening:
            opening.result(SECONDS)

    def all_say(self, what: str, value: object) -> list[Any]:
        return next(iter(list(self.pool.map(lambda group: group.all_gather(value, what, SECONDS), self.groups))))


def test_a_first_rank_speaks_for_its_node_and_for_no_other(stack: ExitStack) -> None:
    hand = ByHand(stack, plays_first=True)
    top = hand.ends[0]
    hand.sock.sendall(frame(hand.sock, {"n": 2}, 2) + frame(hand.sock, {"n": 3}, 3))
    top.until(lambda: len(top.heard) == 2)
    assert top.heard == [(2, {"n": 2}), (3, {"n": 3})]
    hand.sock.sendall(frame(hand.sock, {"n": "not mine"}, 1))
    top.until(lambda: top.lost == [2, 3])
    assert len(top.heard) == 2 and is_hung_up(hand.sock)


@pytest.mark.parametrize("rank", [0, 1, 2, 4, 1 << 31])
def test_the_other_ranks_speak_only_for_themselves(stack: ExitStack, rank: int) -> None:
    hand = ByHand(stack, plays_first=False)
    top = hand.ends[0]
    hand.sock.sendall(frame(hand.sock, {"n": 3}, 3) + frame(hand.sock, {"n": "not mine"}, rank))
    top.until(lambda: top.lost == [3])
    assert top.heard == [(3, {"n": 3})] and is_hung_up(hand.sock)


@pytest.mark.parametrize("kind", [1, 2])
def test_only_first_ranks_say_who_is_gone(stack: ExitStack, kind: int) -> None:
    hand = ByHand(stack, plays_first=False)
    hand.sock.sendall(frame_of(hand.sock, b"", 3, kind))
    hand.ends[0].until(lambda: hand.ends[0].lost == [3])


@pytest.mark.parametrize("text", [b"\xff\xff", b"[1]", b"[" * 400_000])
def test_nonsense_loses_who_says_it_and_not_who_passes_it_on(stack: ExitStack, text: bytes) -> None:
    hand = ByHand(stack, plays_first=False)
    top = hand.ends[0]
    hand.sock.sendall(frame_of(hand.sock, text, 3) + frame(hand.sock, {"n": "not heard any more"}, 3))
    hand.ends[2].line.send({"n": 2})
    top.until(lambda: top.lost == [3] and said(top, 2) == [2])
    assert said(top, 3) == []


# The end


@pytest.mark.parametrize("order", [1, -1])
def test_all_close_and_nobody_is_lost(stack: ExitStack, order: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ends = open_all(stack, len(NODES), NODES)
    for end in ends[::order]:
        end.line.close()
    assert [end.lost for end in ends] == [[]] * len(ends)
    assert not any(thread.name == "stepwell-line" for thread in threading.enumerate())
    assert len(os.listdir("/proc/self/fd")) == before


def close_the_first_while_much_is_queued(ends: list[End]) -> None:
    """Rank 2 has read nothing of it yet when it begins to close."""
    goes_on = threading.Event()
    ends[2].line._order(lambda: goes_on.wait(SECONDS) and None)
    for number in range(200):
        for rank in (3, 4):
            ends[rank].line.send({"n": number, "text": "x" * 50_000})
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(ends[2].line.close)
        wait_until(lambda: ends[2].line._is_closing)
        began = time.monotonic()
        goes_on.set()
        closing.result(SECONDS)
    assert time.monotonic() - began < 3.5


def test_a_first_rank_that_closes_passes_on_what_its_node_has_queued(stack: ExitStack) -> None:
    ends = open_all(stack, len(NODES), NODES)
    close_the_first_while_much_is_queued(ends)
    for rank in (3, 4):
        ends[0].until(lambda rank=rank: said(ends[0], rank) == list(range(200)))  # type: ignore[misc]
    ends[3].line.send({"n": "nobody passes it on"})
    ends[3].line.close()
    ends[0].line.send({"n": 1})
    ends[5].until(lambda: said(ends[5], 0) == [1])
    assert [end.lost for end in ends] == [[]] * len(ends)


def test_control_without_waiting_for_the_node_it_is_cut_off(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.line.line_hub._FLUSH_SECONDS", -1.0)
    ends = open_all(stack, len(NODES), NODES)
    close_the_first_while_much_is_queued(ends)
    wait_until(lambda: 2 in ends[0].line._hub._gone)
    assert len(said(ends[0], 3)) < 200


def test_a_first_rank_that_closes_does_not_wait_for_ever_for_its_node(stack: ExitStack) -> None:
    hand = ByHand(stack, plays_first=False)  # rank 3 answers nothing
    hand.ends[2].line.send({"n": 2})
    began = time.monotonic()
    hand.ends[2].line.close()
    assert 0.5 < time.monotonic() - began < 3.5
    wait_until(lambda: hand.ends[0].line._hub._gone >= {2, 3})
    assert said(hand.ends[0], 2) == [2] and hand.ends[0].lost == []
    with hand.sock.makefile("rb") as stream:
        assert read_body(hand.sock, stream) == b"" and stream.read() == b""


def test_rank_0_closes_and_what_it_sent_arrives_everywhere(stack: ExitStack) -> None:
    top, *others = open_all(stack, len(NODES), NODES)
    for number in range(100):
        top.line.send({"n": number, "text": "x" * 20_000})
    top.line.close()
    for other in others:
        other.until(lambda other=other: said(other, 0) == list(range(100)))  # type: ignore[misc]
    for other in others:
        other.line.close()
    assert all(other.lost == [] for other in others)


# The beginning


def test_descriptors_are_those_of_a_node_and_one_for_each_node(stack: ExitStack) -> None:
    node_of = [rank // 4 for rank in range(32)]
    before = len(os.listdir("/proc/self/fd"))  # other tests of this process may have left some
    ends = open_all(stack, 32, node_of)
    counts = [len(end.line._hub.wires) for end in ends]
    assert counts[0] == 7 + 3
    assert set(counts[4::4]) == {4}
    assert {count for rank, count in enumerate(counts) if rank % 4} == {1}
    opened = len(os.listdir("/proc/self/fd")) - before
    assert opened <= sum(counts) + 2 * len(ends)  # nobody listens any more


@pytest.mark.parametrize(("rank", "above"), [(4, 2), (5, 0)])
def test_who_cannot_connect_to_whom_is_named_by_all(stack: ExitStack, rank: int, above: int) -> None:
    circle = Circle(len(NODES))
    ends = [End(circle, other, NODES) for other in range(len(NODES))]
    honest = ends[rank].group.all_gather

    def misled(value: Any, what: str, seconds: float | None = None) -> list[Any]:
        told = honest(value, what, seconds)
        if what == LISTENS:
            told = [{**told[0], "port": 1}, *(port and 1 for port in told[1:])]
        return told

    ends[rank].group.all_gather = misled  # type: ignore[method-assign]
    for end in ends:
        stack.callback(end.line.close)

    def open_one(end: End) -> str:
        with pytest.raises(GroupError) as raised:
            end.line.open(0.5)
        assert raised.value.fields["missing"] == [rank]
        return str(raised.value)

    with ThreadPoolExecutor(len(ends)) as pool:
        texts = set(pool.map(open_one, ends))
    (text,) = texts
    assert text.startswith(f"rank {rank} could not connect to rank {above} within 0.5 s (port 1: ")


def wait_until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.005)
