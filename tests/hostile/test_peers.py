"""Who talks to a node's server and should not, or not like that: refused, counted, and the others are served."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import PeerError
from stepwell.levels.peers.fetch import Peer
from stepwell.levels.peers.peer_frames import MAX_RANGE_BYTES, terms_of
from stepwell.levels.peers.server import MAX_CONNECTIONS, MAX_GUESTS
from stepwell.ranks.wire.greeting import CALLER, NONCE_BYTES, PROOF_BYTES, REFUSED, SERVER
from stepwell.ranks.wire.secret import draw_secret
from tests.levels.peer_node import (
    CHECKPOINT,
    RUN,
    SECONDS,
    Node,
    exactly,
    is_hung_up,
    read,
    receive_frame,
    send_frame,
    until,
)

NONCE = b"n" * NONCE_BYTES
CROWD = 1000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """After every test an honest node is served, and no thread is left."""
    with ExitStack() as stack:
        node = Node(stack, tmp_path / "cache")
        node.put("file", bytes(range(256)) * 4)
        (tmp_path / "secret").write_bytes(b"not for peers")
        yield node
        node.check_alive()
        stack.pop_all().close()
        assert threading.active_count() == node.threads


# Who does not know the secret


def claim(node: Node, secret: str, run: str = RUN, who: bytes = CALLER) -> tuple[socket.socket, bytes]:
    """Try to get in, and what the server says to it."""
    sock = node.call()
    challenge = exactly(sock, NONCE_BYTES)
    sock.sendall(NONCE + terms_of(secret, run).prove(who, challenge, NONCE))
    return sock, exactly(sock, PROOF_BYTES)


def test_a_wrong_secret(node: Node) -> None:
    sock, said = claim(node, draw_secret())
    assert said == REFUSED and is_hung_up(sock)
    with pytest.raises(PeerError, match="another run"):
        node.peer(secret=draw_secret()).ask("hello")
    node.check_refused({"proof": 2})


def test_control_without_the_check_a_wrong_secret_gets_in(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.wire.greeting.is_proof", lambda given, expected: True)
    monkeypatch.setattr("stepwell.ranks.wire.seal.is_tag", lambda given, expected: True)
    sock, said = claim(node, draw_secret())
    assert said != REFUSED
    send_frame(sock, {"op": "read", "directory": CHECKPOINT, "name": "file", "start": 0, "nbytes": 4})
    sock.sendall(bytes(32))
    assert receive_frame(sock) == {"nbytes": 4} and exactly(sock, 36)[32:] == b"\0\1\2\3"


def test_another_run_with_the_same_secret(node: Node) -> None:
    sock, said = claim(node, node.secret, run="f" * 16)
    assert said == REFUSED and is_hung_up(sock)


def test_the_servers_own_proof_is_not_a_callers(node: Node) -> None:
    sock, said = claim(node, node.secret, who=SERVER)
    assert said == REFUSED and is_hung_up(sock)


def overhear(node: Node) -> bytes:
    """What an honest node sent."""
    with node.call() as sock:
        challenge = exactly(sock, NONCE_BYTES)
        said = NONCE + terms_of(node.secret, RUN).prove(CALLER, challenge, NONCE)
        sock.sendall(said)
        assert exactly(sock, PROOF_BYTES) != REFUSED
        return said


def replay(node: Node, overheard: bytes) -> bytes:
    sock = node.call()
    exactly(sock, NONCE_BYTES)
    sock.sendall(overheard)
    return exactly(sock, PROOF_BYTES)


def test_a_replayed_greeting(node: Node) -> None:
    assert replay(node, overhear(node)) == REFUSED
    node.check_refused({"proof": 1})


def test_control_with_the_same_challenge_again_it_gets_in(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.wire.greeting.draw_nonce", lambda: b"c" * NONCE_BYTES)
    assert replay(node, overhear(node)) != REFUSED


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" + b"x" * 100, bytes(64), b"\xff" * 100_000])
def test_garbage(node: Node, garbage: bytes) -> None:
    sock = node.call()
    sock.sendall(garbage)
    assert is_hung_up(sock)
    node.check_refused({"proof": 1})


@pytest.mark.parametrize("said", [b"", b"x", NONCE, NONCE + b"x" * (PROOF_BYTES - 1)])
def test_half_a_greeting(node: Node, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.GREETING_SECONDS", 0.1)
    silent, gone = node.call(), node.call()
    silent.sendall(said)
    gone.sendall(said)
    gone.close()
    assert is_hung_up(silent)
    monkeypatch.undo()  # for who is asked at the end
    until(lambda: sum(node.server.refused.values()) == 2)
    assert node.server.refused.keys() <= {"late", "hung up"}


def test_who_hammers_with_wrong_secrets_keeps_nobody_out(node: Node) -> None:
    is_over = threading.Event()

    def hammer() -> int:
        count = 0
        while not is_over.is_set():
            with pytest.raises(PeerError):
                Peer(node.server.address, draw_secret(), RUN, SECONDS).ask("let me in")
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        hammering = [pool.submit(hammer) for _ in range(4)]
        until(lambda: node.server.refused.get("proof", 0) > 50)
        for _ in range(20):
            node.check_alive()
            until(lambda: threading.active_count() <= node.threads + 1 + 4)  # the door, this pool
        is_over.set()
        tried = sum(each.result() for each in hammering)
    node.check_refused({"proof": tried})


def crowd(node: Node, stack: ExitStack) -> list[socket.socket]:
    """A thousand connections that say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * CROWD + 500:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CROWD + 500, hard))
        except ValueError:
            pytest.skip(f"only {hard} open files are allowed here")
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    socks = []
    for _ in range(CROWD):
        socks.append(stack.enter_context(socket.create_connection(node.server.address)))
    return socks


