"""Which nodes may be lost: every subset, against theory, to the byte; and bits that flip on the way."""

from __future__ import annotations

import os
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from stepwell.levels.level_spec import Pairs, Partner, ReedSolomon, Single, Xor
from tests.levels.field import NEW, OLD, Field
from tests.ranks.conftest import soak

NAMES = "abcdefghi"
SCHEMES = {
    "single": lambda n: Single(),
    "pairs": lambda n: Pairs(),
    "partner": lambda n: Partner(),
    "xor": lambda n: Xor(n),
    "rs2": lambda n: ReedSolomon(n, 2),
    "rs3": lambda n: ReedSolomon(n, 3),
}
LOSSES = {"single": 0, "pairs": 1, "partner": 1, "xor": 1, "rs2": 2, "rs3": 3}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here is about power


def layouts(n: int) -> dict[str, str]:
    """Which rank sits on which node: one each, two each, and unevenly many."""
    return {
        "one": NAMES[:n],
        "two": "".join(name * 2 for name in NAMES[:n]),
        "uneven": "".join(name * (1 + at % 3) for at, name in enumerate(NAMES[:n])),
    }


def matrix() -> list[Any]:
    cases = []
    for n in range(4, 10):
        for layout in layouts(n):
            for scheme in SCHEMES:
                short = (n == 4 and layout == "one") or (n, layout, scheme) == (5, "uneven", "pairs")
                case = (n, layout, scheme)
                cases.append(pytest.param(*case, id=f"{n}-{layout}-{scheme}") if short else soak(*case))
    return cases


@pytest.mark.parametrize(("n", "layout", "scheme"), matrix())
def test_every_loss_of_nodes_is_survived_exactly_when_theory_says_so(
    n: int, layout: str, scheme: str, tmp_path: Path
) -> None:
    domains = layouts(n)[layout]
    whole = Field(tmp_path / "whole", domains, SCHEMES[scheme](n))
    whole.build()
    world, outcomes = len(domains), []
    for count in range(LOSSES[scheme] + 2):
        for lost in combinations(sorted(set(domains)), count):
            field = whole.copy(tmp_path / "job")
            field.lose(lost)
            seats = [
                "x" if node in lost else node for node in reversed(domains)
            ]  # other ranks than before, and a spare
            restart = field.restart(seats, lambda rank, part: part in ((rank + 1) % world, world - 1 - rank))
            outcomes.append(field.is_recoverable(lost))
            field.check(restart, NEW if outcomes[-1] else None)
            assert not list(field.folder.rglob("*.tmp"))
            shutil.rmtree(field.folder)
    assert outcomes[0] and not all(outcomes), "both were seen"


def kinds(field: Field, node: str) -> dict[str, Path]:
    """One file of each kind on a node, of the newest checkpoint."""
    found: dict[str, Path] = {}
    mine = f"rank-{field.domains.index(node):05d}"
    for path in sorted((field.cache(node) / NEW.directory).iterdir()):
        whose = "own" if path.name.startswith(mine) else "other"
        kind = "parity" if path.name.startswith("parity-") else whose
        if path.stat().st_size:
            found.setdefault(f"{kind} {path.suffix[1:]}", path)
    return found


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def flips() -> list[Any]:
    return [
        case if case in (("pairs", 1), ("xor", 0), ("rs2", 1)) else soak(*case)
        for scheme in SCHEMES
        for lost in range(LOSSES[scheme] + 1)
        for case in [(scheme, lost)]
    ]


@pytest.mark.parametrize(("scheme", "lost"), flips())
def test_a_flipped_bit_is_made_good_or_refused_and_spoils_nothing(scheme: str, lost: int, tmp_path: Path) -> None:
    """In any file of a node, with other nodes lost beside it: as good as one loss more, or the older checkpoint."""
    whole = Field(tmp_path / "whole", "abcd", SCHEMES[scheme](4))
    whole.build()
    expected = {"own safetensors", "own json"} | ({"other safetensors"} if scheme in ("pairs", "partner") else set())
    expected |= {"parity bin", "parity json", "other record"} if scheme.startswith(("xor", "rs")) else set()
    assert expected <= set(kinds(whole, "b")), kinds(whole, "b")
    for kind in sorted(kinds(whole, "b")):
        for at in (0.1, 0.5):
            field = whole.copy(tmp_path / "job")
            gone = "cda"[:lost]
            field.lose(gone)
            flip(kinds(field, "b")[kind], at)
            seats = "badc" if at == 0.5 else "abcd"  # elsewhere, or where the damage is
            restart = field.restart(["x" if node in gone else node for node in seats])
            as_lost = field.is_recoverable(["b", *gone])
            is_needed = kind.startswith("own") or kind.endswith(("bin", "json")) or lost
            field.check(restart, NEW if as_lost or not is_needed else restart.id or OLD)
            shutil.rmtree(field.folder)


@pytest.mark.parametrize("scheme", ["pairs", "xor", soak("partner"), soak("rs2")])
def test_after_a_restart_what_was_damaged_is_right_again(scheme: str, tmp_path: Path) -> None:
    """Then any node may be lost, as before: the one that had the damage, or the one it was read from."""
    whole = Field(tmp_path / "whole", "abcd", SCHEMES[scheme](4))
    whole.build()
    whole.decide(NEW)
    for kind in ("own safetensors", "own json"):
        for lost in "ab":
            field = whole.copy(tmp_path / "job")
            flip(kinds(field, "b")[kind], 0.3)
            field.check(field.restart("abcd"), NEW)
            field.rehold(NEW)
            field.lose(lost)
            again = field.restart([node.replace(lost, "x") for node in "abcd"])
            field.check(again, NEW)
            assert not again.tried, again.trouble
            shutil.rmtree(field.folder)


class Anything(str):
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


@pytest.mark.parametrize("lost", ["", "c"])
def test_control_without_checksums_a_flipped_bit_gets_through(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("restore.verified_read", "storage.store.blocks"):
        monkeypatch.setattr(f"stepwell.{module}.block_digest", lambda data: Anything())
    field = Field(tmp_path, "abcd", Xor(4))
    field.build()
    field.lose(lost)
    flip(kinds(field, "b")["own safetensors"], 0.1)
    with pytest.raises(AssertionError, match="read other bytes of part"):
        field.check(field.restart(["x" if node in lost else node for node in "abcd"]), NEW)


def test_ranks_that_drifted_apart_are_no_checkpoint_even_if_nobody_lived_to_say_so(tmp_path: Path) -> None:
    """Rank 0 finds that out when it has all records; here all died before it did."""
    field = Field(tmp_path, "abcd", Pairs())
    field.build(copies=lambda rank: {"0,1,2,3": "another" if rank == 2 else "the same"})
    restart = field.restart("abcd")
    field.check(restart, None)
    assert all("tensors that were the same" in text for text in restart.trouble), restart.trouble
