"""Nodes read each other's files, and are told what went wrong where they cannot."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from stepwell.errors import ConfigError, PeerError, StorageError
from stepwell.levels.peers.fetch import MAX_STREAMS, Peer, PeerSource
from stepwell.levels.peers.peer_frames import MAX_ANSWER_BYTES, MAX_RANGE_BYTES, Patience, Stream, terms_of
from stepwell.ranks.wire.greeting import CALLER, NONCE_BYTES, PROOF_BYTES, SERVER
from stepwell.ranks.wire.seal import TAG_BYTES
from stepwell.ranks.wire.secret import draw_secret
from stepwell.restore.byte_sources import BlockSource
from stepwell.restore.verified_read import read_file
from stepwell.storage.format.checksum import block_digest
from stepwell.storage.format.record import FileEntry
from tests.levels.peer_node import (
    CHECKPOINT,
    RUN,
    SECONDS,
    Node,
    exactly,
    impostor,
    is_hung_up,
    read,
    receive_frame,
    seal,
    send_frame,
    send_sealed,
    until,
)

MIB = 1 << 20


@pytest.fixture
def node(stack: ExitStack, tmp_path: Path) -> Node:
    return Node(stack, tmp_path / "cache")


# Bytes


def test_200_mb_by_four_threads(node: Node) -> None:
    data = node.put("big", os.urandom(200 * 10**6))
    copy, peer, piece = bytearray(len(data)), node.peer(), 3 * 10**6 + 1
    view = memoryview(copy)

    def fetch(start: int) -> None:
        nbytes = min(piece, len(data) - start)
        peer.read(CHECKPOINT, "big", start, nbytes, view[start : start + nbytes])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, range(0, len(data), piece)))
    assert copy == data
    node.check_refused({})


def test_restore_reads_a_peer_as_it_reads_a_file(node: Node) -> None:
    block = 64 << 10
    data = node.put("shard", os.urandom(5 * MIB + 123))
    digests = [block_digest(memoryview(data)[low : low + block]) for low in range(0, len(data), block)]
    entry = FileEntry("shard", "opaque", len(data), block, tuple(digests))
    source: BlockSource = PeerSource(node.peer(), CHECKPOINT, "shard", len(data))
    assert source.label.endswith(f"{CHECKPOINT}/shard")
    assert source.threads == MAX_STREAMS
    assert read_file(source, entry, [], lambda *_: None, check_all=True) == len(data)
    with pytest.raises(PeerError, match="ends at"):
        source.read(len(data), 1, memoryview(bytearray(1)))
    source.close()


def test_edges(node: Node) -> None:
    data = node.put("small", os.urandom(1000))
    node.put("empty", b"")
    peer = node.peer()
    for start, end in [(0, 1000), (0, 0), (0, 1), (999, 1000), (1000, 1000), (500, 501)]:
        assert read(peer, "small", start, end - start) == data[start:end]
    assert read(peer, "empty", 0, 0) == b""
    with pytest.raises(PeerError) as caught:
        read(peer, "empty", 0, 1)
    assert caught.value.fields == {"peer": peer.label, "path": f"{CHECKPOINT}/empty", "kind": "range"}
    with pytest.raises(PeerError) as caught:
        read(peer, "nobody", 0, 0)
    assert caught.value.fields["kind"] == "missing"
    with pytest.raises(ValueError, match="a buffer of 1 bytes for 2"):
        peer.read(CHECKPOINT, "small", 0, 2, memoryview(bytearray(1)))
    node.check_refused({"range": 1, "missing": 1})


def test_beyond_4_gib(node: Node) -> None:
    with open(node.place / "sparse", "wb") as file:
        file.seek((5 << 30) + 7)
        file.write(b"the end")
    assert read(node.peer(), "sparse", (5 << 30) + 5, 9) == b"\0\0the end"


def test_more_than_one_request_takes(node: Node) -> None:
    with open(node.place / "sparse", "wb") as file:
        file.truncate(MAX_RANGE_BYTES + 10)
        os.pwrite(file.fileno(), b"seam", MAX_RANGE_BYTES - 2)
    found = read(node.peer(), "sparse", 0, MAX_RANGE_BYTES + 10)
    assert found[-14:] == bytes(2) + b"seam" + bytes(8)


def test_a_file_that_ends_early_ends_the_connection(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    with (
        impostor(lambda sock: sock.recv(100)) as address,
        socket.create_connection(address) as sock,
        open(tmp_path / "file", "rb") as file,
        pytest.raises(OSError, match="ends at 10"),
    ):
        Stream(sock).send_range(file.fileno(), 0, 20, Patience(SECONDS), is_sealed=False)


# Questions


def test_questions(node: Node) -> None:
    peer = node.peer()
    assert peer.ask("which", steps=[1, 2], name="x") == {"question": "which", "steps": [1, 2], "name": "x"}
    with pytest.raises(ValueError, match="a frame of"):
        peer.ask("long", text="x" * (64 << 10))


def test_a_long_answer(stack: ExitStack, tmp_path: Path) -> None:
    node = Node(stack, tmp_path, answer=lambda question, fields: {"text": "x" * fields["count"]})
    peer = node.peer()
    assert peer.ask("", count=30 * MIB) == {"text": "x" * 30 * MIB}
    with pytest.raises(PeerError, match="more than"):
        peer.ask("", count=MAX_ANSWER_BYTES)
    peer.close()
    node.check_quiet()


@pytest.mark.parametrize("kind", ["raises", "no json", "nan", "exits"])
def test_a_callback_that_fails_gives_an_error(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    def answer(question: str, fields: dict[str, object]) -> dict[str, object]:
        if question == "raises":
            raise RuntimeError("no idea")
        if question == "exits":
            raise SystemExit
        return {"no json": {1, 2}, "nan": float("nan")} if question in ("no json", "nan") else {"question": question}

    node = Node(stack, tmp_path, answer=answer)
    with pytest.raises(PeerError) as caught:
        node.peer().ask(kind)
    assert caught.value.fields["kind"] == "question"
    node.check_refused({"question": 1})
    node.check_alive()


# Connections


def test_connections_are_kept_and_no_more_than_the_limit(node: Node) -> None:
    peer, data = node.peer(), node.put("file", os.urandom(MIB))
    with ThreadPoolExecutor(16) as pool:
        assert all(found == data for found in pool.map(lambda _: read(peer, "file", 0, MIB), range(100)))
    assert 1 <= len(node.server._members) <= MAX_STREAMS


def test_an_idle_connection_is_closed_and_opened_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.IDLE_SECONDS", 0.1)
    peer = node.peer()
    for _ in range(2):
        peer.ask("hello")
        until(lambda: not node.server._members)
    node.check_refused({})
    node.check_quiet()


def test_a_server_that_came_back(stack: ExitStack, tmp_path: Path) -> None:
    node = Node(stack, tmp_path)
    peer = node.peer()
    peer.ask("hello")
    node.server.close()
    with pytest.raises(PeerError, match="refused"):
        peer.ask("hello")
    again = Node(stack, tmp_path, bind=peer.address)
    with pytest.raises(PeerError, match="another run"):
        peer.ask("hello")
    again.check_alive()


def test_a_full_house_is_closed_at_once_and_a_place_that_is_free_again_is_taken(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.MAX_CONNECTIONS", 2)
    inside = [node.member(), node.member()]
    assert is_hung_up(node.call())
    node.check_refused({"full": 1})
    peer = node.peer()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.ask, "hello")
        until(lambda: node.server.refused["full"] > 2)
        inside[0].close()
        assert waiting.result(SECONDS) == {"question": "hello"}


def test_more_nodes_than_places_are_all_served(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a large job ask rank 0 again and again, and keep their connections."""
    monkeypatch.setattr("stepwell.levels.peers.server.MAX_CONNECTIONS", 8)
    peers = [node.peer() for _ in range(30)]
    for _ in range(3):
        for peer in peers:
            assert peer.ask("hello") == {"question": "hello"}
    with ThreadPoolExecutor(30) as pool:
        answers = [pool.submit(peer.ask, "hello") for peer in peers for _ in range(5)]
        assert all(answer.result(SECONDS) == {"question": "hello"} for answer in answers)
    until(lambda: len(node.server._members) <= 8)


