"""Any byte flipped, any file cut, removed or replaced in the newest checkpoint: found, named, the older one used.

Every byte position of every file of a small checkpoint is tried (by `make test` every third, but for the manifest):
of manifest and record through the whole `reopen`, of the shard files through the verified read, and every sixteenth
of them through `reopen` too (what it does with a damaged file does not depend on where the damage is). Only the
lineage that each restore would create is left out: thousands of them would be a test of lineages. The control takes
the checksum of the blocks away, and wrong values come through.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
import stepwell.restore.open_run
from stepwell.errors import DamagedError, RestoreError
from stepwell.events.journal import read_events
from stepwell.restore import byte_sources, verified_read
from stepwell.storage.format.manifest import Lineage
from stepwell.storage.format.record import FileEntry
from stepwell.storage.store.catalog import read_record
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep
from tests.ranks.conftest import soak
from tests.restore.build import RunBuilder, damage_events, restore, restore_only
from tests.training.state.same import difference

NOTES = b"a file of the user's own"


def state(step: int) -> dict[str, Any]:
    return {
        "values": {
            "weight": torch.arange(6.0) + step,
            "frozen": torch.arange(3) + step,
            "half": torch.full((3,), step, dtype=torch.bfloat16),
            "note": [step, "text", (1.5, None)],
        }
    }


class Target:
    """A run with two checkpoints; the newest one is the victim."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.build = RunBuilder(root)
        notes = root.parent / "notes"
        notes.write_bytes(NOTES)
        for step in (2, 3):
            # The run's own state is left tiny: with `only=` it is not asked for, and every byte counts.
            self.build.write(
                state(step), step, frozen=["values/frozen"], own={"tiny": step}, files={"notes": str(notes)}
            )
        self.newest = self.build.paths.checkpoint(CheckpointId(3, 0, 1))

    def files(self) -> list[Path]:
        return sorted(self.newest.iterdir())

    def restored(self) -> tuple[int, dict[str, Any]]:
        """The step and values a restart gets, in a fresh object."""
        values: dict[str, Any] = {}
        assert restore_only(self.root, {"values": values}, only={"values"})
        steps = [event["step"] for event in read_events(self.build.paths.events) if event["kind"] == "restore"]
        return steps[-1], values

    def assert_falls_back(self, path: Path) -> None:
        """The damage to `path` is reported by name, and the checkpoint before it is used, whole."""
        self.forget_events()
        step, values = self.restored()
        assert step == 2, f"{path.name}: step {step}"
        assert difference(values, state(2)["values"]) is None
        (event,) = damage_events(self.root)
        assert event["directory"] == self.newest.name
        assert path.name in event["reason"], event["reason"]

    def forget_events(self) -> None:
        self.build.paths.events.unlink(missing_ok=True)

    def assert_read_fails(self, file: FileEntry, path: Path) -> None:
        """The verified read of the file stops, by name."""
        with pytest.raises(DamagedError, match=re.escape(str(path))):
            source = byte_sources.FileSource(path)
            try:
                verified_read.read_file(source, file, [], lambda *_: None, check_all=True)
            finally:
                source.close()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    def create_next(paths: RunPaths, *, parent: int, step: int, lossy: str | None, keep: Keep | None) -> Lineage:
        assert lossy is None
        return Lineage(number=2, parent=parent, step=step, created=0.0, host="none")

    monkeypatch.setattr(stepwell.restore.open_run, "create_next", create_next)
    return Target(tmp_path / "run")


