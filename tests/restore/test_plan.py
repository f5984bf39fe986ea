"""Which checkpoint a restart uses, and why not the others."""

from __future__ import annotations

from pathlib import Path

from stepwell.restore.preference import choose
from stepwell.storage.format.manifest import Manifest, RecordRef
from stepwell.storage.store.catalog import Entry
from stepwell.types import CheckpointId


def entry(
    step: int, *, kind: str = "good", is_live: bool = True, repeat: int = 0, why_not_live: str | None = None
) -> Entry:
    id = CheckpointId(step, repeat, 1)
    suspect = "1 non-finite, first w" if kind == "suspect" else None
    manifest = Manifest(
        run="0" * 16, id=id, world_size=1, created=0.0, records=(RecordRef("r", 1, "0" * 32),), nbytes=1,
        suspect=suspect,
    )  # fmt: skip
    whole = manifest if kind in ("good", "suspect") else None
    return Entry(id, Path(id.directory), whole, "broken" if kind == "damaged" else None, is_live, why_not_live)


def order(entries: list[Entry], **wishes: int) -> list[tuple[int, int]]:
    return [(c.entry.id.step, c.entry.id.repeat) for c in choose(entries, **wishes) if c.rank is not None]


def reasons(entries: list[Entry], **wishes: int) -> dict[int, str]:
    return {choice.entry.id.step: choice.reason for choice in choose(entries, **wishes)}


def test_newest_first_and_the_later_save_of_a_step_before_the_earlier() -> None:
    entries = [entry(1), entry(3), entry(2), entry(3, repeat=1)]
    assert order(entries) == [(3, 1), (3, 0), (2, 0), (1, 0)]


def test_suspect_ones_come_last() -> None:
    entries = [entry(5, kind="suspect"), entry(4, kind="suspect"), entry(3), entry(2)]
    assert order(entries) == [(3, 0), (2, 0), (5, 0), (4, 0)]
    said = reasons(entries)
    assert said[3] == "newest good checkpoint, newer ones are suspect: 2"
    assert "suspect: 1 non-finite" in said[5]


def test_what_is_never_used_and_why() -> None:
    lost = "not known to belong to the path of this run: lineage/0002.json: checksum"
    entries = [
        entry(5, kind="uncommitted"),
        entry(4, kind="damaged"),
        entry(3, is_live=False),
        entry(2, is_live=False, why_not_live=lost),
        entry(1),
    ]
    assert order(entries) == [(1, 0)]
    said = reasons(entries)
    assert said[5].startswith("not committed") and said[4] == "damaged: broken"
    assert said[3].startswith("abandoned branch") and said[2] == lost and said[1].startswith("newest good")


def test_a_named_step_is_taken_even_from_an_abandoned_branch() -> None:
    entries = [entry(3), entry(2, is_live=False), entry(2, repeat=1, kind="damaged")]
    assert order(entries, step=2) == [(2, 0)]
    assert order(entries, step=9) == []
    assert reasons(entries, step=2)[3] == "step 2 was asked for"


def test_before_goes_further_back() -> None:
    entries = [entry(4), entry(3, kind="suspect"), entry(2), entry(1, is_live=False)]
    assert order(entries, before=4) == [(2, 0), (3, 0)]
    assert reasons(entries, before=4)[4] == "not before step 4"


def test_nothing() -> None:
    assert choose([]) == []
