"""A run whose parameters are coded by the kernels, by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.storage.chain.device_run import check_run


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (make test-triton)")
def test_records_by_the_device_bring_a_run_back(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_run("cpu", run_dir, tmp_path)
