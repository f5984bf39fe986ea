"""A run whose parameters are coded by the kernels, killed and brought back: on CUDA, or by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import stepwell
from tests.storage.chain.coded_trainer import HELD
from tests.storage.chain.test_symbols import train_chained
from tests.storage.chain.walk import Wide, crashed, state_of


class OnDevice(Wide):
    def update(self, batch: torch.Tensor) -> None:
        super().update(batch.to(self.device))


def open_run(where: Path, device: str) -> OnDevice:
    options: dict[str, Any] = {"deltas": HELD, "policy": stepwell.Never()}
    return type("OnDevice", (OnDevice,), {"device": device})(where, options)


def check_run(device: str, run_dir: Path, tmp_path: Path) -> None:
    """The newest record leads to the bits that the coder has on the device."""
    run = open_run(run_dir, device)
    truth = train_chained(run, 10)
    left = crashed(run, tmp_path / "left")
    assert not run.events("chain-ended") and run.events("coding")[0]["where"].startswith(device)
    symbols = run.ckpt._snapshotter.symbols
    assert symbols is not None and symbols._coded is not None
    part, reference = symbols._coded.part, symbols._coded.coder.reference.cpu()  # type: ignore[attr-defined]
    again = open_run(left, device)
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step == max(truth)
    found = state_of(again)
    for slot in part.slots:
        line = reference[slot.start : slot.start + slot.leaf.count]
        assert torch.equal(found[slot.leaf.name].cpu().reshape(-1), line), slot.leaf.name
    for each in (run, again):
        each.ckpt.close(save=False)
