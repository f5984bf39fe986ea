"""Back into live objects: in place, with every mismatch by name, and from a directory that was copied or moved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.errors import ConfigError, RestoreError, StateError
from stepwell.restore.byte_sources import FileSource
from stepwell.restore.load import load
from stepwell.restore.whole import Part
from stepwell.storage.format.record import Record
from stepwell.training.state.tracked import track
from tests.restore.build import RunBuilder, damage_events, restore, restore_only
from tests.training.state.same import difference


def net(seed: int, width: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def build(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run")


def addresses(model: torch.nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_modules_and_optimizers_are_filled_in_place(build: RunBuilder) -> None:
    model, optimizer = trained(1)
    build.write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 2)
    other, its = trained(2)
    before, moments = addresses(other), [state["exp_avg"].data_ptr() for state in its.state.values()]
    found = restore(build.root, {"model": other, "optimizer": its})
    assert found.own is not None and found.own["step"] == 2
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(its.state_dict(), optimizer.state_dict()) is None
    assert addresses(other) == before, "no second copy of the model"
    assert [state["exp_avg"].data_ptr() for state in its.state.values()] == moments


def test_a_fresh_optimizer_gets_its_state(build: RunBuilder) -> None:
    model, optimizer = trained(1)
    build.write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 2)
    other = net(2)
    its = torch.optim.Adam(other.parameters())
    restore(build.root, {"model": other, "optimizer": its})
    assert difference(its.state_dict(), optimizer.state_dict()) is None


def test_every_mismatch_is_listed_in_one_error_and_nothing_is_changed(build: RunBuilder) -> None:
    model = net(1)
    build.write({"model": model.state_dict(), "gone": {"a": 1}}, 1)
    other = net(2, width=5)
    other.register_buffer("extra", torch.zeros(1))
    other[2].double()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(StateError) as caught:
        restore(build.root, {"model": other, "new": {}})
    text = str(caught.value)
    for line in (
        "gone: in the checkpoint, but not tracked",
        "new: tracked, but not in the checkpoint",
        "model/extra: missing in the checkpoint",
        "model/0.weight: shape (4, 3) in the checkpoint, (5, 3) live",
        "model/2.bias: float32 in the checkpoint, float64 live",
    ):
        assert line in text
    assert "restore(strict=False)" in text
    assert difference(dict(other.state_dict()), before) is None


def test_an_unexpected_tensor_is_named(build: RunBuilder) -> None:
    build.write({"model": net(1).state_dict()}, 1)
    with pytest.raises(StateError, match=r"model/2\.weight: unexpected, the live module has no such tensor"):
        restore(build.root, {"model": net(2)[:2]})


def test_not_strict_restores_what_fits(build: RunBuilder) -> None:
    model = net(1)
    build.write({"model": model.state_dict(), "gone": {"a": 1}}, 1)
    other = net(2)
    other[2] = torch.nn.Linear(4, 7)
    kept = other[2].weight.clone()
    found = restore(build.root, {"model": other}, strict=False)
    assert found.restored is not None
    assert torch.equal(other[0].weight, model[0].weight) and torch.equal(other[2].weight, kept)


def test_only_restores_one_object_and_nothing_of_the_run(build: RunBuilder) -> None:
    model, optimizer = trained(1)
    build.write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 5)
    other, its = trained(2)
    before = its.state_dict()
    before_files = sorted(build.root.rglob("*"))
    assert restore_only(build.root, {"model": other, "optimizer": its}, only={"model"})
    assert sorted(build.root.rglob("*")) == before_files
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(its.state_dict(), before) is None
    with pytest.raises(StateError, match="nobody: asked for with only=, but not tracked"):
        restore_only(build.root, {"model": other}, only={"nobody"}, step=5)


def test_step_before_and_suspects(build: RunBuilder) -> None:
    for step in (1, 2, 3, 4):
        build.write({"v": {"n": step}}, step, suspect=step == 4)
    for wishes, expected in (({}, 3), ({"before": 3}, 2), ({"step": 1}, 1), ({"step": 4}, 4)):
        values: dict[str, Any] = {}
        copy = build.root.with_name(f"copy{expected}")
        shutil.copytree(build.root, copy)
        found = restore(copy, {"v": values}, **wishes)
        assert found.restored is not None and found.restored.step == values["n"] == expected
        assert (found.lineage.parent, found.lineage.step) == (1, expected)
    with pytest.raises(RestoreError, match="step 9 was asked for"):
        restore(build.root, {"v": {}}, step=9)
    with pytest.raises(RestoreError, match="not before step 1"):
        restore(build.root, {"v": {}}, before=1)


def test_a_fork_is_continued_and_the_abandoned_branch_never_chosen(build: RunBuilder) -> None:
    for step in (1, 2, 3):
        build.write({"v": {"n": step}}, step)
    restore(build.root, {"v": {}}, step=1)
    values: dict[str, Any] = {}
    found = restore(build.root, {"v": values})  # killed before it saved anything: still on the new branch
    assert found.restored is not None and values["n"] == 1
    build.lineage = found.lineage.number
    build.write({"v": {"n": 20}}, 2)
    found = restore(build.root, {"v": values})
    assert found.restored is not None and str(found.restored) == "step-000000000002.l0003" and values["n"] == 20


def test_a_directory_with_checkpoints_is_not_started_over_by_accident(build: RunBuilder) -> None:
    build.write({"v": {"n": 1}}, 1)
    with pytest.raises(ConfigError, match=r"call ckpt\.restore\(\) before the loop"):
        restore(build.root, {"v": {}}, fresh=True)


def test_nothing_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    found = restore(tmp_path / "new", {"v": {}})
    assert found.restored is None and found.own is None and found.lineage.number == 1


def test_leaves_of_other_devices_come_to_this_one(build: RunBuilder) -> None:
    """A record of a CUDA run on a machine without CUDA; the frozen file too."""
    id = build.write({"v": {"a": torch.arange(3.0), "b": torch.ones(2)}}, 1, frozen=["v/b"])
    directory = build.paths.checkpoint(id)
    record = Record.load((directory / "rank-00000.json").read_bytes(), path="x")
    for device in ("cuda:7", "xla:0", "mps", "nonsense"):
        moved = replace(record, leaves=tuple(replace(leaf, device=device) for leaf in record.leaves))
        values: dict[str, Any] = {}
        objects = track({"v": values})
        load([Part(moved, lambda file: FileSource(directory / file.name))], objects, only=None, strict=True)
        expected = "cuda" if device == "cuda:7" and torch.cuda.is_available() else "cpu"
        assert values["a"].device.type == expected and values["a"].tolist() == [0, 1, 2]


def test_what_load_state_dict_says_is_passed_on(build: RunBuilder) -> None:
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise IndexError("not on a Sunday")

    build.write({"picky": Picky().state_dict()}, 1)
    with pytest.raises(StateError, match="picky: load_state_dict refused the checkpoint: IndexError: not on a Sunday"):
        restore(build.root, {"picky": Picky()})


RESTORE = """
import json, sys
from pathlib import Path
from tests.restore.build import restore
values = {}
found = restore(Path(sys.argv[1]), {"v": values})
print(json.dumps([found.restored.step, values["a"].tolist(), found.run.id]))
"""


@pytest.mark.parametrize("how", ["moved", "copied without links"])
def test_a_moved_or_copied_run_restores_in_another_process(build: RunBuilder, tmp_path: Path, how: str) -> None:
    """As on another host: other place, no hard links, no times, no events, no progress."""
    build.write({"v": {"a": torch.arange(3.0), "b": torch.ones(2)}}, 1, frozen=["v/b"])
    build.write({"v": {"a": torch.arange(3.0) + 1, "b": torch.ones(2)}}, 2, frozen=["v/b"])
    target = tmp_path / "elsewhere" / "r"
    target.parent.mkdir()
    if how == "moved":
        os.rename(build.root, target)
    else:
        shutil.copytree(build.root, target, copy_function=shutil.copyfile)
        (target / "events.jsonl").unlink()
        shutil.rmtree(build.root)
    done = subprocess.run(
        [sys.executable, "-c", RESTORE, str(target)], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [2, [1, 2, 3], build.run]
    assert damage_events(target) == []
