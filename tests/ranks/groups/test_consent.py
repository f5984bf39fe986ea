"""One rank that refuses makes all refuse: its own error there, one of its kind that names it on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stepwell.errors import ConfigError, DamagedError, StateError, StepwellError
from stepwell.ranks.groups.consent import each, lead, vote
from stepwell.ranks.groups.group import Group


class Heard(Group):
    """This rank, and what the others are going to say."""

    def __init__(self, rank: int, others: Sequence[Any]) -> None:
        super().__init__(rank, len(others))
        self.others = others

    def _exchange(self, data: bytes, seconds: float) -> list[bytes]:
        raise NotImplementedError

    def all_gather(self, value: Any, what: str, seconds: float | None = None) -> list[Any]:
        return [value if rank == self.rank else other for rank, other in enumerate(self.others)]

    def broadcast(self, value: Any, what: str, seconds: float | None = None, root: int = 0) -> Any:
        return self.all_gather(value, what)[root]


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_the_answer_of_rank_0() -> None:
    assert lead(Heard(0, [None, None]), "x", lambda: 5) == 5
    assert lead(Heard(1, [{"value": 5}, None]), "x", raising(AssertionError())) == 5


def test_the_error_of_rank_0() -> None:
    mine = ConfigError("no room")
    with pytest.raises(ConfigError) as raised:
        lead(Heard(0, [None, None]), "x", raising(mine))
    assert raised.value is mine
    with pytest.raises(ConfigError, match="rank 0: no room"):
        lead(Heard(1, [{"error": "ConfigError", "text": "no room"}, None]), "x", lambda: None)


@pytest.mark.parametrize("name", ["OSError", "listing", "StepwellError", "Sequence"])
def test_what_is_no_kind_of_ours_is_the_common_one(name: str) -> None:
    with pytest.raises(StepwellError, match="rank 0: text") as raised:
        lead(Heard(1, [{"error": name, "text": "text"}, None]), "x", lambda: None)
    assert type(raised.value) is StepwellError


def test_all_agree() -> None:
    each(Heard(1, [None] * 3), "x", lambda: None)
    assert vote(Heard(1, [None] * 3), "x", None) is None


def test_one_refuses() -> None:
    with pytest.raises(StateError, match=r"^rank 2: does not fit$"):
        each(Heard(0, [None, None, ["StateError", "does not fit"]]), "x", lambda: None)
    mine = StateError("does not fit")
    with pytest.raises(StateError) as raised:
        each(Heard(2, [None, None, None]), "x", raising(mine))
    assert raised.value is mine


def test_damage_is_an_answer_and_named() -> None:
    assert vote(Heard(0, [None, ["DamagedError", "block 3"]]), "x", None) == "rank 1: block 3"
    assert vote(Heard(0, [None]), "x", DamagedError("block 3")) == "block 3"
    with pytest.raises(DamagedError, match="rank 1: block 3"):
        each(Heard(0, [None, ["DamagedError", "block 3"]]), "x", lambda: None)


def test_another_error_counts_more_than_damage() -> None:
    votes = [None, ["DamagedError", "block 3"], ["StateError", "does not fit"]]
    for rank, error in ((0, None), (1, DamagedError("block 3"))):
        with pytest.raises(StateError, match="rank 2: does not fit"):
            vote(Heard(rank, votes), "x", error)
