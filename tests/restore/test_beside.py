"""Taking objects out of a run that trains on: what is listed may be gone a moment later."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.errors import RestoreError
from stepwell.events.journal import read_events
from stepwell.restore import byte_sources, open_run
from stepwell.storage.store import catalog, files, retention
from stepwell.types import CheckpointId, Keep
from tests.restore.build import RunBuilder, damage_events, restore, restore_only


@pytest.fixture
def build(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run")


def save(build: RunBuilder, step: int, **more: Any) -> CheckpointId:
    """A checkpoint of two files, all of whose values are its step."""
    tensors = {"a": torch.full((1000,), float(step)), "b": torch.full((7,), float(step)), **more}
    return build.write({"model": tensors}, step, frozen=["model/b"])


def prune(build: RunBuilder) -> None:
    for entry, _ in retention.surplus(catalog.scan(build.paths), Keep(last=2)):
        retention.remove_checkpoint(entry.id, entry.path)


def live(*names: str) -> torch.nn.Module:
    model = torch.nn.Module()
    for name in ("a", "b", *names):
        model.register_buffer(name, torch.full((1000 if name == "a" else 7,), -1.0))
    return model


def values(model: torch.nn.Module) -> dict[str, list[float]]:
    return {name: sorted(set(buffer.tolist())) for name, buffer in model.named_buffers()}


def after_planning(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[int]:
    """Do something of a live trainer each time after the candidates were listed."""
    real, listed = open_run.plan, []

    def plan(*arguments: Any, **more: Any) -> Any:
        found = real(*arguments, **more)
        listed.append(len(found))
        act(len(listed))
        return found

    monkeypatch.setattr(open_run, "plan", plan)
    return listed


@pytest.mark.parametrize("rounds", [1, 3])
def test_all_candidates_are_pruned_before_they_are_opened(
    rounds: int, build: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build, 1)
    save(build, 2)

    def train_on(number: int) -> None:
        if number <= rounds:
            save(build, 2 * number + 1)
            save(build, 2 * number + 2)
            prune(build)

    listed = after_planning(monkeypatch, train_on)
    model = live()
    assert restore_only(build.root, {"model": model}, only={"model"})
    assert values(model) == {"a": [2.0 * rounds + 2], "b": [2.0 * rounds + 2]}
    assert len(listed) == rounds + 1 and damage_events(build.root) == []
    kinds = [event["kind"] for event in read_events(build.paths.events)]
    assert kinds.count("gone") == rounds


def test_all_are_pruned_while_they_are_listed(build: RunBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of two, then the manifests of none of them: that is no empty run."""
    save(build, 1)
    save(build, 2)
    real, turns = files.list_names, []

    def list_names(path: Any, **more: Any) -> list[str]:
        found = real(path, **more)
        turns.append(path)
        if turns.count(build.root) == 2 and path == build.root:
            save(build, 3)
            save(build, 4)
            prune(build)
        return found

    monkeypatch.setattr(files, "list_names", list_names)
    model = live()
    assert restore_only(build.root, {"model": model}, only={"model"})
    assert values(model) == {"a": [4.0], "b": [4.0]} and damage_events(build.root) == []


def test_one_that_is_pruned_while_its_manifest_is_read_is_not_damaged(
    build: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build, 1)
    gone = save(build, 2)
    real = catalog.read_manifest

    def read_manifest(paths: Any, id: CheckpointId) -> Any:
        if id == gone:
            shutil.rmtree(build.paths.checkpoint(gone), ignore_errors=True)
        return real(paths, id)

    monkeypatch.setattr(catalog, "read_manifest", read_manifest)
    model = live()
    assert restore_only(build.root, {"model": model}, only={"model"})
    assert values(model)["a"] == [1.0] and damage_events(build.root) == []


