"""CheckFreq's interface: each call, with each argument, does what the original documents."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.adapters.checkfreq import CFCheckpoint, CFIterator, CFManager, CFMode
from tests.adapters.small import Small, same
from tests.training.loop.small import Numbers

# -- arguments --------------------------------------------------------------------------------------------------------

ORIGINAL = {
    CFManager: "chk_dir, chk, keep_epoch_chk=True, overwrite=True, mode=AUTO, chk_prefix='model_v_'",
    CFIterator: "dataloader, bs=128, dali=True, steps_this_epoch=0, epoch=0, arch='resnet18', worker_id=0, chk_freq=0, "
    "steps_to_run=-1, max_overhead=5, dynamic=False, persist=True, cf_manager=None",
    CFManager.save: "self, additional_snapshot=None, is_epoch=False, epoch=0, synchronous=False, profile_full=False, "
    "profile_snap=False, use_thread=False, persist=False",
    CFManager.save_cpu: "self, additional_snapshot=None, is_epoch=False, epoch=0, synchronous=False, persist=False, "
    "profile_snap=False, profile_full=False, use_thread=True",
    CFManager.restore: "self, latest=True, epoch=0, gpu=0",
    CFManager.weight_update: "self",
    CFIterator.state_dict: "self",
    CFIterator.load_state_dict: "self, chk_map",
}


def shown(default: Any) -> str:
    return default.name if isinstance(default, CFMode) else repr(default)


@pytest.mark.parametrize("call", ORIGINAL, ids=lambda call: call.__qualname__)
def test_arguments_and_defaults_are_the_originals(call: Any) -> None:
    found = [
        name if parameter.default is inspect.Parameter.empty else f"{name}={shown(parameter.default)}"
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert ", ".join(found) == ORIGINAL[call]


def test_what_is_new_is_by_keyword_only() -> None:
    kinds = {name: parameter.kind.name for name, parameter in inspect.signature(CFManager).parameters.items()}
    assert [name for name in kinds if kinds[name] == "KEYWORD_ONLY"] == ["memory", "levels", "deltas"]


def test_modes_have_the_originals_values() -> None:
    assert {mode.name: mode.value for mode in CFMode} == {"MANUAL": 0, "AUTO": 1}


def test_what_cannot_be_tracked_is_said() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"CFCheckpoint\(arch=...\): a str has no state_dict"):
        chk = CFCheckpoint(model=model, arch="resnet18")
    assert chk.num_tracking == 1 and list(chk.tracking_map) == ["model"]
    with pytest.warns(UserWarning), pytest.raises(stepwell.ConfigError, match="none of the arguments"):
        CFCheckpoint(arch="resnet18")
    with pytest.raises(stepwell.ConfigError, match="'checkfreq' is taken"):
        CFCheckpoint(checkfreq=model)


def test_options_without_effect_are_said(run_dir: Path) -> None:
    chk = CFCheckpoint(model=torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="chk_prefix='other' has no effect"):
        CFManager(str(run_dir), chk, chk_prefix="other")
    with pytest.warns(UserWarning, match="persist=False has no effect"):
        CFIterator([1, 2], persist=False)


def test_options_that_cannot_work_are_refused(run_dir: Path) -> None:
    with pytest.raises(stepwell.ConfigError, match=r"worker_id=1.*rank 0 of 1"):
        CFIterator([1, 2], worker_id=1)
    with pytest.raises(stepwell.ConfigError, match="without cf_manager="):
        CFIterator([1, 2], chk_freq=3)
    with pytest.raises(stepwell.ConfigError, match="int is not iterable"):
        CFIterator(3)
    with pytest.raises(stepwell.ConfigError, match="not a CFCheckpoint"):
        CFManager(str(run_dir), torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_automatic_mode_takes_the_overhead(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    automatic = stepwell.Auto
    monkeypatch.setattr(stepwell, "Auto", lambda overhead: asked.append(overhead) or automatic(overhead=overhead))
    small = Small(run_dir, mode=CFMode.AUTO, max_overhead=8)
    small.train(batches=2)
    small.manager.close()
    assert asked == [0.08]


# -- each call --------------------------------------------------------------------------------------------------------


def test_an_empty_directory_restores_nothing(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL)
    assert small.manager.restore(latest=False, epoch=1) is None
    assert small.manager.restore() is None
    small.train(batches=1)
    small.manager.close()


@pytest.mark.parametrize("call", ["save", "save_cpu"])
@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "in_background"])
def test_save_returns_durations_and_restore_returns_the_map(run_dir: Path, call: str, synchronous: bool) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL)
    small.train(batches=2)
    given = {"epoch": 0, "best": 0.5, "names": ["a", "b"], "tensor": torch.arange(3)}
    snapshot, whole = getattr(small.manager, call)(additional_snapshot=given, synchronous=synchronous)
    assert 0 < snapshot <= whole
    weights = small.weights()
    small.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL, seed=5)
    found = again.manager.restore()
    assert found is not None and same([found.pop("tensor")], [given.pop("tensor")]) and found == given  # type: ignore[list-item]
    assert same(again.weights(), weights)
    again.manager.close()


def test_restore_returns_the_iterators_state_when_no_map_was_given(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL, chk_freq=2)
    small.train(batches=3)
    small.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL)
    assert again.manager.restore() == {"iter": 2, "steps_so_far": 2, "start_index": 8, "epoch": 0}
    again.manager.close()


def test_restore_before_and_after_the_iterator_is_made_are_the_same(run_dir: Path) -> None:
    whole = Small(run_dir / "whole", mode=CFMode.MANUAL)
    whole.train(epochs=2)
    whole.manager.close()
    for order in ("before", "after"):
        first = Small(run_dir / order, mode=CFMode.MANUAL, chk_freq=4)
        first.train(batches=5)
        first.manager.close()
        second = Small(run_dir / order, mode=CFMode.MANUAL, restore=order)
        second.train(epochs=2)
        second.manager.close()
        assert first.seen[:4] + second.seen == whole.seen
        assert same(second.weights(), whole.weights())


def test_another_frequency_after_restore_reads_again_and_says_so(run_dir: Path) -> None:
    first = Small(run_dir, mode=CFMode.AUTO, chk_freq=2)
    first.train(batches=4)
    first.manager.save(synchronous=True)
    first.manager.close()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        second = Small(run_dir, mode=CFMode.AUTO, chk_freq=2, restore="before")
    assert any("the checkpoint is read again" in str(warning.message) for warning in said)
    second.train(epochs=1)
    second.manager.close()
    assert sorted(number for _, ids in first.seen + second.seen for number in ids) == list(range(24))


def test_automatic_mode_with_a_frequency_saves_at_it(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.AUTO, chk_freq=2, overwrite=False)
    small.train(batches=1)
    small.manager.save(synchronous=True)  # or the first ones may be put off: memory is being made ready
    for _ in range(4):
        small.train(batches=1)
        small.manager.checkpointer().wait(60)  # or storage may not keep up with such small steps
    small.manager.close()
    assert small.steps_on_disk() == [1, 3]


def test_manual_mode_saves_only_epochs_and_what_is_asked(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL, overwrite=False)
    small.train(batches=4)
    assert small.steps_on_disk() == []
    small.manager.save(synchronous=True)
    assert small.steps_on_disk() == [4]
    small.train(epochs=1)
    assert small.steps_on_disk() == [4, 6]
    small.manager.close()


def test_manager_without_an_iterator(run_dir: Path) -> None:
    """A script that loops over its own loader and saves for itself."""
    small = Small(run_dir, mode=CFMode.MANUAL, is_wrapped=False)
    for _ in range(30):
        small.update(torch.ones(4, 8))
    small.manager.save(additional_snapshot={"mine": 30}, synchronous=True)
    assert small.steps_on_disk() == [30]
    weights = small.weights()
    small.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL, is_wrapped=False, seed=3)
    assert again.manager.restore() == {"mine": 30} and same(again.weights(), weights)
    again.manager.close()


class Wrapped:
    """An optimizer that is none of torch's, as mixed-precision wrappers are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("is_direct", [False, True], ids=["weight_update", "own_step"])
