"""What retention may remove, for any run: a property test against the promises, and the order of a removal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.storage.format.manifest import Manifest, RecordRef
from stepwell.storage.store import files
from stepwell.storage.store.catalog import Entry, scan
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.retention import left_over, remove_checkpoint, surplus
from stepwell.types import CheckpointId, Keep
from tests.restore.build import RunBuilder

KINDS = ["good", "suspect", "damaged", "uncommitted"]


def entry(step: int, kind: str, *, is_live: bool = True, name: str | None = None, epoch_end: bool = False) -> Entry:
    id = CheckpointId(step, 0, 1)
    manifest = None
    if kind in ("good", "suspect"):
        manifest = Manifest(
            run="0" * 16, id=id, world_size=1, created=0.0, records=(RecordRef("r", 1, "0" * 32),), nbytes=1,
            suspect="x" if kind == "suspect" else None, name=name, epoch_end=epoch_end,
        )  # fmt: skip
    return Entry(id, Path(id.directory), manifest, "broken" if kind == "damaged" else None, is_live)


ENTRIES = st.lists(
    st.builds(
        entry,
        st.integers(0, 60),
        st.sampled_from(KINDS),
        is_live=st.sampled_from([True, True, True, False]),
        name=st.sampled_from([None, None, None, "best"]),
        epoch_end=st.booleans(),
    ),
    max_size=14,
    unique_by=lambda item: item.id,
).map(lambda items: sorted(items, key=lambda item: item.id, reverse=True))
KEEPS = st.builds(Keep, last=st.integers(2, 4), every=st.sampled_from([None, 1, 5, 20]), epochs=st.booleans())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ENTRIES, KEEPS)
def test_promises(entries: Sequence[Entry], keep: Keep) -> None:
    gone = {item.id for item, _ in surplus(entries, keep)}
    good = [item for item in entries if item.is_live and item.manifest and not item.manifest.suspect]
    for item in good[: max(2, keep.last)]:
        assert item.id not in gone, "one of the newest good ones"
    for item in entries:
        if item.manifest is not None and item.manifest.name is not None:
            assert item.id not in gone, "a named one"
        if item in good and keep.every and item.id.step % keep.every == 0:
            assert item.id not in gone, "an every-th one"
        if item in good and keep.epochs and item.manifest and item.manifest.epoch_end:
            assert item.id not in gone, "an epoch's end"
        if not item.is_committed:
            assert item.id not in gone, "not committed: maybe being written right now"
    if len(good) < keep.last:
        assert not gone, "nothing goes before enough good ones stand"
    else:
        left = [item for item in entries if item.is_committed and item.id not in gone]
        assert not [item for item in left if item.damage], "damaged ones go"
        unnamed = [item for item in left if item.manifest and not item.manifest.name]
        assert not [item for item in unnamed if not item.is_live], "abandoned ones go"
        plain = [item for item in unnamed if item in good]
        if not keep.every and not keep.epochs:
            assert len(plain) <= keep.last
        assert len([item for item in unnamed if item.manifest and item.manifest.suspect]) <= 1


def test_suspect_ones_do_not_count() -> None:
    entries = [entry(5, "suspect"), entry(4, "suspect"), entry(3, "good"), entry(2, "good"), entry(1, "good")]
    assert [(item.id.step, why) for item, why in surplus(entries, Keep())] == [
        (4, "suspect, and a newer suspect one is kept"),
        (1, "newer ones kept: 2"),
    ]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("void", [None, "rank 1: refused"])
def test_what_is_left_over_of_the_newest_step(world_size: int, void: str | None) -> None:
    """Many ranks number their planned saves apart: what has the smaller number may be taken after them."""
    committed = entry(5, "good")
    assert committed.manifest is not None
    id = CheckpointId(5, 1000, 1)
    committed = replace(committed, id=id, manifest=replace(committed.manifest, id=id, world_size=world_size))
    same_step, older, newer = (
        replace(entry(5, "uncommitted"), void=void),
        entry(4, "uncommitted"),
        entry(6, "uncommitted"),
    )
    is_over = world_size == 1 or void is not None
    assert left_over([newer, committed, same_step, older], 1) == ([same_step] if is_over else []) + [older]


@pytest.mark.parametrize("options", [{"last": 1}, {"last": 0}, {"every": 0}, {"every": -1}])
def test_keep_refuses_what_makes_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Keep(**options)  # type: ignore[arg-type]


def test_a_checkpoint_stops_being_one_before_its_files_go(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "run")
    id = build.write({"x": {"w": torch.ones(2)}}, 1)
    (found,) = scan(build.paths)
    order = []
    real_remove, real_sync = files.remove, files.sync_directory
    with (
        mock.patch.object(files, "remove", lambda path: (order.append(path.name), real_remove(path))),
        mock.patch.object(files, "sync_directory", lambda path: (order.append("sync"), real_sync(path))),
    ):
        remove_checkpoint(found.id, found.path)
    assert order[:2] == ["manifest.json", "sync"]
    assert not build.paths.checkpoint(id).exists()


def test_a_link_in_a_removed_checkpoint_is_removed_not_followed(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "run")
    build.write({"x": 1}, 1)
    outside = tmp_path / "outside"
    outside.write_text("stays")
    (found,) = scan(RunPaths(tmp_path / "run"))
    (found.path / "link").symlink_to(outside)
    remove_checkpoint(found.id, found.path)
    assert outside.read_text() == "stays" and not found.path.exists()


@pytest.mark.parametrize("name", ["remove", "sync_directory", "list_names", "remove_directory"])
@pytest.mark.parametrize("has_chain", [False, True])
def test_one_that_another_process_removes_meanwhile_is_gone(name: str, has_chain: bool, tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "run")
    id = build.write({"x": {"w": torch.ones(2)}}, 1)
    (found,) = scan(build.paths)
    chain = tmp_path / "run" / "chains" / id.directory
    if has_chain:
        chain.mkdir(parents=True)
        (chain / "chain.json").touch()
    real, calls = getattr(files, name), 0

    def first_somebody_else(path: Path) -> object:
        nonlocal calls
        calls += 1
        shutil.rmtree(found.path, ignore_errors=True)
        shutil.rmtree(chain, ignore_errors=True)
        return real(path)

    with mock.patch.object(files, name, first_somebody_else):
        remove_checkpoint(found.id, found.path)
    assert calls and not found.path.exists() and not chain.exists()


def test_what_cannot_be_removed_and_is_still_there_is_an_error(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "run")
    build.write({"x": 1}, 1)
    (found,) = scan(build.paths)
    with mock.patch.object(files, "remove_directory", side_effect=FileNotFoundError), pytest.raises(FileNotFoundError):
        remove_checkpoint(found.id, found.path)
