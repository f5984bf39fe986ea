"""Who stores what: a pure function of what all ranks say they hold."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.ranks import rank_sets, sharing
from stepwell.ranks.claims import NO_DIGEST, Claims, Form, Heard, Listener
from stepwell.ranks.share_verdict import Shares, ShareVerdict
from stepwell.storage.format.box import Box, is_covered
from stepwell.storage.format.checksum import block_digest
from tests.ranks import oracle
from tests.ranks.oracle import Claim

Held = list[dict[str, Claim]]
DTYPES = ("float32", "bfloat16", "int64")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int64": 8}


def told(mine: dict[str, Claim]) -> Claims:
    """What a rank says."""
    return Claims.of({name: (form_of(claim), digest_of(claim)) for name, claim in mine.items()})


def form_of(claim: Claim) -> Form:
    return Form(claim.dtype, claim.global_shape, claim.box, claim.mesh, claim.is_still)


def digest_of(claim: Claim) -> bytes:
    return bytes.fromhex(block_digest(claim.digest.encode())) if claim.digest else NO_DIGEST


def heard(claims: Held) -> list[Heard]:
    """What rank 0 makes of the messages of all ranks."""
    listener = Listener()
    return [listener.hear(json.loads(json.dumps(told(mine).dump()))) for mine in claims]


def share(claims: Held) -> list[Shares]:
    """What each rank makes of its message from rank 0."""
    verdicts = sharing.share(heard(claims))
    messages = [json.loads(json.dumps(verdict.dump())) for verdict in verdicts]
    return [
        ShareVerdict.load(message).rows(told(mine), rank)
        for rank, (message, mine) in enumerate(zip(messages, claims, strict=True))
    ]


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


def stored(claims: Held, shares: list[Shares], name: str) -> list[Box]:
    """The boxes of a leaf that the ranks store for all."""
    found = []
    for mine, verdict in zip(claims, shares, strict=True):
        if name in verdict:
            first, last, _ = verdict[name]
            if first < last:
                found.append(mine[name].box.rows(first, last))
    return found


def nbytes(claims: Held, shares: list[Shares], rank: int) -> int:
    total = 0
    for name, (first, last, _) in shares[rank].items():
        claim = claims[rank][name]
        total += form_of(claim).row_bytes * (last - first)
    return total


@settings(deadline=None)
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
    row = max(form_of(claim).row_bytes for claim in mine.values())
    assert max(sizes) - min(sizes) <= 2 * row, "each cut is off by less than one row"
    label = rank_sets.label(range(world)) if world > 1 else ""
    assert all(shared[2] == label for verdict in shares for shared in verdict.values())


@settings(deadline=None)
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
def test_what_is_not_the_same_stays_each_ranks_own(claims: Held) -> None:
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


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_the_verdict_does_not_depend_on_the_order_of_leaves(seed: int) -> None:
    names = [f"leaf{number}" for number in range(6)]
    made = {name: whole((3, number + 1), "same") for number, name in enumerate(names)}
    chance = random.Random(seed)
    claims = [{name: made[name] for name in chance.sample(names, len(names))} for _ in range(3)]
    assert share(claims) == share([made] * 3)


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
        assert sum(sizes) == sum(
            form_of(c).row_bytes * c.box.row_count for name, c in mine.items() if name.startswith(kind)
        )
        assert max(sizes) <= 1.1 * sum(sizes) / 4, (kind, sizes)


# -- compared with the verdict as it was first written -----------------------------------------------------------------

SHAPES = [(), (1,), (6,), (4, 3), (5, 2), (0, 2)]


@st.composite
def jobs(draw: st.DrawFn) -> Held:
    """Few shapes, boxes, meshes and contents, so that ranks agree in part, over up to nine ranks."""
    world = draw(st.integers(1, 9))
    job: Held = [{} for _ in range(world)]
    for number in range(draw(st.integers(0, 6))):
        shape = draw(st.sampled_from(SHAPES))
        shards = draw(st.integers(1, 4))
        odd = draw(st.sampled_from(["nothing", "nothing", "content", "still", "mesh", "type", "shape", "missing"]))
        for rank in range(world):
            index = draw(st.integers(0, shards - 1)) if draw(st.booleans()) else rank % shards
            claim = rows(shape, index, shards) if shards > 1 and shape else whole(shape, "same")
            is_odd = draw(st.integers(0, 3)) == 0
            if odd == "missing" and is_odd:
                continue
            changes = {
                "content": {"digest": draw(st.sampled_from("abc"))},
                "still": {"is_still": True},
                "mesh": {"mesh": "other"},
                "type": {"dtype": "int64"},
                "shape": {"global_shape": (7, *shape[1:])} if shape else {},
            }
            job[rank][f"leaf{number}"] = replace(claim, **(changes.get(odd, {}) if is_odd else {}))
    return job


def plain(shares: list[Shares]) -> list[dict[str, tuple[int, int, tuple[int, ...]]]]:
    """With sets of ranks as numbers, however they are written."""
    return [
        {name: (first, last, tuple(rank_sets.read(who)) if who else ()) for name, (first, last, who) in mine.items()}
        for mine in shares
    ]


def by_commas(shares: list[Shares]) -> list[dict[str, tuple[int, int, tuple[int, ...]]]]:
    return [
        {
            name: (first, last, tuple(map(int, who.split(","))) if who else ())
            for name, (first, last, who) in mine.items()
        }
        for mine in shares
    ]


@settings(deadline=None)
@given(jobs())
def test_the_verdict_is_the_one_of_the_first_version(claims: Held) -> None:
    assert plain(share(claims)) == by_commas(oracle.share(claims))


def test_control_a_verdict_that_does_not_look_at_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [{"w": whole((4,), "a"), "v": whole((4,), "same")}, {"w": whole((4,), "b"), "v": whole((4,), "same")}]
    assert plain(share(claims)) == by_commas(oracle.share(claims))
    monkeypatch.setattr(sharing, "_is_equal", lambda texts, index: True)
    assert plain(share(claims)) != by_commas(oracle.share(claims))


def test_content_that_nobody_looked_at_is_equal_to_nothing() -> None:
    claims = [{"w": whole((4,), ""), "v": whole((4,), "same")} for _ in range(2)]
    assert share(claims) == [{"v": (0, 2, "0-1")}, {"v": (2, 4, "0-1")}]
    parts = [{"w": rows((8, 2), index, 2, "")} for index in range(2)]
    assert share(parts) == [{"w": (0, 4, "")}, {"w": (0, 4, "")}], "each the only one that has its part"


def test_partners_are_who_stores_something_of_what_a_rank_holds() -> None:
    half = {"w": whole((8,)), "own": whole((4,), "a")}
    claims = [half, half, {"w": whole((8,)), "own": whole((4,), "b")}]
    assert [verdict.partners for verdict in sharing.share(heard(claims))] == [[0, 1, 2]] * 3
    drifted = [{"w": rows((4, 2), index, 2, f"{copy}")} for copy in range(2) for index in range(2)]
    assert [verdict.partners for verdict in sharing.share(heard(drifted))] == [[], [], [0], [1]]
    many = sharing.share(heard([{"w": whole((1280,))}] * 1000))
    assert len(many[999].partners) == 64 and 999 not in many[999].partners, "those that store, not those that hold"


# -- thousands of ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "storing"), [(64, 64), (65, 64), (1000, 64)])
def test_at_most_so_many_ranks_store_parts_of_one_set(world: int, storing: int) -> None:
    """And the others still say what they hold, so that drift is seen on all of them."""
    mine = {"w": whole((1280, 2)), "b": whole((640,))}
    claims = [mine] * world
    shares = share(claims)
    for name, claim in mine.items():
        assert is_covered(Box.whole(claim.global_shape), stored(claims, shares, name))
    sizes = [nbytes(claims, shares, rank) for rank in range(world)]
    assert sum(map(bool, sizes)) == storing and max(sizes) <= 1.1 * sum(sizes) / storing
    assert {verdict["w"][2] for verdict in shares} == {rank_sets.label(range(world))}
    if world == 64:
        assert plain(shares) == by_commas(oracle.share(claims))


def test_the_cap_spreads_over_each_set() -> None:
    """Eight shards of 128 copies each: each set has its own 64."""
    claims = [{"w": rows((4096, 4), rank % 8, 8)} for rank in range(1024)]
    shares = share(claims)
    assert is_covered(Box.whole((4096, 4)), stored(claims, shares, "w"))
    storing = [rank for rank, mine in enumerate(shares) if mine["w"][0] < mine["w"][1]]
    assert len(storing) == 512 and all(sum(rank % 8 == shard for rank in storing) == 64 for shard in range(8))
    assert {mine["w"][2] for mine in shares} == {f"{shard}-{1016 + shard}/8" for shard in range(8)}


def test_control_without_a_cap_all_of_them_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sets, "MOST_STORING", 10**6)
    claims = [{"w": whole((1280, 2))}] * 1000
    shares = share(claims)
    assert len(stored(claims, shares, "w")) == 1000
    assert plain(shares) == by_commas(oracle.share(claims))


def test_equal_ranks_say_and_hear_the_same_once() -> None:
    shared, each = {f"leaf{number}": whole((8, number % 5 + 1)) for number in range(100)}, 512
    found = heard([dict(shared) for _ in range(each)])
    assert len({id(part) for claims in found for part in claims}) == 5, "names, forms, column, boxes and digests"
    assert len({id(verdict) for verdict in sharing.share(found)}) == 1
    sharded = heard([{f"leaf{n}": rows((each, n % 5 + 1), rank, each, "") for n in range(100)} for rank in range(each)])
    assert len({id(verdict) for verdict in sharing.share(sharded)}) == 1, "each rank stores all that it has"


@pytest.mark.parametrize(
    "change",
    [{"names": "AAAA"}, {"column": "!"}, {"digests": ""}, {"forms": "eJyLjgUAARUAuQ=="}],
    ids=["not packed", "not text", "empty", "no forms"],
)
def test_claims_that_are_none_are_refused(change: dict[str, str]) -> None:
    message = told({"w": whole((4,))}).dump()
    assert Listener().hear(message).names == ("w",)
    with pytest.raises(ValueError):
        Listener().hear({**message, **change})


def test_a_verdict_on_other_leaves_is_refused() -> None:
    (verdict,) = sharing.share(heard([{"w": whole((4,))}]))
    with pytest.raises(ValueError, match="a verdict on 1 leaves for a rank that has 2"):
        verdict.rows(told({"w": whole((4,)), "v": whole((4,))}), 0)