def count_open(socks: list[socket.socket]) -> int:
    count = 0
    for sock in socks:
        sock.setblocking(False)
        try:
            while sock.recv(100):
                pass
        except BlockingIOError:
            count += 1
        except ConnectionError:
            pass
    return count


def test_a_thousand_at_once_keep_nobody_out(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.GREETING_SECONDS", 600.0)  # it is not their time that saves us
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(crowd, node, stack)
        while not gathering.done():
            node.check_alive()
            until(lambda: threading.active_count() <= node.threads + 2)  # the door, this pool; none for the crowd
        socks = gathering.result()
        until(lambda: count_open(socks) <= MAX_GUESTS)
        node.check_alive()
        assert len(node.server._guests) <= MAX_GUESTS
        assert node.server.refused.keys() == {"pushed out"}
        assert node.server.refused["pushed out"] >= CROWD - MAX_GUESTS


def test_control_without_the_limit_a_thousand_stay(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.MAX_GUESTS", 10 * CROWD)
    monkeypatch.setattr("stepwell.levels.peers.server.MAX_CONNECTIONS", 10 * CROWD)
    with ExitStack() as stack:
        socks = crowd(node, stack)
        until(lambda: len(node.server._guests) == CROWD)
        assert count_open(socks) == CROWD


def test_members_are_not_pushed_out_by_a_crowd(node: Node) -> None:
    with ExitStack() as stack:
        member = node.member()
        crowd(node, stack)
        send_frame(member, {"op": "ask", "question": "x", "fields": {}})
        assert receive_frame(member) == {"nbytes": 16}
        assert len(node.server._members) + len(node.server._guests) <= MAX_CONNECTIONS


# Who knows the secret and asks for what it should not have


def ask(node: Node, request: Any) -> Any:
    with node.member() as sock:
        send_frame(sock, request)
        return receive_frame(sock)


def wanted(**changes: Any) -> dict[str, Any]:
    return {"op": "read", "directory": CHECKPOINT, "name": "file", "start": 0, "nbytes": 4, **changes}


NAMES: list[tuple[Any, Any]] = [
    ("..", "secret"),
    (".", "file"),
    ("", "file"),
    ("/", "etc"),
    ("/etc", "passwd"),
    (f"{CHECKPOINT}/..", "secret"),
    (f"../cache/{CHECKPOINT}", "file"),
    (f"{CHECKPOINT}/", "file"),
    (f"{CHECKPOINT}\n", "file"),
    (f"{CHECKPOINT}\0", "file"),
    ("step-1.l1", "file"),
    ("step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661\u0662.l0001", "file"),
    ("run.json", "file"),
    (CHECKPOINT, ".."),
    (CHECKPOINT, "."),
    (CHECKPOINT, ""),
    (CHECKPOINT, "../../secret"),
    (CHECKPOINT, "../file"),
    (CHECKPOINT, "/etc/passwd"),
    (CHECKPOINT, "a/b"),
    (CHECKPOINT, "file\0"),
    (CHECKPOINT, "file\n"),
    (CHECKPOINT, ".hidden"),
    (CHECKPOINT, "x" * 300),
    (CHECKPOINT, "\ud800"),
    (CHECKPOINT, None),
    (CHECKPOINT, 7),
    (None, "file"),
    ([CHECKPOINT], "file"),
]


def test_names_that_lead_elsewhere(node: Node) -> None:
    for directory, name in NAMES:
        answer = ask(node, wanted(directory=directory, name=name))
        assert answer["kind"] == "name", (directory, name, answer)
    node.check_refused({"name": len(NAMES)})


def plant(node: Node) -> dict[str, tuple[str, str]]:
    """Things in the cache that are no files of it."""
    outside = node.root.parent
    (node.place / "link").symlink_to(outside / "secret")
    (node.place / "inner-link").symlink_to("file")
    (node.place / "directory").mkdir()
    os.mkfifo(node.place / "pipe")
    listening = node.stack.enter_context(socket.socket(socket.AF_UNIX))
    here = os.open(node.place, os.O_PATH)
    try:
        listening.bind(f"/proc/self/fd/{here}/socket")
    finally:
        os.close(here)
    elsewhere = "step-000000000099.l0001"
    (outside / "away").mkdir()
    (outside / "away" / "secret").write_bytes(b"not for peers")
    (node.root / elsewhere).symlink_to(outside / "away", target_is_directory=True)
    found = {kind: (CHECKPOINT, kind) for kind in ("link", "inner-link", "directory", "pipe", "socket")}
    found["link to a directory"] = (elsewhere, "secret")
    found["nothing"] = ("step-000000000098.l0001", "file")
    try:
        os.mknod(node.place / "device", 0o600 | 0o020000, os.makedev(1, 5))
        found["device"] = (CHECKPOINT, "device")
    except PermissionError:
        pass  # only root can
    return found


def test_what_is_no_file_of_the_cache(node: Node) -> None:
    planted = plant(node)
    for kind, (directory, name) in planted.items():
        answer = ask(node, wanted(directory=directory, name=name, nbytes=0))
        assert answer["kind"] == "missing", (kind, answer)
    node.check_refused({"missing": len(planted)})


@pytest.mark.parametrize("kind", ["link", "link to a directory"])
def test_control_with_links_followed_they_lead_out(node: Node, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, name = plant(node)[kind]
    peer = node.peer()
    with pytest.raises(PeerError):
        read(peer, name, 0, 13, directory)
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)
    assert read(peer, name, 0, 13, directory) == b"not for peers"


NUMBERS: list[dict[str, Any]] = [
    {"start": -1},
    {"nbytes": -1},
    {"start": 0.0},
    {"nbytes": 4.0},
    {"start": False},
    {"nbytes": True},
    {"start": "0"},
    {"start": None},
    {"nbytes": [4]},
    {"start": 1 << 70},
    {"start": (1 << 63) - 1},
    {"start": 1021},
    {"start": 1025, "nbytes": 0},
    {"nbytes": 1025},
    {"nbytes": MAX_RANGE_BYTES + 1},
    {"nbytes": 1 << 62},
    {"start": (1 << 64) - 2, "nbytes": 4},
]


def test_numbers(node: Node) -> None:
    with node.member() as sock:  # each is answered, and the connection goes on
        for changes in NUMBERS:
            send_frame(sock, wanted(**changes))
            answer = receive_frame(sock)
            assert answer["kind"] == "range", (changes, answer)
        send_frame(sock, wanted(start=1020))
        assert receive_frame(sock) == {"nbytes": 4} and exactly(sock, 4) == b"\xfc\xfd\xfe\xff"
    node.check_refused({"range": len(NUMBERS)})


def test_a_huge_range_is_refused_before_the_file_is_looked_at(node: Node) -> None:
    with open(node.place / "huge", "wb") as file:
        file.truncate(1 << 40)
    assert "more than" in ask(node, wanted(name="huge", nbytes=MAX_RANGE_BYTES + 1))["error"]


@pytest.mark.parametrize(
    "request_", [{}, {"op": "write"}, {"op": 1}, {"op": ["read"]}, {"op": "ask"}, {"op": "ask", "question": "x"}]
)
def test_no_such_request(node: Node, request_: dict[str, Any]) -> None:
    assert ask(node, request_)["kind"] == "frame"


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[]", b"null", b"\xff\xfe", b'{"op":1,"op":2}', b"[" * 60_000, b'{"start":' + b"9" * 60_000 + b"}"],
    ids=["empty", "no json", "list", "null", "no utf-8", "twice", "deep", "long number"],
)
def test_frames_that_are_no_request(node: Node, body: bytes) -> None:
    sock = node.member()
    send_frame(sock, body)
    assert is_hung_up(sock)
    node.check_refused({"frame": 1})


@pytest.mark.parametrize("length", [(64 << 10) + 1, 1 << 31, (1 << 32) - 1])
def test_a_huge_length_takes_no_memory(node: Node, length: int) -> None:
    sock = node.member()
    tracemalloc.start()
    try:
        sock.sendall(struct.pack("<I", length) + b"x" * 1000)
        assert is_hung_up(sock)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    node.check_refused({"frame": 1})


# Who does not read what it asked for


def start_reading(node: Node) -> socket.socket:
    with open(node.place / "long", "ab") as file:
        file.truncate(MAX_RANGE_BYTES)
    sock = node.member()
    send_frame(sock, wanted(name="long", nbytes=MAX_RANGE_BYTES))
    assert receive_frame(sock) == {"nbytes": MAX_RANGE_BYTES}
    return sock


def test_a_reader_that_stops_is_dropped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.GRACE_SECONDS", 0.2)
    monkeypatch.setattr("stepwell.levels.peers.peer_frames.LEAST_BYTES_PER_SECOND", 1 << 30)
    readers = [start_reading(node) for _ in range(4)]
    node.check_alive()
    node.check_refused({"slow": 4})
    assert all(is_hung_up(sock) for sock in readers)


def test_a_slow_reader_is_dropped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.GRACE_SECONDS", 0.05)
    monkeypatch.setattr("stepwell.levels.peers.peer_frames.LEAST_BYTES_PER_SECOND", 1 << 40)
    sock = start_reading(node)
    while not node.server.refused:
        assert sock.recv(50)  # it goes on reading, but not fast
    node.check_refused({"slow": 1})
    assert is_hung_up(sock)


def test_control_a_reader_that_is_given_time_gets_everything(node: Node) -> None:
    sock = start_reading(node)
    node.check_alive()
    left = MAX_RANGE_BYTES
    while left:
        left -= len(sock.recv(min(left, 1 << 20)))
    send_frame(sock, wanted())
    assert receive_frame(sock) == {"nbytes": 4}
    node.check_refused({})


def test_a_file_that_is_cut_off_while_it_is_sent(node: Node) -> None:
    sock = start_reading(node)
    os.truncate(node.place / "long", 0)
    assert is_hung_up(sock)
    node.check_refused({"failed": 1})


def test_a_reader_that_hangs_up_in_the_middle(node: Node) -> None:
    start_reading(node).close()
    until(lambda: not node.server._members)
    node.check_refused({})


def test_a_request_that_never_ends_is_dropped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.IDLE_SECONDS", 0.2)
    sock = node.member()
    sock.sendall(struct.pack("<I", 1000) + b"{")
    assert is_hung_up(sock)
