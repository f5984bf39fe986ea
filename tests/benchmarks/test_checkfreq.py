"""The experiments run, on anything, and write what they promise. No figure of theirs is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "checkfreq"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the benchmarks are not in this copy")


def run(name: str, out: Path, *options: str) -> dict[str, object]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--out", str(out), "--device", "cpu", "--quick", *options]
    environment = {**os.environ, "STEPWELL_BENCH_COMMIT": "under test"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "| " in (out / f"{name}.md").read_text()
    result: dict[str, object] = json.loads((out / f"{name}.json").read_text())
    return result


@pytest.mark.soak
def test_the_stall_of_three_ways(tmp_path: Path) -> None:
    result = run("stall", tmp_path, "--seconds", "4")
    assert result["commit"] == "under test" and result["machine"] and result["date"] and result["command"]
    row = result["rows"]["vgg16"]  # type: ignore[index]
    assert set(row["ways"]) == {"synchronous", "persist-only", "pipelined"}
    assert all(found["checkpoints"] >= 3 for found in row["ways"].values())
    assert not list(tmp_path.glob("scratch-*"))


@pytest.mark.slow
def test_goodput_by_simulation(tmp_path: Path) -> None:
    rows = run("goodput", tmp_path, "--no-real")["rows"]
    curves = [curve for row in rows.values() for curve in row["curves"]]  # type: ignore[attr-defined]
    assert len(curves) == 4 and all(curve["behind"] < 0.005 for curve in curves)