def test_closing_ends_everything(stack: ExitStack, tmp_path: Path) -> None:
    node = Node(stack, tmp_path)
    socks = [node.member(), node.member(), node.call()]
    node.server.close()
    assert all(is_hung_up(sock) for sock in socks)
    assert threading.active_count() == node.threads
    node.server.close()
    with pytest.raises(PeerError):
        node.peer().ask("hello")


def test_closing_wakes_who_waits(stack: ExitStack, tmp_path: Path) -> None:
    is_asked, may_go = threading.Event(), threading.Event()

    def answer(question: str, fields: dict[str, object]) -> dict[str, object]:
        is_asked.set()
        may_go.wait(SECONDS)
        return {}

    peer = Node(stack, tmp_path, answer=answer).peer()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.ask, "hello")
        assert is_asked.wait(SECONDS)
        peer.close()
        with pytest.raises(PeerError):
            waiting.result(SECONDS)
        may_go.set()
    with pytest.raises(PeerError, match="closed"):
        peer.ask("hello")


@pytest.mark.parametrize("bind", [("::1", 0), ("", 0), ("localhost", 0)])
def test_other_addresses(stack: ExitStack, tmp_path: Path, bind: tuple[str, int]) -> None:
    if bind[0] == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 here")
    node = Node(stack, tmp_path, bind=bind)
    for host in [bind[0]] if bind[0] else ["127.0.0.1", *(["::1"] if _has_ipv6() else [])]:
        assert node.peer(address=(host, node.server.address[1])).ask("hello") == {"question": "hello"}


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return socket.has_dualstack_ipv6()
    except OSError:
        return False


