"""On CUDA: a run whose parameters are coded there comes back with the bits that the coder has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.chain.device_run import check_run

pytestmark = pytest.mark.gpu


def test_records_by_the_device_bring_a_run_back(run_dir: Path, tmp_path: Path) -> None:
    check_run("cuda", run_dir, tmp_path)