def test_an_optimizer_that_is_none_of_torchs_is_counted(run_dir: Path, is_direct: bool) -> None:
    model = torch.nn.Linear(8, 1)
    wrapped = Wrapped(torch.optim.Adam(model.parameters()))
    manager = CFManager(str(run_dir), CFCheckpoint(model=model, fp16=wrapped), mode=CFMode.AUTO)
    for batch in CFIterator([torch.ones(4, 8)] * 5, chk_freq=2, cf_manager=manager):
        model(batch).sum().backward()
        wrapped.step() if is_direct else manager.weight_update()
    assert manager.step == 5
    weights = model.weight.clone()
    manager.close()
    model.weight.data.zero_()
    again = CFManager(str(run_dir), CFCheckpoint(model=model, fp16=wrapped), mode=CFMode.MANUAL)
    assert again.restore() == {"iter": 5, "steps_so_far": 5, "start_index": 640, "epoch": 0}
    assert torch.equal(model.weight, weights) and again.step == 5
    again.close()


@pytest.mark.filterwarnings("ignore:no automatic frequency")
def test_automatic_mode_without_an_iterator_is_said_once(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.AUTO, is_wrapped=False)
    with pytest.warns(UserWarning, match="saves through a CFIterator"):
        small.update(torch.ones(4, 8))
    small.update(torch.ones(4, 8))  # a second warning would be an error
    small.manager.close()