# The client does not believe everything


def greet_as_server(sock: socket.socket, secret: str) -> None:
    challenge = b"c" * NONCE_BYTES
    sock.sendall(challenge)
    nonce, _ = exactly(sock, NONCE_BYTES), exactly(sock, PROOF_BYTES)
    terms = terms_of(secret, RUN)
    sock.sendall(terms.prove(SERVER, challenge, nonce))
    seal(sock, terms.seals(challenge, nonce, is_caller=False))


def test_a_server_that_cannot_prove_itself_is_refused() -> None:
    asked: list[bytes] = []

    def reflect(sock: socket.socket) -> None:
        sock.sendall(b"c" * NONCE_BYTES)
        sock.sendall(exactly(sock, NONCE_BYTES + PROOF_BYTES)[NONCE_BYTES:])
        asked.append(sock.recv(100))

    with impostor(reflect) as address, pytest.raises(PeerError, match="somebody else"):
        Peer(address, draw_secret(), RUN, SECONDS).ask("hello")
    assert asked == [b""]


def test_control_without_the_check_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.wire.greeting.is_proof", lambda given, expected: True)
    monkeypatch.setattr("stepwell.ranks.wire.seal.is_tag", lambda given, expected: True)

    def believe(sock: socket.socket) -> None:
        sock.sendall(b"c" * NONCE_BYTES)
        sock.sendall(exactly(sock, NONCE_BYTES + PROOF_BYTES)[NONCE_BYTES:])
        receive_frame(sock)
        exactly(sock, TAG_BYTES)
        send_frame(sock, {"nbytes": 2})
        sock.sendall(bytes(TAG_BYTES) + b"{}" + bytes(TAG_BYTES))

    with impostor(believe) as address:
        peer = Peer(address, draw_secret(), RUN, SECONDS)
        assert peer.ask("hello") == {}
        peer.close()


@pytest.mark.parametrize(
    ("head", "body", "says"),
    [
        ({"nbytes": 1 << 50}, b"", "more than"),
        ({"nbytes": -1}, b"", "without a size"),
        ({"nbytes": True}, b"", "without a size"),
        ({"nbytes": 2}, b"[]", "not list"),
        ({"nbytes": 34}, b"{", "hung up after 33 of 66"),
        ({"nbytes": 1}, b"{}", "changed on their way"),
        ({"nbytes": 2}, b"{{", "not valid JSON"),
        (b"x" * 70_000, b"", "a frame of 70000 bytes"),
        (b"[1]", b"", "not list"),
        (b"\xff", b"", "not valid JSON"),
    ],
)
def test_an_answer_that_is_none(head: object, body: bytes, says: str) -> None:
    secret = draw_secret()

    def act(sock: socket.socket) -> None:
        greet_as_server(sock, secret)
        receive_frame(sock)
        send_frame(sock, head)
        send_sealed(sock, body)

    with impostor(act) as address, pytest.raises(PeerError, match=says) as caught:
        Peer(address, secret, RUN, SECONDS).ask("hello")
    assert isinstance(caught.value, StorageError) and isinstance(caught.value, OSError)


def test_a_range_of_another_size_is_refused() -> None:
    secret = draw_secret()

    def act(sock: socket.socket) -> None:
        greet_as_server(sock, secret)
        receive_frame(sock)
        send_frame(sock, {"nbytes": 11})
        sock.sendall(b"x" * 11)

    with impostor(act) as address, pytest.raises(PeerError, match="11 bytes for a range of 10"):
        read(Peer(address, secret, RUN, SECONDS), "file", 0, 10)


