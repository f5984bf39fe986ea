"""Who stores what: a pure function of what all ranks say they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.format.box import Box, is_covered
from stepwell.ranks.sharing import Claim, Shares, share

Claims = list[dict[str, Claim]]
DTYPES = ("float32", "bfloat16", "int64")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int64": 8}


def whole(shape: Sequence[int], digest: str = "d", dtype: str = "float32") -> Claim:
    return Claim(dtype, tuple(shape), Box.whole(shape), digest)


def part(shape: Sequence[int], offsets: Sequence[int], size: Sequence[int], digest: str, mesh: str = "m") -> Claim:
    return Claim("float32", tuple(shape), Box(tuple(offsets), tuple(size)), digest, mesh)


def rows(shape: Sequence[int], index: int, count: int, digest: str | None = None, mesh: str = "m") -> Claim:
    """As DTensor cuts rows: chunks of one size, the last ones smaller or empty."""
    step = -(-shape[0] // count)
    first, last = min(shape[0], index * step), min(shape[0], (index + 1) * step)
    digest = f"rows {first} to {last}" if digest is None else digest
    if first == last:
        return part(shape, (0,) * len(shape), (0,) * len(shape), "empty", mesh)
    return part(shape, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), digest, mesh)


def stored(claims: Claims, shares: list[Shares], name: str) -> list[Box]:
    """The boxes of a leaf that the ranks store for all."""
    found = []
    for mine, verdict in zip(claims, shares, strict=True):
        if name in verdict:
            first, last, _ = verdict[name]
            if first < last:
                found.append(mine[name].box.rows(first, last))
    return found


def nbytes(claims: Claims, shares: list[Shares], rank: int) -> int:
    total = 0
    for name, (first, last, _) in shares[rank].items():
        claim = claims[rank][name]
        total += claim.row_bytes * (last - first)
    return total


@given(
    st.integers(1, 5), st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(DTYPES)), min_size=1)
)
def test_what_is_equal_everywhere_is_stored_once_and_evenly(world: int, leaves: list[tuple[list[int], str]]) -> None:
    mine = {f"leaf{number}": whole(shape, "same", dtype) for number, (shape, dtype) in enumerate(leaves)}
    claims = [dict(mine) for _ in range(world)]
    shares = share(claims)
    for name, claim in mine.items():
        assert is_covered(Box.whole(claim.global_shape), stored(claims, shares, name)), name
    sizes = [nbytes(claims, shares, rank) for rank in range(world)]
    row = max(claim.row_bytes for claim in mine.values())
    assert max(sizes) - min(sizes) <= 2 * row, "each cut is off by less than one row"
    label = ",".join(map(str, range(world))) if world > 1 else ""
    assert all(shared[2] == label for verdict in shares for shared in verdict.values())


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_every_element_of_a_two_dimensional_mesh_is_stored_once(
    height: int, width: int, shards: int, replicas: int
) -> None:
    """Replicas of shards, some of them empty: those that hold the same part share it."""
    claims = [{"w": rows((height, width), index, shards)} for _ in range(replicas) for index in range(shards)]
    shares = share(claims)
    assert all("w" in verdict for verdict in shares)
    boxes = stored(claims, shares, "w")
    assert is_covered(Box.whole((height, width)), boxes)
    assert all(box.numel for box in boxes)


def test_the_holders_of_a_part_are_named() -> None:
    claims = [{"w": rows((8, 2), index, 2)} for _ in range(2) for index in range(2)]
    assert share(claims) == [
        {"w": (0, 2, "0,2")},
        {"w": (0, 2, "1,3")},
        {"w": (2, 4, "0,2")},
        {"w": (2, 4, "1,3")},
    ]


def test_copies_that_drifted_apart_on_one_mesh_are_stored_by_one() -> None:
    claims = [{"w": rows((4, 2), index, 2, f"{copy}")} for copy in range(2) for index in range(2)]
    assert share(claims) == [{"w": (0, 2, "")}, {"w": (0, 2, "")}, {"w": (0, 0, "")}, {"w": (0, 0, "")}]


def test_the_same_name_on_another_mesh_is_another_tensor() -> None:
    """The optimizers of two pipeline stages number their parameters alike: none of them may be left out."""
    claims = [
        {"w": rows((4, 2), index, 2, mesh=f"stage {stage}", digest=f"{stage}")} for stage in (0, 1) for index in (0, 1)
    ]
    assert share(claims) == [{}, {}, {}, {}]
    equal = [{"w": rows((4, 2), index, 2, mesh=f"group {group}")} for group in (0, 1) for index in (0, 1)]
    assert is_covered(Box.whole((4, 2)), stored(equal, share(equal), "w")), "what is equal is shared all the same"
    half = [dict(claim) for claim in equal]
    half[3] = {"w": rows((4, 2), 1, 2, mesh="group 1", digest="other")}
    assert share(half) == [{}, {}, {}, {}], "one verdict for all parts of a name"


@pytest.mark.parametrize(
    "claims",
    [
        [{"w": whole((4,), "a")}, {"w": whole((4,), "b")}],
        [{"w": whole((4,), "a")}, {"w": whole((5,), "a")}],
        [{"w": whole((4,), "a")}, {"w": whole((4,), "a", "int64")}],
        [{"w": whole((0, 3), "a")}, {"w": whole((0, 3), "a")}],
        [{"w": part((0, 3), (0, 0), (0, 0), "a")}, {"w": part((0, 3), (0, 0), (0, 0), "a")}],
        [{"w": rows((4, 2), 0, 2)}, {"w": rows((6, 2), 1, 2)}],
    ],
    ids=["content", "shape", "type", "nothing in it", "nothing in it, sharded", "parts of other shapes"],
)
def test_what_is_not_the_same_stays_each_ranks_own(claims: Claims) -> None:
    assert share(claims) == [{}, {}]


def test_without_dimensions() -> None:
    claims = [{"step": whole((), "s"), "w": whole((3,), "w")} for _ in range(3)]
    shares = share(claims)
    assert len(stored(claims, shares, "step")) == 1
    assert is_covered(Box.whole((3,)), stored(claims, shares, "w"))


def test_a_leaf_of_some_ranks_only() -> None:
    """As pipeline stages have them, and what rank 0 alone keeps."""
    claims = [{"a": whole((4,), "x"), "log": whole((2,), "l")}, {"a": whole((4,), "x"), "b": whole((4,), "y")}]
    shares = share(claims)
    assert shares[0]["log"] == (0, 2, "") and shares[1]["b"] == (0, 4, "")
    assert is_covered(Box.whole((4,)), stored(claims, shares, "a"))


@given(st.integers(0, 1000))
def test_the_verdict_does_not_depend_on_the_order_of_leaves(seed: int) -> None:
    names = [f"leaf{number}" for number in range(6)]
    made = {name: whole((3, number + 1), "same") for number, name in enumerate(names)}
    chance = random.Random(seed)
    claims = [{name: made[name] for name in chance.sample(names, len(names))} for _ in range(3)]
    assert share(claims) == share([made] * 3)


def test_a_claim_travels() -> None:
    claim = rows((7, 3), 2, 3, mesh="abc")
    assert Claim.load(claim.dump()) == claim


def test_what_changes_is_shared_evenly_beside_a_large_part_that_does_not() -> None:
    """Adapters beside a frozen model: a thousandth of the bytes, and all of what is written each time."""
    mine = {f"base/{number}": replace(whole((64, 1000)), is_still=True) for number in range(20)}
    mine |= {f"adapter/{number}": whole((8, 16)) for number in range(20)}
    claims = [dict(mine) for _ in range(4)]
    shares = share(claims)

    def written(rank: int, kind: str) -> int:
        found = {name: rows for name, rows in shares[rank].items() if name.startswith(kind)}
        return nbytes(claims, [found], 0)

    for kind in ("adapter", "base"):
        sizes = [written(rank, kind) for rank in range(4)]
        assert sum(sizes) == sum(c.row_bytes * c.box.row_count for name, c in mine.items() if name.startswith(kind))
        assert max(sizes) <= 1.1 * sum(sizes) / 4, (kind, sizes)
    assert [Claim.load(claim.dump()) for claim in mine.values()] == list(mine.values())
