"""Every parser that meets bytes of somebody else, fed with valid ones that were changed at random.

A case ends with a value or with the error that the parser promises. Nothing else is an end: no other exception, no
hang, and no memory for a length that was forged (RLIMIT_AS is what the process has plus a margin, so that such an
allocation is a MemoryError). Documents are changed before and after they are sealed, since a forger can seal them too;
a document that is believed has to say the same when it is written and read again.

`STEPWELL_SOAK_SEED=n make soak` draws the same cases again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import secrets
import shutil
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from stepwell.adapters.scr.parameter_sources import Config
from stepwell.adapters.scr.parameters import settle
from stepwell.errors import ConfigError, DamagedError, GroupError
from stepwell.levels.cached import Level
from stepwell.levels.peers.peer_frames import Patience, Stream, frame, terms_of
from stepwell.ranks.groups.group import Group
from stepwell.ranks.groups.joined import join, split
from stepwell.ranks.line.line_connection import Wire
from stepwell.ranks.line.line_frame import Kind, encode
from stepwell.ranks.wire.greeting import REFUSED, Caller, Guest, Terms
from stepwell.ranks.wire.seal import Seals, digest_of
from stepwell.ranks.wire.secret import draw_secret
from stepwell.storage.chain.chain_document import NAME as CHAIN_NAME
from stepwell.storage.chain.chain_record import HEAD_NBYTES, Head, body_digest
from stepwell.storage.chain.replay import restore
from stepwell.storage.chain.segment import BASE_NAME, list_segments
from stepwell.storage.codecs.assignment import Deltas
from stepwell.storage.format.manifest import Lineage, Manifest, RecordRef, Run, Void
from stepwell.storage.format.parity_entry import Parity
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.format.shard import header_bytes, parse_header
from stepwell.storage.format.summary import Summary
from stepwell.types import CheckpointId, Keep
from tests.crash.harness import report
from tests.hostile.forge import seal_text
from tests.hostile.victim import size_bytes
from tests.levels.peer_node import CHECKPOINT, RUN, Node, exactly, receive_frame, receive_sealed, send_frame
from tests.restore.build import RunBuilder
from tests.storage.codecs.walks import write

MARGIN_BYTES: Final = 1 << 30
LONGEST_SECONDS: Final = 5.0
"""Of one case, on the processor: a busy machine takes longer. A case that waits for ever ends at the test's timeout."""
Attempt = Callable[[random.Random], str]
"""One case: draws it, feeds it, and says what came of it. Raises for what must not be."""


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes() + MARGIN_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(what: str, attempt: Attempt, cases: int) -> None:
    drawn = int(os.environ.get("STEPWELL_SOAK_SEED") or secrets.randbits(20))
    ends: Counter[str] = Counter()
    longest = 0.0
    with little_memory():
        for number in range(cases):
            began = time.thread_time()
            try:
                ends[attempt(random.Random(f"{what} {drawn} {number}"))] += 1
            except Exception as error:
                raise AssertionError(f"{what}, case {number}, STEPWELL_SOAK_SEED={drawn}: {error!r}") from error
            longest = max(longest, time.thread_time() - began)
            assert longest < LONGEST_SECONDS, f"{what}, case {number}, STEPWELL_SOAK_SEED={drawn}: {longest:.1f} s"
    told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    report(f"fuzz, {what}: {cases} cases: {told}; the longest {longest:.3f} s; STEPWELL_SOAK_SEED={drawn}")


# How bytes, lines and documents are changed

NUMBERS: Final = (0, 1, -1, 7, 255, 65536, 1 << 31, 1 << 32, (1 << 62) - 1, 1 << 62, 1 << 64, -(1 << 63), 10**40)
VALUES: Final[tuple[Any, ...]] = (
    *NUMBERS, 0.5, -0.0, 1e308, None, True, False, "", "x", "../../etc/passwd", "\0", "\x1b[2J", "\ud800", "é" * 99,
    "float32", "0-9999999999", "raw", "NaN", [], {}, [[]], [{}], {"": None}, [0], ["a", "a"], [1 << 61] * 3,
)  # fmt: skip
PIECES: Final = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b"\xff\xfe", b"\0", b'"',
    b"}", b",", b'"format":1,', b"\n", b"\r", b"#", b"=", b"${", b"$HOME", b"  ",
)  # fmt: skip


