"""Messages of all ranks as one: nothing is lost, and what is equal stands once."""

from __future__ import annotations

import json
import random

import pytest

from stepwell.ranks.groups.joined import join, split


def messages(values: list[object], call: str = "a call") -> list[bytes]:
    return [b"\n".join(json.dumps(part).encode() for part in (call, value)) for value in values]


def several() -> dict[str, list[object]]:
    draw = random.Random(7)
    return {
        "one": ["alone"],
        "equal": ["yes"] * 100,
        "different": list(range(100)),
        "one speaks": ["the root's", *[None] * 99],
        "the last speaks": [*[None] * 99, "the root's"],
        "nodes": [f"node {rank // 8}" for rank in range(100)],
        "leaders": [4000 + rank if rank % 8 == 0 else None for rank in range(100)],
        "any": [draw.randrange(4) for _ in range(100)],
        "text": ["", "\n", "a\nb", "\u00e9", "\\"],
    }


@pytest.mark.parametrize("case", several())
def test_comes_back_in_rank_order(case: str) -> None:
    given = messages(several()[case])
    assert split(join(given), len(given)) == given


def test_ranks_in_different_calls_come_back_too() -> None:
    given = [*messages([1, 2], "one"), *messages([1, 1], "two")]
    assert split(join(given), 4) == given


@pytest.mark.parametrize("case", ["equal", "one speaks", "the last speaks", "different"])
def test_the_size_does_not_follow_the_ranks_where_little_differs(case: str) -> None:
    many = {
        "equal": ["yes"] * 10_240,
        "one speaks": ["the root's", *[None] * 10_239],
        "the last speaks": [*[None] * 10_239, "the root's"],
        "different": list(range(10_240)),
    }[case]
    joined = join(messages(many))
    assert len(joined) < 100 + (
        len(b"\n".join(b"%d" % number for number in range(10_240))) if case == "different" else 0
    )


def test_equal_messages_are_one_object() -> None:
    found = split(join(messages(["x" * 1000] * 50)), 50)
    assert len({id(message) for message in found}) == 1


@pytest.mark.parametrize("header", [b"[[1,[[0,0,1000000000000]]]]", b"[[1,[[0,0,2]]]]", b"[[9,[[0,0,3]]]]", b"nothing"])
def test_what_does_not_fit_the_ranks_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError):
        split(header + b'\n"yes"', 3)
