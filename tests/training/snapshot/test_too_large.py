"""A state whose record could not be read back is refused when it is taken, with what to do; training goes on."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import StateError
from stepwell.handover.message import Encoded
from stepwell.storage.format import document, tree
from stepwell.training.snapshot import refusal
from stepwell.training.snapshot.layout import make_plan
from stepwell.training.snapshot.record_size import check_size, heaviest
from stepwell.training.state.capture import Capture
from stepwell.training.state.flatten import flatten
from stepwell.training.state.tracked import track
from tests.training.loop.small import Small

LIMIT = 200_000
"""In the place of 64 MiB: the real one takes seconds. `test_the_real_limit` has that."""


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", LIMIT)


def run_with(values: Any, where: Path, **options: Any) -> Small:
    run = Small(where, options)
    run.ckpt.close(save=False)
    run.ckpt = stepwell.Checkpointer(
        where, model=run.model, optimizer=run.optimizer, values=values, data=run.loader, seed=7, **options
    )
    return run


@pytest.mark.usefixtures("small_limit")
def test_it_is_refused_with_the_path_and_what_to_do(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    values: dict[str, Any] = {"replay": {"rewards": [0.1] * 100_000, "size": 3}}
    run = run_with(values, run_dir, policy=stepwell.Every(steps=1))
    caplog.set_level(logging.WARNING, logger="stepwell")
    for number, batch in enumerate(run.ckpt.data):
        run.update(batch)
        if number == 4:
            with pytest.raises(StateError, match=r"values/replay/rewards holds 100000 plain values .* tensor or array"):
                run.ckpt.save()
    refused = run.events("snapshot-refused")
    assert len(refused) == 1 and "values/replay/rewards" in refused[0]["reason"], "once, not at every step"
    assert caplog.text.count("values/replay/rewards") == 1
    assert run.events("persist-failed") == [] == run.events("snapshot")
    values["replay"]["rewards"] = torch.full((100_000,), 0.1)
    assert run.ckpt.save().wait(30)
    run.ckpt.close()
    assert len(run.events("commit")) == 1


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("pause", [refusal.PAUSE_SECONDS, 0.0])
def test_what_is_refused_is_looked_at_again_after_a_while(
    pause: float, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {"long": [0.1] * 100_000}
    run = run_with(values, run_dir, policy=stepwell.Every(steps=1))
    monkeypatch.setattr(refusal, "PAUSE_SECONDS", pause)
    monkeypatch.setattr(refusal, "_SHARE", 0)
    real, begun = run.ckpt._saving._begin, []
    monkeypatch.setattr(
        run.ckpt._saving, "_begin", lambda *a, **m: begun.append(run.ckpt.status().step) or real(*a, **m)
    )
    for batch in run.ckpt.data:
        run.update(batch)
    assert begun == ([1] if pause else [1, 2, 3, 4, 5, 6])
    assert [event["step"] for event in run.events("snapshot-refused")] == [1]
    values.clear()
    run.ckpt.close()
    assert [event["step"] for event in run.events("commit")] == [6]


def test_a_refusal_costs_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found, now = refusal.StateRefusal(), refusal.time.monotonic()
    assert not found.holds
    assert found.note(StateError("no", path="a"), now) and found.holds
    monkeypatch.setattr(refusal, "PAUSE_SECONDS", 0.0)
    assert not found.note(StateError("still not", path="a"), now + 1e6) and not found.holds, "not said again"
    assert not found.note(StateError("no", path="a"), now - 60.0) and found.holds
    assert found.note(StateError("no", path="b"), now)
    found.clear()
    assert not found.holds and found.note(StateError("no", path="b"), now)


def test_the_end_of_a_run_that_cannot_be_saved_says_so(run_dir: Path, small_limit: None) -> None:
    run = run_with({"long": [0.1] * 100_000}, run_dir, policy=stepwell.Never())
    with pytest.raises(StateError, match="values/long"):
        run.train(1)
    run.ckpt.close(save=False)


@pytest.mark.usefixtures("small_limit")
def test_too_many_tensors(run_dir: Path) -> None:
    values = {"many": {str(n): torch.zeros(1) for n in range(1000)}}
    run = run_with(values, run_dir, policy=stepwell.Never())
    for batch in run.ckpt.data:
        run.update(batch)
        with pytest.raises(StateError, match=r"values/many has 1000 tensors; .* one tensor"):
            run.ckpt.save()
        break
    run.ckpt.close(save=False)


def test_the_real_limit() -> None:
    flat = flatten({"values": {"few": [1, 2], "notes": ["ten bytes!" * 6_800_000]}})
    with pytest.raises(StateError, match=r"values/notes holds 1 plain .* may take 67 MB .*, these take 68 MB"):
        check_size(Encoded(flat.text()), flat, make_plan(1, [], []))
    less = flatten({"values": {"few": [1, 2], "notes": ["ten bytes!" * 6_700_000]}})
    check_size(Encoded(less.text()), less, make_plan(1, [], []))


def test_where_it_is_heaviest() -> None:
    def of(value: Any) -> tuple[str, int]:
        return heaviest(flatten(value).tree)

    assert of({"a": {"x": (1, [2.5] * 1000, {"y": "z" * 10}), "w": torch.zeros(2)}, "b": [1] * 9}) == ("a/x/1", 1000)
    assert of({"a": {3: list(range(100)), "k": 1}, "b": {1, 2}}) == ("a/3", 100)
    assert of({"a": deque([[1, 2]] * 50, maxlen=90), "b": [1]}) == ("a", 50)
    assert of({"a": defaultdict(list, {"k": [1] * 50}), "b": [1]}) == ("a/k", 50)
    assert of({"a": OrderedDict(k="v" * 5000), "b": [1]}) == ("a/k", 5000)


def test_numbers_in_a_long_list_are_not_taken_apart_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven million losses in a list took longer to look at than to write, each time that such a state was refused."""
    real, looked_at = tree._encode, []
    monkeypatch.setattr(tree, "_encode", lambda value, *rest: looked_at.append(value) or real(value, *rest))
    numbers = [0.5, -0.0, 7, -(2**63), True, 2**63, float("inf"), 1e308]
    encoded = tree.encode({"losses": numbers}, (), lambda value, path: NotImplemented)
    assert looked_at[2:] == [True, 2**63, float("inf")]
    assert [repr(value) for value in tree.decode(encoded, lambda tag, payload: NotImplemented)["losses"]] == [
        repr(value) for value in numbers
    ]


def test_the_text_is_that_of_the_tree() -> None:
    """What stays is written once, and the whole is the same text."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    capture = Capture(track({"model": model, "optimizer": optimizer, "values": {'"': [1, None]}}))
    for _ in range(2):
        flat = capture.flatten({"step": 1})
        assert flat.text() == json.dumps(flat.tree, separators=(",", ":"))