def test_an_iterator_made_anew_for_each_epoch(run_dir: Path) -> None:
    """Some scripts build their loader in the loop over epochs; the order goes on as with one iterator."""
    whole = Small(run_dir / "whole", mode=CFMode.AUTO, chk_freq=2)
    whole.train(epochs=3)
    whole.manager.close()
    first = Small(run_dir / "cut", mode=CFMode.AUTO, chk_freq=2)
    first.train(epochs=1)
    first.train(batches=3)
    first.manager.save(synchronous=True)
    first.manager.close()
    second = Small(run_dir / "cut", mode=CFMode.AUTO, chk_freq=2, restore="after", seed=4)
    second.train(epochs=2)
    second.iterator = CFIterator(second.loader, epoch=2, chk_freq=2, cf_manager=second.manager)
    second.train(epochs=3)
    with pytest.raises(stepwell.ConfigError, match="use the same in the whole run"):
        CFIterator(second.loader, epoch=3, chk_freq=3, cf_manager=second.manager)
    second.manager.close()
    assert first.seen + second.seen == whole.seen


def test_the_end_of_an_epoch_is_saved_once(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.AUTO, chk_freq=3, overwrite=False)
    small.train(epochs=2)
    small.manager.close()
    ends = [(entry.id.step, entry.id.repeat) for entry in small.entries() if entry.id.step % 6 == 0]
    assert ends == [(6, 0), (12, 0)]


def test_accumulated_gradients_are_not_lost(run_dir: Path) -> None:
    """A step every other batch: a checkpoint stands after a step, and what came after that step comes again."""
    small = Small(run_dir, mode=CFMode.MANUAL, chk_freq=3)
    for number, batch in enumerate(small.iterator, 1):
        small.seen.append((0, batch[:, 0].int().tolist()))
        small.model(batch).sum().backward()
        if number % 2 == 0:
            small.manager.weight_update()
        if number == 5:
            break
    small.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL, restore="before")
    assert again.restored == {"iter": 4, "steps_so_far": 4, "start_index": 16, "epoch": 0}
    assert next(iter(again.iterator))[:, 0].int().tolist() == small.seen[4][1]
    again.manager.close()


def test_without_a_tracked_optimizer_each_batch_is_a_step(run_dir: Path) -> None:
    chk = CFCheckpoint(model=torch.nn.Linear(8, 1))
    manager = CFManager(str(run_dir), chk, mode=CFMode.MANUAL)
    assert len(list(CFIterator([torch.ones(1)] * 4, bs=1, chk_freq=2, cf_manager=manager))) == 4
    manager.close()
    again = CFManager(str(run_dir), chk, mode=CFMode.MANUAL)
    assert again.restore() == {"iter": 4, "steps_so_far": 4, "start_index": 4, "epoch": 0}
    again.close()


