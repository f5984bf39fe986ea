"""Tags of frames: nothing can be changed, repeated, left out or said by who only relayed the greeting."""

from __future__ import annotations

import pytest

from stepwell.errors import DamagedError
from stepwell.ranks.wire.greeting import REFUSED, Caller, Terms
from stepwell.ranks.wire.seal import Seals, digest_of

KEY, SESSION = b"k" * 32, b"s" * 32


def ends() -> tuple[Seals, Seals]:
    return Seals(SESSION, is_caller=True), Seals(SESSION, is_caller=False)


def test_both_directions() -> None:
    caller, server = ends()
    for number in range(5):
        digest = digest_of(b"%d" % number)
        server.check(digest, caller.seal(digest))
        caller.check(digest, server.seal(digest))


@pytest.mark.parametrize("attack", ["changed", "repeated", "left out", "sent back", "of another connection"])
def test_attacks(attack: str) -> None:
    caller, server = ends()
    one, two = digest_of(b"1"), digest_of(b"2")
    first, second = caller.seal(one), caller.seal(two)
    if attack != "left out":
        server.check(one, first)
    given = {
        "changed": (digest_of(b"3"), second),
        "repeated": (one, first),
        "left out": (two, second),
        "sent back": (two, server.seal(one)),
        "of another connection": (two, [Seals(b"t" * 32, is_caller=True).seal(digest) for digest in (one, two)][1]),
    }[attack]
    with pytest.raises(DamagedError, match="changed on their way"):
        server.check(*given)


def test_control_without_the_comparison_each_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.ranks.wire.seal.is_tag", lambda given, expected: True)
    ends()[1].check(digest_of(b"3"), bytes(32))


def terms(what: str = "peer/2", about: str = "run", key: bytes = KEY) -> Terms:
    return Terms(key, what, about, 4)


@pytest.mark.parametrize("other", [terms(what="line/2"), terms(about="run2"), terms(key=b"K" * 32)])
def test_a_proof_is_for_one_purpose(other: Terms) -> None:
    caller = Caller(terms(), b"rank")
    nonce = caller.answer(b"c" * 32)[:32]
    with pytest.raises(PermissionError):
        caller.check(other.prove(b"server", b"c" * 32, nonce, b"rank"))
    assert caller.check(REFUSED) is None
    assert caller.check(terms().prove(b"server", b"c" * 32, nonce, b"rank")) is not None


def test_the_claim_is_part_of_the_proof() -> None:
    assert terms().prove(b"caller", b"c" * 32, b"n" * 32, b"1111") != terms().prove(
        b"caller", b"c" * 32, b"n" * 32, b"2222"
    )


def test_both_ends_have_the_same_keys_and_another_greeting_has_others() -> None:
    caller, server = Caller(terms(), b"rank"), terms()
    nonce = caller.answer(b"c" * 32)[:32]
    ours = caller.check(server.prove(b"server", b"c" * 32, nonce, b"rank"))
    assert ours is not None
    theirs = server.seals(b"c" * 32, nonce, b"rank", is_caller=False)
    theirs.check(digest_of(b"x"), ours.seal(digest_of(b"x")))
    with pytest.raises(DamagedError):
        server.seals(b"d" * 32, nonce, b"rank", is_caller=False).check(digest_of(b"x"), ours.seal(digest_of(b"x")))