def changed(data: bytes, chance: random.Random) -> bytes:
    """Bits, bytes, pieces and numbers of one to four places."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(found) + 1)
        end = min(len(found), at + chance.choice((1, 1, 2, 4, 8, 64, len(found))))
        kind = chance.randrange(8)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = chance.randrange(256)
        elif kind == 2:
            del found[at:]
        elif kind == 3:
            del found[at:end]
        elif kind == 4:
            found[at:at] = found[at:end]
        elif kind == 5:
            found[at:at] = chance.choice((chance.randbytes(chance.randrange(1, 40)), chance.choice(PIECES)))
        elif kind == 6:
            other = chance.randrange(len(found) + 1)
            found[at:end] = found[other : other + end - at]
        else:
            number = struct.pack("<q", chance.choice([number for number in NUMBERS if abs(number) < 1 << 63]))
            found[at : at + 8] = number[: chance.choice((2, 4, 8))]
    return bytes(found)


def inside(value: Any) -> list[tuple[Any, Any]]:
    """All containers of a document, with each of their keys."""
    found, left = [], [value]
    while left:
        here = left.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        found += [(here, key) for key in keys]
        left += [here[key] for key in keys]
    return found


def twisted(text: bytes, chance: random.Random) -> Any:
    """A JSON document with other values, without some, or with some twice."""
    document = json.loads(text)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = inside(document)
        if not places:
            return chance.choice(VALUES)
        here, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del here[key]
        elif kind == 1:
            other, at = chance.choice(places)
            with contextlib.suppress(LookupError, RecursionError, ValueError):
                here[key] = json.loads(json.dumps(other[at]))
        elif kind == 2 and isinstance(here, list):
            here.insert(chance.randrange(len(here) + 1), json.loads(json.dumps(here[key])))
        elif kind == 3 and isinstance(here, dict):
            here[chance.choice(("", "checksum", "format", "strides", "\0", key + "x"))] = here.pop(key)
        elif kind == 4 and type(here[key]) is int:
            here[key] += chance.choice((-1, 1, 2, -here[key], 1 << 40))
        else:
            here[key] = json.loads(json.dumps(chance.choice(VALUES)))
    return document


def rewritten(text: bytes, chance: random.Random) -> bytes:
    """The same, or its text changed, so that it may be no JSON any more."""
    return changed(text, chance) if chance.random() < 0.4 else json.dumps(twisted(text, chance)).encode()


# Documents

Load = Callable[..., Any]
AT: Final = CheckpointId(12, 0, 1)


def documents(tmp_path: Path) -> dict[str, tuple[bytes, Load]]:
    """Each kind, as it is written, and what reads it."""
    build = RunBuilder(tmp_path / "run")
    state = {"x": torch.arange(6.0), "half": torch.ones(3, dtype=torch.bfloat16).t(), "note": [1, "text", (1.5, None)]}
    id = build.write({"values": state}, 3, frozen=["values/half"])
    directory = build.paths.checkpoint(id)
    data = (directory / "rank-00000.json").read_bytes()
    record = Record.load(data, path="record")
    references = tuple(RecordRef(f"rank-0000{rank}.json", 100, "0" * 32) for rank in (0, 1, 2))
    file = FileEntry("parity-00002.bin", "opaque", 5000, 4096, ("0" * 16, "1" * 16))
    parity = Parity(record.run, AT, 2, (0, 1, 2), 1, references, (5000, 4000, 0), file)
    return {
        "record": (data, Record.load),
        "summary": (Summary.of(record, data).dump(), Summary.load),
        "manifest": ((directory / "manifest.json").read_bytes(), Manifest.load),
        "void": (Void(record.run, AT, 3, "no room").dump(), Void.load),
        "run": (build.paths.run.read_bytes(), Run.load),
        "lineage": (Lineage(2, 1, 3, 1.5, "h0", "lc", Keep(last=3, every=5)).dump(), Lineage.load),
        "parity": (parity.dump(), Parity.load),
        "level": (Level(True, {"2": "no room"}, 3).dump(), Level.load),
    }


def documents_attempt(kinds: dict[str, tuple[bytes, Load]]) -> Attempt:
    for name, (data, load) in kinds.items():
        load(data, path=name)  # the specimen is good

    def attempt(chance: random.Random) -> str:
        name = chance.choice(list(kinds))
        data, load = kinds[name]
        if chance.random() < 0.2:
            given = changed(data, chance)
            with contextlib.suppress(DamagedError):
                load(given, path=name)
                assert given == data, f"{name} was believed without its checksum"
                return "left as they were"
            return "damaged"
        document = json.loads(data)
        del document["checksum"]
        given = seal_text(rewritten(json.dumps(document).encode(), chance) or b"}")
        try:
            found = load(given, path=name)
        except DamagedError:
            return "refused"
        assert load(found.dump(), path=name) == found, f"{name} says another thing"
        return "believed"

    return attempt


RECORDS: Final = ("record", "summary", "parity")
SHORT, LONG = 300, 60_000


def both(short: int = SHORT, long: int = LONG) -> pytest.MarkDecorator:
    """As often as `make test` has time for, and as often as `make soak` has."""
    return pytest.mark.parametrize(
        "cases", [short, pytest.param(long, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
    )


@both()
def test_records(cases: int, tmp_path: Path) -> None:
    found = documents(tmp_path)
    fuzz("records", documents_attempt({name: found[name] for name in RECORDS}), cases)


@both()
def test_manifests(cases: int, tmp_path: Path) -> None:
    found = documents(tmp_path)
    fuzz("manifests", documents_attempt({name: found[name] for name in found if name not in RECORDS}), cases)


@both()
def test_headers_of_shards(cases: int, tmp_path: Path) -> None:
    directory = RunBuilder(tmp_path / "run")
    id = directory.write({"values": {"x": torch.arange(6.0), "y": torch.ones(3, 2)}}, 3)
    data = (directory.paths.checkpoint(id) / "rank-00000.safetensors").read_bytes()
    end = header_bytes(data[:8], len(data), path="shard")
    good = parse_header(data[:end], len(data), path="shard")

    def attempt(chance: random.Random) -> str:
        text = rewritten(data[8:end], chance)
        given = changed(data, chance) if chance.random() < 0.3 else struct.pack("<Q", len(text)) + text + data[end:]
        try:
            found = parse_header(given[: header_bytes(given[:8], len(given), path="shard")], len(given), path="shard")
        except DamagedError:
            return "refused"
        assert all(0 <= start <= stop <= len(given) for _, _, start, stop in found.values())
        return "left as they were" if found == good else "believed"

    fuzz("headers of shards", attempt, cases)


# Messages and greetings


class _Pipe(socket.socket):
    """One end of a pair that has no ports to run out of; options of TCP mean nothing on it."""

    def setsockopt(self, *options: Any) -> None:
        pass


def pair() -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    return near, _Pipe(fileno=far.detach())


def said(data: bytes, sock: socket.socket, listen: Callable[[], Any]) -> Any:
    """What is made of these bytes, after which the caller hangs up."""
    with sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return listen()


REQUESTS: Final[tuple[dict[str, Any], ...]] = (
    {"op": "read", "directory": CHECKPOINT, "name": "file", "start": 0, "nbytes": 8, "sealed": True},
    {"op": "ask", "question": "where", "fields": {"run": RUN, "steps": [1, 2, {"a": None}]}},
)


@both()
def test_messages_between_nodes(cases: int) -> None:
    """One frame after the greeting: of somebody on the way, and of a node that has gone mad."""

    def attempt(chance: random.Random) -> str:
        near, far = pair()
        caller, server = Seals(b"k" * 32, is_caller=True), Seals(b"k" * 32, is_caller=False)
        whole = frame(chance.choice(REQUESTS))
        is_member = chance.random() < 0.6
        if is_member:
            body = rewritten(whole[4:], chance)
            given = struct.pack("<I", len(body)) + body + caller.seal(digest_of(body))
        else:
            honest = whole + caller.seal(digest_of(whole[4:]))
            given = changed(honest, chance)
        try:
            stream = Stream(far, server)
            found = said(given, near, lambda: stream.receive_message(Patience(LONGEST_SECONDS)))
            assert isinstance(found, dict)
            assert is_member or given.startswith(honest), "what somebody changed on its way was believed"
            return "believed" if is_member else "left as they were"
        except (DamagedError, ConnectionError) as error:
            return "refused" if isinstance(error, DamagedError) else "ended early"
        finally:
            far.close()

    fuzz("messages between nodes", attempt, cases)


@both(200, 20_000)
def test_requests_of_a_node(cases: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Through a whole server: each gets an answer or is hung up on, and the server lives on."""
    with ExitStack() as stack:
        node = Node(stack, tmp_path / "cache")
        node.put("file", bytes(range(256)))
        members = [node.member()]

        def attempt(chance: random.Random) -> str:
            request = json.dumps(chance.choice(REQUESTS)).encode()
            body = rewritten(request, chance)
            try:
                send_frame(members[0], body)
                head = receive_frame(members[0])
                if "error" in head:
                    return "refused"
                asked = json.loads(body)
                if asked["op"] == "read" and asked.get("sealed") is not True:
                    assert exactly(members[0], head["nbytes"]) == bytes(range(256))[asked["start"] :][: asked["nbytes"]]
                else:
                    receive_sealed(members[0], head["nbytes"])
                return "answered"
            except ConnectionError:
                members[0].close()
                members[0] = node.member()
                return "hung up on"

        fuzz("requests to a node", attempt, cases)
        node.check_alive()
        assert node.server.refused.get("failed", 0) == 0, caplog.text[-2000:]
        assert "a peer was not served" not in caplog.text