def test_it_ends_when_they_are_always_gone(build: RunBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(build, 1)

    def train_on(number: int) -> None:
        save(build, number + 1)
        shutil.rmtree(build.paths.checkpoint(CheckpointId(number, 0, 1)))

    after_planning(monkeypatch, train_on)
    model = live()
    with pytest.raises(RestoreError, match="removed while they were opened"):
        restore_only(build.root, {"model": model}, only={"model"})
    assert values(model) == {"a": [-1.0], "b": [-1.0]}


@pytest.mark.parametrize("how", [restore, restore_only])
def test_a_run_that_is_removed_is_not_taken_for_an_empty_one(
    how: Callable[..., Any], build: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = save(build, 1)
    after_planning(monkeypatch, lambda number: shutil.rmtree(build.paths.checkpoint(id), ignore_errors=True))
    model = live()
    with pytest.raises(RestoreError, match="removed while they were opened"):
        how(build.root, {"model": model}, **({"only": {"model"}} if how is restore_only else {}))
    assert values(model) == {"a": [-1.0], "b": [-1.0]}


def test_what_is_open_is_read_to_its_end(build: RunBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruned after the first block was read: all files are open by then."""
    id = save(build, 1)
    real = byte_sources.FileSource.read

    def read_and_prune(self: Any, *arguments: Any) -> Any:
        shutil.rmtree(build.paths.checkpoint(id), ignore_errors=True)
        return real(self, *arguments)

    monkeypatch.setattr(byte_sources.FileSource, "read", read_and_prune)
    model = live()
    assert restore_only(build.root, {"model": model}, only={"model"})
    assert values(model) == {"a": [1.0], "b": [1.0]}


def test_a_file_that_is_missing_changes_nothing(build: RunBuilder) -> None:
    """The second file cannot be opened, so no byte of the first one is used."""
    id = save(build, 1)
    (build.paths.checkpoint(id) / "rank-00000.frozen.safetensors").unlink()
    model = live()
    with pytest.raises(RestoreError, match=r"no checkpoint .* is whole"):
        restore_only(build.root, {"model": model}, only={"model"})
    assert values(model) == {"a": [-1.0], "b": [-1.0]} and len(damage_events(build.root)) == 1


def test_beside_one_that_saves_all_the_time(build: RunBuilder) -> None:
    """Nothing but a whole checkpoint ever comes back, and none is said to be damaged."""
    save(build, 1)
    is_over, steps = threading.Event(), [1]

    def train() -> None:
        while not is_over.is_set():
            steps.append(steps[-1] + 1)
            save(build, steps[-1])
            prune(build)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(25):
            model, least = live(), steps[-1] - 1
            assert restore_only(build.root, {"model": model}, only={"model"})
            found = values(model)
            assert found["a"] == found["b"] and len(found["a"]) == 1 and found["a"][0] >= least
    finally:
        is_over.set()
        trainer.join()
    assert damage_events(build.root) == []


# -- strict=False -----------------------------------------------------------------------------------------------------


def damage(build: RunBuilder, id: CheckpointId) -> None:
    """Flip a bit in the last block, so that the others are used before it shows."""
    path = build.paths.checkpoint(id) / "rank-00000.frozen.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_a_damaged_one_left_behind_is_not_said_to_be_untouched(build: RunBuilder) -> None:
    """The older checkpoint lacks a tensor that is half overwritten by then."""
    save(build, 1)
    damage(build, save(build, 2, c=torch.full((7,), 2.0)))
    model = live("c")
    with pytest.raises(
        RestoreError, match=r"(?s)step-000000000002.* step 1 .*model/c\n.*restore\(step=1, strict=False\)"
    ):
        restore(build.root, {"model": model}, strict=False)
    other = live("c")
    restore(build.root, {"model": other}, strict=False, step=1)
    assert values(other) == {"a": [1.0], "b": [1.0], "c": [-1.0]}


def test_an_older_one_that_covers_all_of_it_is_fine(build: RunBuilder) -> None:
    save(build, 1)
    damage(build, save(build, 2))
    model = live("c")
    restore(build.root, {"model": model}, strict=False)
    assert values(model) == {"a": [1.0], "b": [1.0], "c": [-1.0]}


def test_an_optimizer_that_takes_an_older_state_has_nothing_left_of_the_damaged_one(build: RunBuilder) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model.weight.grad, model.bias.grad = torch.ones(3, 3), torch.ones(3)
            optimizer.step()
        return model, optimizer

    for step in (0, 1):
        model, optimizer = trained(step)
        objects = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        id = build.write(objects, step + 1, frozen=["model/weight"])
    damage(build, id)
    model, optimizer = trained(2)
    restore(build.root, {"model": model, "optimizer": optimizer}, strict=False)
    assert optimizer.state_dict()["state"] == {}