@pytest.fixture
def quick(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Restores of `only=` read the blocks they need: here they read the user's file too, as a whole restore does."""
    real = verified_read.read_record_leaves

    def all_files(record: Any, open_source: Any, wanted: Any, deliver: Any) -> int:
        return real(record, open_source, None, deliver)

    monkeypatch.setattr("stepwell.restore.load.read_record_leaves", all_files)
    return target


NAMES = [
    "manifest.json",
    "rank-00000.file.notes",
    "rank-00000.frozen.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
]


def test_the_victim_has_these_files_and_is_the_first_choice(target: Target) -> None:
    assert [path.name for path in target.files()] == NAMES
    step, values = target.restored()
    assert step == 3 and difference(values, state(3)["values"]) is None
    assert damage_events(target.root) == []


def flips(path: Path) -> Iterator[tuple[int, int]]:
    """Every byte position, with a bit that goes through all eight as the position goes on."""
    for position in range(path.stat().st_size):
        yield position, 1 << (position * 5 + 3) % 8


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize(
    ("name", "apart"), [case for name in NAMES for case in ((name, 1 if name == "manifest.json" else 3), soak(name, 1))]
)
def test_every_flipped_byte_is_found(quick: Target, name: str, apart: int) -> None:
    path = quick.newest / name
    whole = path.read_bytes()
    record = read_record(quick.build.paths, quick.build.manifest(CheckpointId(3, 0, 1)))
    for position, bit in flips(path):
        if position % apart:
            continue
        flip(path, position, bit)
        if name.endswith(".json") or position % 16 == 0:
            quick.assert_falls_back(path)
        else:
            quick.assert_read_fails(next(file for file in record.files if file.name == name), path)
        flip(path, position, bit)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("bit", [1 << shift for shift in range(8)])
def test_every_bit_of_some_bytes_is_found(quick: Target, bit: int) -> None:
    for path in quick.files():
        for position in range(0, path.stat().st_size, 997):
            flip(path, position, bit)
            quick.assert_falls_back(path)
            flip(path, position, bit)


def test_control_without_the_block_checksum_wrong_values_come_through(
    quick: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_read, "_check", lambda *_: None)
    path = quick.newest / "rank-00000.safetensors"
    flip(path, path.stat().st_size - 1, 4)
    with pytest.raises(AssertionError, match="step 3"):
        quick.assert_falls_back(path)
    _, values = quick.restored()
    assert difference(values, state(3)["values"]) is not None


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_found(quick: Target, name: str) -> None:
    path = quick.newest / name
    whole = path.read_bytes()
    lengths = {*range(64), *range(0, len(whole), 61), *range(len(whole) - 30, len(whole)), 4095, 4096}
    for length in sorted(lengths):
        if 0 <= length < len(whole):
            path.write_bytes(whole[:length])
            quick.assert_falls_back(path)
    for extra in (b"\0", b" ", whole[:1], b"\n", bytes(5000)):
        path.write_bytes(whole + extra)
        quick.assert_falls_back(path)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    """To a perfect copy of itself outside: still refused."""
    outside = path.parents[2] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swap_with_older(path: Path) -> None:
    older = path.parents[1] / "step-000000000002.l0001" / path.name
    shutil.copyfile(older, path)


REPLACEMENTS: dict[str, Callable[[Path], None]] = {
    "directory": replace_by_directory,
    "link": replace_by_link,
    "fifo": replace_by_fifo,
    "older": swap_with_older,
    "missing": Path.unlink,
}


# The user's file is the same in both checkpoints: replacing it by the older one changes nothing.
REPLACED = [(name, how) for name in NAMES for how in REPLACEMENTS if (name, how) != ("rank-00000.file.notes", "older")]


@pytest.mark.parametrize(("name", "how"), REPLACED)
def test_every_replaced_file_is_found(quick: Target, name: str, how: str) -> None:
    path = quick.newest / name
    REPLACEMENTS[how](path)
    if (name, how) == ("manifest.json", "missing"):  # a checkpoint exists if and only if its manifest does
        assert quick.restored()[0] == 2 and damage_events(quick.root) == []
    else:
        quick.assert_falls_back(path)


def test_files_that_do_not_belong_change_nothing(target: Target) -> None:
    (target.newest / "rank-00000.safetensors.tmp").write_bytes(b"half")
    (target.newest / "stray").mkdir()
    (target.root / "step-9.l1").mkdir()
    (target.root / "step-000000000009.l0001").symlink_to(target.newest)
    (target.root / "step-000000000008.l0001").write_bytes(b"a file")
    assert target.restored()[0] == 3


# -- the whole run, its own state included --------------------------------------------------------------------------


class Full(Target):
    """Two checkpoints as a real run writes them, with generators, and a module to fill in place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.build = RunBuilder(root)
        for step in (2, 3):
            self.build.write({"model": net(step).state_dict()}, step)
        self.newest = self.build.paths.checkpoint(CheckpointId(3, 0, 1))

    def restored(self) -> tuple[int, dict[str, Any]]:
        model = net(0)
        found = restore(self.root, {"model": model})
        assert found.restored is not None and found.own is not None and found.own["step"] == found.restored.step
        assert difference(model.state_dict(), net(found.restored.step).state_dict()) is None
        return found.restored.step, state(found.restored.step)["values"]


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


@pytest.mark.parametrize("apart", [997, soak(211)])
def test_a_flipped_byte_anywhere_in_a_whole_checkpoint(target: Target, tmp_path: Path, apart: int) -> None:
    full = Full(tmp_path / "full")
    assert full.restored()[0] == 3
    for path in full.files():
        for position in range(0, path.stat().st_size, apart):
            flip(path, position, 1 << position % 8)
            full.assert_falls_back(path)
            flip(path, position, 1 << position % 8)


def test_when_every_checkpoint_is_damaged_it_is_an_error_that_names_each(target: Target) -> None:
    for id in target.root.glob("step-*"):
        flip(id / "rank-00000.safetensors", 4100, 1)
    with pytest.raises(RestoreError) as caught:
        target.restored()
    for step in (2, 3):
        assert f"step-00000000000{step}.l0001/rank-00000.safetensors" in str(caught.value)


def test_when_every_manifest_is_damaged_it_is_an_error_that_names_each(target: Target) -> None:
    for id in target.root.glob("step-*"):
        flip(id / "manifest.json", 10, 1)
    with pytest.raises(RestoreError) as caught:
        target.restored()
    assert str(caught.value).count("manifest.json: checksum") == 2


@pytest.mark.parametrize(("bit", "apart"), [(64, 5), soak(64, 1), soak(1, 1)])
def test_flipped_bytes_of_the_run_and_its_lineage_are_found(
    target: Target, tmp_path: Path, bit: int, apart: int
) -> None:
    """These belong to all checkpoints alike: nothing is restored on a history that cannot be read."""
    full = Full(tmp_path / "full")
    full.build.fork(step=3)
    assert full.restored()[0] == 3
    for path in (full.build.paths.run, full.build.paths.lineage(2)):
        for position in range(0, path.stat().st_size, apart):
            flip(path, position, bit)
            with pytest.raises((DamagedError, RestoreError), match=path.name):
                full.restored()
            flip(path, position, bit)
    flip(full.build.paths.lineage(1), 9, bit)  # the root of the path: nothing lies behind it
    assert full.restored()[0] == 3


def test_a_frozen_file_that_checkpoints_share_takes_them_all_with_it_by_name(run_dir: Path) -> None:
    """The price of storing by reference (docs/guarantees.md): nothing older is left to use, and nothing wrong is."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with stepwell.Checkpointer(run_dir, policy=stepwell.Never(), model=model, optimizer=optimizer) as ckpt:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.save().wait(60)
    shared = sorted(run_dir.glob("step-*/rank-00000.frozen.safetensors"))
    assert len(shared) == 2 and shared[0].samefile(shared[1])
    flip(shared[0], 4097, 1)
    with pytest.raises(RestoreError) as caught:
        restore(run_dir, {"model": model, "optimizer": optimizer})
    assert all(str(path) in str(caught.value) for path in shared)