def test_steps_to_run_ends_the_run(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL, steps_to_run=4)
    small.train(epochs=2)
    assert len(small.seen) == 4 and small.iterator.exit
    small.manager.close()


def test_a_batch_that_was_not_used_comes_again(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL)
    small.train(batches=2)
    unused = next(small.iterator)
    small.manager.save(synchronous=True)
    small.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL, restore="before")
    assert torch.equal(next(iter(again.iterator)), unused)
    again.manager.close()


class Endless(torch.utils.data.Sampler[list[int]]):
    """Batches from a sampler that does not say how many there are."""

    generator = None

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(24, generator=self.generator).tolist()
        return (order[at : at + 4] for at in range(0, 24, 4))


def test_a_loader_that_does_not_know_its_length(run_dir: Path) -> None:
    def start(where: Path, **options: Any) -> Small:
        loader = torch.utils.data.DataLoader(Numbers(), batch_sampler=Endless())
        return Small(where, mode=CFMode.MANUAL, loader=loader, **options)

    whole = start(run_dir / "whole")
    whole.train(epochs=3)
    whole.manager.close()
    for stop in (4, 6):
        first = start(run_dir / str(stop), chk_freq=1)
        first.train(epochs=1, batches=stop if stop < 6 else None)
        first.manager.close()
        second = start(run_dir / str(stop), restore="before", seed=5)
        assert second.restored is not None
        second.train(epochs=3)
        second.manager.close()
        assert first.seen[: second.restored["iter"]] + second.seen == whole.seen
    with pytest.raises(TypeError, match="has no length"):
        len(whole.iterator)


def test_size_and_length_of_the_whole_epoch(run_dir: Path) -> None:
    small = Small(run_dir, mode=CFMode.MANUAL)
    assert (len(small.iterator), small.iterator._size) == (6, 24)
    assert small.manager.get_chk_size == pytest.approx(small.state_bytes() / (1 << 20))
    assert small.manager.chk_process is None


class Foreign:
    """An iterable that only its owner can bring to a position, as a DALI iterator."""

    def __init__(self, start: int = 0, size: int = -1) -> None:
        self.start, self._size, self.resets = start, size, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((4, 8), float(number)) for number in range(self.start, 6))

    def reset(self) -> None:
        self.start = 0
        self.resets += 1


@pytest.mark.parametrize("size", [24, -1], ids=["size_known", "size_unknown"])
def test_a_foreign_iterator_is_counted_and_has_to_be_at_its_place(run_dir: Path, size: int) -> None:
    first = Small(run_dir, mode=CFMode.MANUAL, chk_freq=2, loader=Foreign(size=size), bs=4)
    first.train(batches=3)
    first.manager.close()
    lost = Small(run_dir, mode=CFMode.MANUAL, restore="before", loader=Foreign(size=size), bs=4)
    with pytest.raises(
        stepwell.ConfigError, match=r"restored at epoch 0, batch 2.*resume_index=state\['start_index'\]"
    ):
        iter(lost.iterator)
    lost.manager.close()
    again = Small(run_dir, mode=CFMode.MANUAL, restore="before", loader=Foreign(2, size), bs=4)
    again.iterator.load_state_dict(again.restored)
    again.train(epochs=1)
    again.iterator.reset()
    again.train(epochs=2)
    assert [ids[0] for _, ids in again.seen] == [2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    again.manager.close()
    over = Small(run_dir, mode=CFMode.MANUAL, restore="before", loader=Foreign(size=size), bs=4)
    assert over.restored == {"iter": 0, "steps_so_far": 12, "start_index": 0, "epoch": 2}, "as the original's"
    over.iterator.load_state_dict(over.restored)
    over.train(epochs=3)
    assert [(epoch, ids[0]) for epoch, ids in over.seen] == [(2, number) for number in range(6)]
    over.manager.close()