@pytest.mark.parametrize("silent", ["at first", "when asked", "in the middle"])
def test_a_server_that_falls_silent(silent: str) -> None:
    secret = draw_secret()

    def act(sock: socket.socket) -> None:
        if silent != "at first":
            greet_as_server(sock, secret)
            receive_frame(sock)
        if silent == "in the middle":
            send_frame(sock, {"nbytes": 10})
            sock.sendall(b"x" * 5)
        is_hung_up(sock)

    with impostor(act) as address, pytest.raises(PeerError, match="kept us waiting"):
        read(Peer(address, secret, RUN, 0.2), "file", 0, 10)


@pytest.mark.parametrize("secret", ["", "0" * 63, "g" * 64, "0" * 64 + "\n", "A" * 64])
def test_a_secret_that_is_none(secret: str) -> None:
    with pytest.raises(ConfigError, match="64 hex digits") as caught:
        Peer(("127.0.0.1", 1), secret, RUN)
    assert not secret or secret not in str(caught.value)


def test_the_secret_never_travels() -> None:
    secret, heard = draw_secret(), bytearray()

    def act(sock: socket.socket) -> None:
        sock.sendall(b"c" * NONCE_BYTES)
        heard.extend(exactly(sock, NONCE_BYTES + PROOF_BYTES))

    with impostor(act) as address, pytest.raises(PeerError):
        Peer(address, secret, RUN, 0.2).ask("hello")
    assert bytes.fromhex(secret) not in heard and secret.encode() not in heard
    expected = terms_of(secret, RUN).prove(CALLER, b"c" * NONCE_BYTES, bytes(heard[:NONCE_BYTES]))
    assert heard[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES] == expected


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    place = tmp_path_factory.mktemp("tls") / "both.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *kind, *names, "-keyout", str(place), "-out", f"{place}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    with open(place, "ab") as file:
        file.write(Path(f"{place}.crt").read_bytes())
    return place


@pytest.fixture
def tls_node(stack: ExitStack, tmp_path: Path, certificate: Path) -> Node:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return Node(stack, tmp_path / "cache", tls=context)


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=f"{certificate}.crt")


def test_tls(tls_node: Node, certificate: Path) -> None:
    data = tls_node.put("file", os.urandom(20 * MIB + 1))
    peer = tls_node.peer(tls=trusting(certificate))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda start: read(peer, "file", start, 5 * MIB), range(0, 20 * MIB, 5 * MIB))
        assert b"".join(found) == data[:-1]
    assert read(peer, "file", 0, len(data)) == data
    assert peer.ask("hello", x="y" * 1000) == {"question": "hello", "x": "y" * 1000}
    tls_node.check_refused({})


def test_tls_an_idle_connection_is_opened_again(
    tls_node: Node, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.IDLE_SECONDS", 0.1)
    peer = tls_node.peer(tls=trusting(certificate))
    for _ in range(3):
        assert peer.ask("hello") == {"question": "hello"}
        until(lambda: not tls_node.server._members)
    tls_node.check_refused({})


def test_tls_and_clear_do_not_mix(tls_node: Node, node: Node, certificate: Path) -> None:
    with pytest.raises(PeerError):
        tls_node.peer(timeout=0.5).ask("hello")
    with pytest.raises(PeerError):
        node.peer(tls=trusting(certificate), timeout=0.5).ask("hello")
    assert tls_node.peer(tls=trusting(certificate)).ask("hello") == {"question": "hello"}


def test_tls_without_the_secret_is_not_enough(tls_node: Node, certificate: Path) -> None:
    with pytest.raises(PeerError, match="another run"):
        tls_node.peer(tls=trusting(certificate), secret=draw_secret()).ask("hello")
    tls_node.check_refused({"proof": 1})


def test_tls_with_an_unknown_certificate_is_refused(tls_node: Node) -> None:
    with pytest.raises(PeerError, match="certificate"):
        tls_node.peer(tls=ssl.create_default_context()).ask("hello")
    tls_node.check_refused({"tls": 1})


def test_a_tls_reader_that_stops_is_dropped(tls_node: Node, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.levels.peers.server.GRACE_SECONDS", 0.2)
    monkeypatch.setattr("stepwell.levels.peers.peer_frames.LEAST_BYTES_PER_SECOND", 1 << 40)
    with open(tls_node.place / "sparse", "wb") as file:
        file.truncate(MAX_RANGE_BYTES)
    peer = tls_node.peer(tls=trusting(certificate))
    peer.ask("hello")
    stream = peer._take_idle()
    assert stream is not None
    request = {"op": "read", "directory": CHECKPOINT, "name": "sparse", "start": 0, "nbytes": MAX_RANGE_BYTES}
    stream.socket.setblocking(True)
    send_frame(stream.socket, request)
    tls_node.check_refused({"slow": 1})
    stream.close()
    tls_node.check_quiet()
