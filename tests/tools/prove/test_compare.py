"""The comparison of final states sees one bit, one value, one type; on checkpoints that stepwell wrote itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import DamagedError, RestoreError
from stepwell.tools.prove.final_states import Difference, compare_states, last_checkpoint, why_not_comparable


def make(where: Path, change: Callable[[dict[str, Any]], object] = lambda state: None) -> Path:
    """A run with one checkpoint of a small state, changed or not."""
    state: dict[str, Any] = {
        "weights": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "numbers": {"count": 3, "rate": 0.1, 7: "seven", "pair": (1, 2)},
    }
    change(state)
    torch.manual_seed(0)
    with stepwell.Checkpointer(where, policy=stepwell.Never(), track={"state": state}) as ckpt:
        ckpt.save().wait()
    return where


def differences(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> list[Difference]:
    one, two = make(tmp_path / "a"), make(tmp_path / "b", change)
    found = compare_states(last_checkpoint(one), last_checkpoint(two)).differences
    return [item for item in found if item.generator not in ("python", "numpy")]


def test_equal_states_are_equal(tmp_path: Path) -> None:
    assert differences(tmp_path, lambda state: None) == []


def flip_last_bit(state: dict[str, Any]) -> None:
    state["weights"].view(torch.int32)[1, 2] += 1


@pytest.mark.parametrize(
    ("change", "path", "text"),
    [
        (flip_last_bit, "state/weights", "differs in 1 of 6 elements, by at most 4.77e-07"),
        (lambda s: s["weights"][0, 0].neg_(), "state/weights", "differs in 1 of 6 elements, by at most 0"),
        (lambda s: s["half"].mul_(2), "state/half", "differs in 3 of 3 elements, by at most 1"),
        (lambda s: s.update(half=torch.ones(3)), "state/half", "(dtype): bfloat16 uninterrupted, float32 killed"),
        (lambda s: s.update(weights=torch.zeros(3, 2)), "state/weights", "[2, 3] uninterrupted, [3, 2] killed"),
        (lambda s: s.pop("half"), "state/half", "missing in the killed run"),
        (lambda s: s.update(more=torch.ones(1)), "state/more", "missing in the uninterrupted run"),
        (lambda s: s["numbers"].update(count=4), "state/numbers/count", "3 uninterrupted, 4 killed"),
        (lambda s: s["numbers"].update(count=3.0), "state/numbers/count", "3 uninterrupted, 3.0 killed"),
        (lambda s: s["numbers"].update(pair=[1, 2]), "state/numbers/pair", "tuple uninterrupted, list killed"),
        (lambda s: s["numbers"].update(rate=0.1 + 2**-56), "state/numbers/rate", "0.1"),
    ],
)  # fmt: skip
def test_one_change_is_one_difference(
    change: Callable[[dict[str, Any]], object], path: str, text: str, tmp_path: Path
) -> None:
    (found,) = differences(tmp_path, change)
    assert found.path == path
    assert text in found.text


def test_tensors_come_first_and_the_length_of_the_run_before_all(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["numbers"]["count"] = 4
        state["weights"] += 1

    assert [item.path for item in differences(tmp_path, change)] == ["state/weights", "state/numbers/count"]
    longer, state = tmp_path / "longer", {"weights": torch.zeros(2, 3)}
    with stepwell.Checkpointer(longer, policy=stepwell.Never(), track={"state": state}) as ckpt:
        ckpt.step()
        ckpt.save().wait()
    found = compare_states(last_checkpoint(tmp_path / "a"), last_checkpoint(longer)).differences
    assert found[0].path == "stepwell/step"
    one, two = last_checkpoint(tmp_path / "a"), last_checkpoint(longer)
    assert why_not_comparable(one, two, same_length=False) is None
    assert "step 0 in the uninterrupted run and step 1 in the killed one" in (
        why_not_comparable(one, two, same_length=True) or ""
    )
    assert why_not_comparable(one, one, same_length=True) is None


def test_the_last_checkpoint_counts_even_if_it_is_suspect(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepwell.Checkpointer(tmp_path, policy=stepwell.Never(), model=model, optimizer=optimizer) as ckpt:
        for _ in range(3):
            optimizer.step()
            ckpt.step()
            if ckpt.status().step == 3:
                torch.nn.init.constant_(model.weight, float("nan"))
            ckpt.save().wait()
    last = last_checkpoint(tmp_path)
    assert last.record.id.step == 3
    assert last.record.suspect is not None  # a restart would prefer the one before


def test_saving_is_no_step(tmp_path: Path) -> None:
    with stepwell.Checkpointer(tmp_path, policy=stepwell.Never(), track={"state": {"a": torch.zeros(2)}}) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.save().wait()
    assert last_checkpoint(tmp_path).record.id.step == 2


def test_damage_is_not_taken_for_a_difference(tmp_path: Path) -> None:
    one, two = make(tmp_path / "a"), make(tmp_path / "b")
    (shard,) = two.glob("step-*/rank-00000.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError):
        compare_states(last_checkpoint(one), last_checkpoint(two))
    (manifest,) = two.glob("step-*/manifest.json")
    manifest.write_bytes(b"{}")
    with pytest.raises(DamagedError):
        last_checkpoint(two)


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RestoreError):
        last_checkpoint(tmp_path)
