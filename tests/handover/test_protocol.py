"""Every message comes back as it was, and what is none of them is refused with what is wrong."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from stepwell.errors import AgentError
from stepwell.handover import protocol
from stepwell.handover.message import (
    Encoded,
    FromClient,
    Message,
    MessageError,
    ToAgent,
    ToHolder,
    ToSuccessor,
    ToTrainer,
    decode,
    encode,
    expect,
)
from stepwell.handover.protocol import KINDS
from stepwell.types import CodedPlace, Keep, OfferedArena, OfferedSnapshot, SaveRequest

LEAVES: tuple[dict[str, Any], ...] = ({"name": "w", "shape": [2, 3], "private": False},)
REQUEST = SaveRequest(7, 1, 1700000000.5, {"step": [1, None]}, True, False, "best", {"log": "/x"}, True, True, False)
USUAL = SaveRequest(7, 0, 1.0, {}, False, False, None, {})
MESSAGES: tuple[Message, ...] = (
    protocol.Hello(1, "run", "/root", 2, 0, 4, "agents", Keep(last=3, every=10, epochs=True), 60, 600.0),
    protocol.Hello(1, "r", "/", 2, 0, 1, "", Keep(), 0.5, 1.0, "step-000000000003.l0001", 9.0, {"a": [1]}, {"b": None}),
    protocol.Serve("/root", "run", "secret", None),
    protocol.Serve("/root", "run", "secret", "/tls"),
    protocol.NewArena(1, 2, 4096, 0),
    protocol.NewLayout(1, 4096, 0, LEAVES, {"torch": "2"}),
    protocol.NewLayout(1, 4096, 0, LEAVES, {}, elsewhere=LEAVES, partners=(1, 2), is_partial=True),
    protocol.Begin(USUAL, 5, 0, 1, 2, 0),
    protocol.Begin(REQUEST, 5, 0, 1, 2, 3, {"0-2": "digest"}, (0, 1), CodedPlace("base", 1, 2, 3, 4), written=True),
    protocol.StreamBegin(REQUEST, 5, 0, 1, 2, 3, {"0-2": "digest"}),
    protocol.StreamChunk(5, 1, 4096),
    protocol.StreamEnd(5, 1, 2),
    protocol.NoPart(7, 1, "refused"),
    protocol.BaseTaken(5),
    protocol.MakeRoom(),
    protocol.Ping(),
    protocol.Close(1.5),
    protocol.Released(5, is_over=False),
    protocol.Durable(5, 7, "step-7", 0.5),
    protocol.Durable(5, 7, "step-7", 0.5, "alone"),
    protocol.WriteFailed(5, 7, 1, "disk full", final=False),
    protocol.WriteFailed(5, 7, 1, "fenced", final=True, fenced=True, void=True, drift=True),
    protocol.Rebased(5, "step-7"),
    protocol.ChunkDone(5),
    protocol.Flushed(7),
    protocol.DeltaAppended(7),
    protocol.Voided(7, 1),
    protocol.GivesUp(protocol.NoPart(7, 1, "it failed")),
    protocol.ChainOver("step-7"),
    protocol.BaseWanted("there is no base yet"),
    protocol.Ready(12),
    protocol.Pong(),
    protocol.Bye(),
    protocol.Peek(2, 12),
    protocol.Adopt(2, 12),
    protocol.Offer(12),
    protocol.Offer(12, (OfferedSnapshot("{}", 0, 8), OfferedSnapshot("{}", 1, 8)), OfferedArena(1, 2, 4096, 0)),
    protocol.NoOffer("closing", 12),
)


def as_json(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(message))
    return found


def read(found: object) -> Message:
    return decode(json.dumps(found).encode(), KINDS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message).encode(), KINDS) == message
    assert as_json(message)["type"] == message.kind


def test_every_kind_is_tried_here_and_says_who_speaks_to_whom() -> None:
    assert {type(message) for message in MESSAGES} == set(KINDS.values())
    for kind, cls in KINDS.items():
        assert cls.kind == kind
        assert sum(issubclass(cls, way) for way in (ToAgent, ToTrainer, ToHolder, ToSuccessor)) == 1, kind
        assert not issubclass(cls, FromClient), kind


def test_no_message_can_be_changed() -> None:
    for message in MESSAGES:
        for field in dataclasses.fields(message):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(message, field.name, None)


def test_messages_are_made_as_any_dataclass() -> None:
    """Their methods are our own: `dataclass` would make them one by one, at each start of an agent."""
    assert all(dataclasses.is_dataclass(cls) for cls in KINDS.values())
    begin = protocol.Begin(USUAL, 5, slot=0, generation=1, layout=2, frozen=0)
    assert dataclasses.replace(begin, written=True).written and not begin.written
    assert hash(protocol.NoPart(1, 2, "x")) == hash(protocol.NoPart(1, 2, reason="x"))
    assert protocol.Ping() != protocol.Pong() and protocol.Flushed(1) != protocol.DeltaAppended(1)
    assert repr(protocol.Flushed(1)) == "Flushed(step=1)"
    for values, named in (((1,), {}), ((1, 2, "x", 4), {}), ((1, 2, "x"), {"step": 1}), ((1, 2, "x"), {"more": 1})):
        with pytest.raises(TypeError, match="NoPart"):
            protocol.NoPart(*values, **named)  # type: ignore[arg-type]


def test_what_agents_of_this_version_always_read_is_what_is_sent() -> None:
    """The names on the socket do not change without `PROTOCOL`."""
    assert protocol.PROTOCOL == 2
    assert as_json(protocol.Begin(dataclasses.replace(USUAL, durable=False, delta=True), 5, 0, 1, 2, 0, {})) == {
        "type": "begin", "step": 7, "repeat": 0, "created": 1.0, "tree": {}, "epoch_end": False, "finished": False,
        "name": None, "files": {}, "durable": False, "delta": True, "sequence": 5, "slot": 0, "generation": 1,
        "layout": 2, "frozen": 0, "copies": {},
    }  # fmt: skip
    assert as_json(protocol.GivesUp(protocol.NoPart(7, 1, "why"))) == {
        "type": "gives_up", "void": {"type": "void", "step": 7, "repeat": 1, "reason": "why"},
    }  # fmt: skip
    assert as_json(protocol.Adopt(2, 12)) == {"type": "adopt", "protocol": 2, "pid": 12}


def test_what_is_json_already_is_not_made_again() -> None:
    request = dataclasses.replace(USUAL, tree=Encoded('{"x":[1,  2]}'))
    text = encode(protocol.Begin(request, 5, 0, 1, 2, 0))
    assert '"tree":{"x":[1,  2]}' in text
    found = decode(text.encode(), KINDS)
    assert isinstance(found, protocol.Begin) and found.request.tree == {"x": [1, 2]}


@pytest.mark.parametrize(
    ("found", "fields"),
    [
        ({"type": "what"}, {"field": "type", "found": "what"}),
        ({"n": 1}, {"field": "type"}),
        ({"type": ["ping"]}, {"field": "type"}),
        ([], {"found": "of type list", "expected": "an object"}),
        ({"type": "close"}, {"kind": "close", "field": "seconds", "found": "missing", "expected": "float"}),
        ({"type": "close", "seconds": "1"}, {"kind": "close", "field": "seconds", "found": "of type str"}),
        ({"type": "close", "seconds": True}, {"kind": "close", "field": "seconds", "found": "of type bool"}),
        ({"type": "ready", "pid": 1.0}, {"kind": "ready", "field": "pid", "expected": "int"}),
        ({"type": "ready", "pid": None}, {"kind": "ready", "field": "pid", "found": "of type NoneType"}),
        ({"type": "ping", "more": 1}, {"kind": "ping", "field": "more", "expected": "no such field"}),
        (as_json(MESSAGES[8]) | {"coded": [0, "1"]}, {"kind": "begin", "field": "coded", "expected": "int"}),
        (as_json(MESSAGES[8]) | {"files": {"x": 1}}, {"kind": "begin", "field": "files", "expected": "dict[str, str]"}),
        (as_json(MESSAGES[8]) | {"symbols": {"base": "b"}}, {"kind": "begin", "field": "symbols.part"}),
        (as_json(MESSAGES[0]) | {"keep": {"last": 1}}, {"kind": "hello", "field": "keep"}),
        (as_json(MESSAGES[0]) | {"keep": {"first": 1}}, {"kind": "hello", "field": "keep.first"}),
        ({"type": "gives_up", "void": {"type": "ping"}}, {"kind": "gives_up", "field": "void.type"}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(found: object, fields: dict[str, str]) -> None:
    with pytest.raises(MessageError) as refused:
        read(found)
    assert fields.items() <= refused.value.fields.items()
    for value in fields.values():
        assert value.rpartition(".")[2] in str(refused.value)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_field_that_is_missing_or_too_much_is_refused(kind: str) -> None:
    message = next(message for message in MESSAGES if message.kind == kind)
    whole = as_json(message)
    for cls in (type(message), SaveRequest) if hasattr(message, "request") else (type(message),):
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name in whole:
                with pytest.raises(MessageError, match=f"{field.name} of '{kind}' is missing"):
                    read({key: value for key, value in whole.items() if key != field.name})
    with pytest.raises(MessageError, match=f"more of '{kind}'"):
        read(whole | {"more": 1})


def test_bytes_that_are_no_json_are_refused() -> None:
    for data in (b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"type":"ready","pid":' + b"9" * 10_000 + b"}"):
        with pytest.raises(MessageError, match="not JSON"):
            decode(data, KINDS)


def test_a_secret_is_in_no_error_and_no_log() -> None:
    with pytest.raises(MessageError) as refused:
        read({"type": "serve", "root": "/", "run": "r", "secret": ["hidden"], "tls": None})
    assert "hidden" not in str(refused.value) and "hidden" not in str(refused.value.fields)
    assert "hidden" not in repr(protocol.Serve("/", "r", "hidden", None))


def test_one_for_somebody_else_is_refused() -> None:
    assert expect(protocol.Ping(), ToAgent) == protocol.Ping()
    with pytest.raises(AgentError, match="'ping' came"):
        expect(protocol.Ping(), ToTrainer)


ODD: tuple[Any, ...] = (None, True, 0, -1, 1.5, "", "x", "9" * 50, [], [1], [None], {}, {"type": "ping"}, {"a": [{}]})


def mutated(found: Any, luck: random.Random) -> Any:
    """With one thing changed, added or gone, at any depth."""
    if isinstance(found, dict) and found and luck.random() < 0.9:
        key = luck.choice(sorted(found))
        way = luck.randrange(4)
        if way == 0:
            return {name: value for name, value in found.items() if name != key}
        if way == 1:
            return found | {luck.choice(["more", "type", "step", key + "x"]): luck.choice(ODD)}
        return found | {key: mutated(found[key], luck)}
    return luck.choice(ODD)


def test_whatever_comes_is_a_message_or_is_refused() -> None:
    luck, outcomes = random.Random(19), {True: 0, False: 0}
    for number in range(2000):
        found = mutated(as_json(MESSAGES[number % len(MESSAGES)]), luck)
        data = bytearray(json.dumps(found).encode())
        if luck.random() < 0.2 and data:
            data[luck.randrange(len(data))] = luck.randrange(256)
        try:
            message = decode(bytes(data), KINDS)
        except MessageError as error:
            outcomes[False] += 1
            assert str(error)
        else:
            outcomes[True] += 1
            assert decode(encode(message).encode(), KINDS) == message
    assert min(outcomes.values()) > 50, outcomes