@both()
def test_messages_of_the_line(cases: int) -> None:
    """Up to rank 0, of somebody on the way and of a rank that has gone mad: what `Hub` takes for a lost wire."""

    def attempt(chance: random.Random) -> str:
        near, far = pair()
        caller, server = Seals(b"k" * 32, is_caller=True), Seals(b"k" * 32, is_caller=False)
        honest = encode({"type": "ready", "step": 12, "parts": [1, {"x": [None, True]}]}, 3)
        is_rank = chance.random() < 0.6
        if is_rank:
            text = rewritten(honest.data[13:], chance)
            head = struct.pack("<BI", chance.choice([*Kind, 3, 255]), chance.choice((0, 3, 1 << 31)))
            body = changed(head + text, chance) if chance.random() < 0.3 else head + text
            given = struct.pack("<Q", len(body)) + body + caller.seal(digest_of(body))
        else:
            whole = honest.data + caller.seal(honest.digest)
            given = changed(whole, chance)
        wire = Wire(far, 3, server)
        try:
            found = said(given, near, lambda: [each.message() for each in wire.receive()])
            assert is_rank or not found or given.startswith(whole), "what somebody changed on its way was believed"
            return ("believed" if is_rank else "left as they were") if found else "ended early"
        except (OSError, ValueError, RecursionError, DamagedError):
            return "refused"
        finally:
            far.close()

    fuzz("messages of the line", attempt, cases)


