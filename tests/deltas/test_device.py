"""A run whose parameters are coded by the kernels: on CUDA, or by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.deltas.coded_trainer import HELD
from tests.deltas.test_symbols import coded, train_chained
from tests.deltas.walk import crashed, distance, state_of


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (make test-triton)")
def test_records_by_the_device_bring_a_run_back(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = coded(run_dir, HELD)
    truth = train_chained(run, 10)
    again = coded(crashed(run, tmp_path / "left"), HELD)
    assert again.ckpt.restore(prefer="newest") and again.ckpt.status().step == max(truth)
    assert not run.events("chain-ended") and run.events("coding")[0]["reason"] == "asked for"
    assert distance(state_of(again), truth[max(truth)], truth[1]) < 0.5
    for each in (run, again):
        each.ckpt.close(save=False)
