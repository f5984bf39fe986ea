"""A whole Checkpointer, agent included, on forged runs: it restores, goes on, saves, and touches nothing outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stepwell
from tests.hostile.attacks import ATTACKS
from tests.hostile.forge import Forgery, net

HARMLESS = [name for name in ATTACKS if name.startswith(("events", "progress")) and ATTACKS[name].outcome == "newest"]


@pytest.mark.parametrize("name", HARMLESS, ids=lambda name: name.replace(" ", "_"))
def test_training_goes_on(tmp_path: Path, name: str) -> None:
    forgery = Forgery(tmp_path / "run")
    ATTACKS[name].make(forgery)
    secret = forgery.canary / "secret"
    before = secret.read_bytes(), secret.stat().st_mtime_ns
    model, state = net(0), {}  # type: ignore[var-annotated]
    with stepwell.Checkpointer(forgery.root, policy=stepwell.Never(), model=model, values=state) as ckpt:
        assert ckpt.restore() and model.weight[0, 0] == 2  # type: ignore[index]
        ckpt.step()
        assert ckpt.save().wait(60) == "step-000000000003.l0002"
    assert (secret.read_bytes(), secret.stat().st_mtime_ns) == before
    assert [path.name for path in forgery.canary.iterdir()] == ["secret"]


def test_a_forged_checkpoint_is_passed_over_and_training_goes_on_from_the_older(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path / "run")
    ATTACKS["unknown tag"].make(forgery)
    model = net(0)
    state: dict[str, Any] = {}
    with stepwell.Checkpointer(forgery.root, policy=stepwell.Never(), model=model, values=state) as ckpt:
        assert ckpt.restore() and ckpt.status().step == 1
        ckpt.step()
        assert ckpt.save().wait(60) == "step-000000000002.l0002"
    with stepwell.Checkpointer(forgery.root, policy=stepwell.Never(), model=model, values=state) as ckpt:
        assert ckpt.restore() and ckpt.status().step == 2, "the new branch, not the forged step 2 of the old one"
