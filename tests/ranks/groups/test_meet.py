"""Who is let in to the line, and who is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from stepwell.ranks.line.line_meeting import LineAddress
from tests.crash.harness import wait_for
from tests.ranks.groups.circle import Circle
from tests.ranks.groups.ends import CONNECTED, LISTENS, SECONDS, Caller, End, dial, frame, is_hung_up


def test_who_does_not_know_the_key_is_refused(stack: ExitStack) -> None:
    caller = Caller(stack)
    with pytest.raises(OSError, match="does not know the secret"):
        caller.connect(key=bytes(32), seconds=0.2)
    check_that_rank_1_can_still_join(caller)


def test_control_without_the_proof_anybody_gets_in(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda given, expected: True)
    caller = Caller(stack)
    caller.connect(key=bytes(32))
    caller.join()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" + b"x" * 100, b"\0" * 68, b"\xff" * 5000])
def test_garbage_is_refused(stack: ExitStack, garbage: bytes) -> None:
    caller = Caller(stack)
    sock = caller.raw()
    sock.sendall(garbage)
    assert is_hung_up(sock)
    check_that_rank_1_can_still_join(caller)


def test_a_silent_connection_holds_nobody(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.line.line_meeting._TRY_SECONDS", 0.5)
    caller = Caller(stack)
    silent = caller.raw()
    assert is_hung_up(silent)
    also_silent = caller.raw()
    check_that_rank_1_can_still_join(caller)
    assert is_hung_up(also_silent)


@pytest.mark.parametrize("rank", [0, 2, 1 << 31])
def test_a_rank_that_does_not_exist_is_refused(stack: ExitStack, rank: int) -> None:
    caller = Caller(stack)
    assert is_hung_up(caller.connect(rank))
    check_that_rank_1_can_still_join(caller)


def test_a_second_connection_of_a_rank_replaces_nothing(stack: ExitStack) -> None:
    circle = Circle(3)
    leader = End(circle, 0)
    others = [circle.rank(1), circle.rank(2)]
    pool = stack.enter_context(ThreadPoolExecutor(3))
    opening = pool.submit(leader.line.open, SECONDS)
    stack.callback(leader.line.close)
    told = list(pool.map(lambda group: group.all_gather(None, LISTENS, 5), others))
    place = LineAddress.from_plain(told[0][0])
    first = stack.enter_context(dial(place, 1))
    wait_for(lambda: 1 in leader.line._hub.wires, "the first one is in")  # or the second one may be heard before it
    assert is_hung_up(stack.enter_context(dial(place, 1)))
    second = stack.enter_context(dial(place, 2))
    list(pool.map(lambda group: group.all_gather({}, CONNECTED, 5), others))
    opening.result(SECONDS)
    first.sendall(frame(first, {"n": 1}))
    second.sendall(frame(second, {"n": 2}, 2))
    leader.until(lambda: sorted(leader.heard, key=lambda item: item[0]) == [(1, {"n": 1}), (2, {"n": 2})])
    assert leader.lost == []


def test_nobody_is_let_in_later(stack: ExitStack) -> None:
    caller = Caller(stack)
    check_that_rank_1_can_still_join(caller)
    with pytest.raises(OSError):
        caller.raw()


def check_that_rank_1_can_still_join(caller: Caller) -> None:
    sock = caller.connect()
    caller.join()
    sock.sendall(frame(sock, {"n": 1}))
    caller.leader.until(lambda: caller.leader.heard == [(1, {"n": 1})])
    assert caller.leader.lost == []