class Told(Group):
    """A rank that is told this of all ranks."""

    def __init__(self, joined: bytes, size: int) -> None:
        super().__init__(0, size)
        self._joined = joined

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        return split(self._joined, self.size)


@both()
def test_messages_of_all_ranks(cases: int) -> None:
    """What comes out of torch's store, which others may reach."""
    size = 8
    values = [{"rank": rank // 2, "says": "yes"} for rank in range(size)]
    call = f"all_gather 'a call' of {size} ranks"
    joined = join([b"\n".join(json.dumps(part).encode() for part in (call, value)) for value in values])
    assert Told(joined, size).all_gather(None, "a call", 1.0) == values

    def attempt(chance: random.Random) -> str:
        first, rest = joined.split(b"\n", 1)
        given = rewritten(first, chance) + b"\n" + rest if chance.random() < 0.5 else changed(joined, chance)
        try:
            found = Told(given, size).all_gather(None, "a call", 1.0)
        except GroupError:
            return "refused"
        assert len(found) == size
        return "left as they were" if found == values else "believed"

    fuzz("messages of all ranks", attempt, cases)


@both()
def test_greetings(cases: int) -> None:
    """Of a caller and of a server, each changed on the way: nobody is let in by anything but the proof itself."""
    peers, line = terms_of(draw_secret(), RUN), Terms(b"k" * 32, "line/3", "start", 4)

    def attempt(chance: random.Random) -> str:
        terms, claim = chance.choice(((peers, b""), (line, struct.pack("<I", 7))))
        caller = Caller(terms, claim)
        near, far = pair()
        far.setblocking(False)
        try:
            guest = Guest(far, terms, LONGEST_SECONDS)
            assert not guest.advance()
            challenge = exactly(near, 32)
            whole = caller.answer(changed(challenge, chance) if chance.random() < 0.2 else challenge)
            given = changed(whole, chance) if chance.random() < 0.8 else whole
            is_good = given.startswith(whole) and caller._challenge == challenge
            try:
                is_in = said(given, near.dup(), guest.advance)
            except OSError:
                is_in = False
            assert is_in == is_good
            if not is_in:
                return "refused"
            proof = exactly(near, 32)
            other = changed(proof, chance)
            try:
                assert caller.check(other) is None or other == proof
                assert other in (proof, REFUSED)
            except PermissionError:
                assert other != proof
            return "let in"
        finally:
            near.close()
            far.close()

    fuzz("greetings", attempt, cases)


# Chains and conf files

RECORDS_OF_CHAIN: Final = 6


@both(120, 5_000)
def test_chains(cases: int, tmp_path: Path) -> None:
    """Any file of a chain, with its checksums made right again: the states it gives are some that were written, or
    those that a forger wrote, in the shape that the document says.
    """
    whole = tmp_path / "whole"
    known = write(whole, RECORDS_OF_CHAIN, Deltas(skip_every=4, small="pool"))
    good = {path.name: path.read_bytes() for path in whole.iterdir()}
    segments = [path.name for _, path in list_segments(whole)]
    directory = tmp_path / "chain"
    shutil.copytree(whole, directory)

    def attempt(chance: random.Random) -> str:
        name = chance.choice((CHAIN_NAME, BASE_NAME, *segments, *segments, *segments))
        is_sealed = chance.random() < 0.7
        if not is_sealed:
            given = changed(good[name], chance)
        elif name == CHAIN_NAME:
            document = json.loads(good[name])
            del document["checksum"]
            given = seal_text(rewritten(json.dumps(document).encode(), chance) or b"}")
        else:
            given = forged(good[name], chance)
        (directory / name).write_bytes(given)
        try:
            found = restore(directory)
        except (DamagedError, ConfigError):
            return "refused"
        finally:
            (directory / name).write_bytes(good[name])
        if not is_sealed:
            assert all(value.tobytes() == known[found.number][key].tobytes() for key, value in found.leaves.items())
        return "shortened" if found.stopped else "believed"

    fuzz("chains", attempt, cases)


def forged(data: bytes, chance: random.Random) -> bytes:
    """Records of a file with one of them changed, in its head or body, under checksums that are right."""
    records = []
    while data:
        head = Head.load(data[:HEAD_NBYTES], path="")
        end = HEAD_NBYTES + head.body_nbytes
        records.append((head, data[HEAD_NBYTES:end]))
        data = data[end:]
    at = chance.randrange(len(records))
    made = b""
    for number, (head, body) in enumerate(records):
        facts = {**vars(head)}
        if number == at:
            body = changed(body, chance)
            facts |= {"body_nbytes": len(body), "body_digest": body_digest(body)}
            if chance.random() < 0.3:
                key = chance.choice(("kind", "flags", "parts", "number", "step", "parent", "body_nbytes"))
                most = {"kind": 3, "flags": 1 << 8, "parts": 1 << 32}.get(key, 1 << 63)
                facts[key] = chance.choice((0, 1, 2, chance.randrange(most), most - 1))
        made += Head(**facts).dump() + body
    return made


CONF: Final = b"""# of the site
SCR_COPY_TYPE = FILE   # all of them below
SCR_CACHE_SIZE=3
SCR_PREFIX=/tmp/scr-fuzz
SCR_FLUSH_ASYNC_BW=200MB
SCR_CHECKPOINT_OVERHEAD=2.5
SCR_USER_NAME=somebody
CKPT=0 INTERVAL=1 TYPE=XOR SET_SIZE=4
CKPT=1 INTERVAL=4 TYPE=RS SET_SIZE=6 SET_FAILURES=2
STORE=/dev/shm GROUP=NODE COUNT=1
GROUPS=host1 POWER=psu1 SWITCH=0
SCR_HALT_SECONDS=3600
"""


@both()
def test_conf_files(cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a site or of a user; what it comes to, or an error that names the parameter or line."""
    path = tmp_path / "scr.conf"
    monkeypatch.setenv("SCR_CONF_FILE", str(path))
    path.write_bytes(CONF)
    assert len(settle(Config()).schemes) == 2

    def attempt(chance: random.Random) -> str:
        path.write_bytes(changed(CONF, chance))
        try:
            settings = settle(Config())
        except ConfigError:
            return "refused"
        assert settings.keep >= 2 and settings.scheme(12)
        return "believed"

    fuzz("conf files", attempt, cases)
