"""Somebody between two nodes who can read and change every packet: what he can change, and what is noticed.

Nothing here is encrypted, so he reads everything; that is what `Node(tls=)` is for.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stepwell.errors import PeerError
from stepwell.ranks.line.line_meeting import LineAddress
from stepwell.ranks.wire.seal import digest_of
from tests.levels.peer_node import SECONDS, Node, is_hung_up, read, until
from tests.ranks.groups.ends import Caller, dial, frame

Twist = Callable[[bytes], bytes]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return Node(stack, tmp_path / "cache", answer=lambda question, fields: {"go": "left"})


class Between:
    """Passes on what both ends say, changed by `twist`; `say` puts in something of his own."""

    def __init__(self, stack: ExitStack, target: tuple[str, int], twist: Twist) -> None:
        self._target, self._twist = target, twist
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.server: socket.socket | None = None
        self._stop, self._wake = socket.socketpair()
        thread = threading.Thread(target=self._run)
        thread.start()
        stack.callback(self._wake.close)
        stack.callback(thread.join, SECONDS)
        stack.callback(self._wake.send, b"x")

    def _run(self) -> None:
        pairs: dict[socket.socket, socket.socket] = {}
        while True:
            ready, _, _ = select.select([self._listener, self._stop, *pairs], [], [], SECONDS)
            if not ready or self._stop in ready:
                break
            for sock in ready:
                if sock is self._listener:
                    near = sock.accept()[0]
                    self.server = socket.create_connection(self._target)
                    pairs |= {near: self.server, self.server: near}
                elif sock in pairs:
                    data = sock.recv(1 << 20)
                    if not data:
                        other = pairs.pop(sock)
                        pairs.pop(other, None)
                        sock.close()
                        other.close()
                        continue
                    pairs[sock].sendall(self._twist(data))
        for sock in (*pairs, self._stop):
            sock.close()

    def say(self, data: bytes) -> None:
        """To the server, as if it came from the caller."""
        assert self.server is not None
        self.server.sendall(data)


def right(data: bytes) -> bytes:
    return data.replace(b"left", b"lift")


def ask(node: Node, stack: ExitStack, twist: Twist) -> object:
    return node.peer(address=Between(stack, node.server.address, twist).address).ask("where")["go"]


def test_an_answer_that_is_changed_is_refused(node: Node, stack: ExitStack) -> None:
    assert ask(node, stack, lambda data: data) == "left"
    with pytest.raises(PeerError, match="changed on their way"):
        ask(node, stack, right)


def test_control_without_the_tag_it_is_believed(node: Node, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.wire.seal.is_tag", lambda given, expected: True)
    assert ask(node, stack, right) == "lift"


def test_a_question_that_is_changed_is_refused(node: Node, stack: ExitStack) -> None:
    with pytest.raises(PeerError):
        ask(node, stack, lambda data: data.replace(b"where", b"whose"))
    node.check_refused({"frame": 1})


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.file.notes", "rank-00000.0.file"])
def test_documents_and_files_of_the_user_are_refused_if_they_were_changed(
    node: Node, stack: ExitStack, name: str
) -> None:
    node.put(name, b"go left")
    with pytest.raises(PeerError, match="changed on their way"):
        read(node.peer(address=Between(stack, node.server.address, right).address), name, 0, 7)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "parity-00000.bin"])
def test_shards_and_parity_have_a_tag_where_the_reader_asks_for_it(node: Node, stack: ExitStack, name: str) -> None:
    """Without it they can be changed: their checksums find accidents (SECURITY.md). SCR's readers always ask."""
    node.put(name, b"go left")
    between = Between(stack, node.server.address, right)
    assert read(node.peer(address=between.address), name, 0, 7) == b"go lift"
    with pytest.raises(PeerError, match="changed on their way"):
        read(node.peer(address=between.address, is_sealed=True), name, 0, 7)


def test_who_relayed_the_greeting_cannot_ask_for_anything(node: Node, stack: ExitStack) -> None:
    between = Between(stack, node.server.address, lambda data: data)
    node.peer(address=between.address).ask("where")
    request = b'{"op":"ask","question":"where","fields":{}}'
    between.say(len(request).to_bytes(4, "little") + request + digest_of(request))
    until(lambda: node.server.refused == {"frame": 1})


def test_a_request_that_was_overheard_is_worth_nothing_a_second_time(node: Node, stack: ExitStack) -> None:
    heard: list[bytes] = []

    def listen(data: bytes) -> bytes:
        heard.append(data)
        return data

    between = Between(stack, node.server.address, listen)
    node.peer(address=between.address).ask("where")
    between.say(next(data for data in heard if b'"op"' in data))
    until(lambda: node.server.refused == {"frame": 1})


def test_a_message_of_the_line_that_is_changed_loses_the_rank(stack: ExitStack) -> None:
    caller = Caller(stack)
    between = Between(stack, (caller.place.addresses[0], caller.place.port), right)
    place = LineAddress(["127.0.0.1"], between.address[1], caller.place.start)
    sock = stack.enter_context(dial(place, 1))
    caller.join()
    sock.sendall(frame(sock, {"go": "on"}))
    caller.leader.until(lambda: caller.leader.heard == [(1, {"go": "on"})])
    sock.sendall(frame(sock, {"go": "left"}))
    caller.leader.until(lambda: caller.leader.lost == [1])
    assert caller.leader.heard == [(1, {"go": "on"})] and is_hung_up(sock)


def test_a_greeting_of_another_start_is_refused(stack: ExitStack) -> None:
    """A rank that a start before this one left behind has the secret, and calls where rank 0 listens by chance."""
    caller = Caller(stack)
    old = LineAddress(caller.place.addresses, caller.place.port, "0" * 32)
    with pytest.raises(OSError, match="does not know the secret"):
        dial(old, 1, seconds=0.2)
    caller.connect()
    caller.join()
