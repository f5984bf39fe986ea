"""The experiments run on files of the standard form and write what they promise; SCAR and TOPN are what they are said
to be. No figure of theirs is looked at.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "lc"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the benchmarks are not in this copy")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and ratings of the standard forms, of nothing in particular."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, opener in (("mnist", open), ("fashion-mnist", gzip.open)):
        (folder / name).mkdir()
        ending = ".gz" if opener is gzip.open else ""
        with opener(folder / name / f"train-images-idx3-ubyte{ending}", "wb") as file:
            file.write(struct.pack(">HBBIII", 0, 8, 3, 1200, 28, 28) + rng.bytes(1200 * 784))
        with opener(folder / name / f"train-labels-idx1-ubyte{ending}", "wb") as file:
            file.write(struct.pack(">HBBI", 0, 8, 1, 1200) + bytes(rng.integers(0, 10, 1200, dtype=np.uint8)))
    (folder / "ml-100k").mkdir()
    lines = [f"{rng.integers(1, 50)}\t{rng.integers(1, 80)}\t{rng.integers(1, 6)}\t0" for _ in range(500)]
    (folder / "ml-100k" / "u.data").write_text("\n".join(lines))
    return folder


def run(name: str, out: Path, *options: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--out", str(out), *options]
    environment = {**os.environ, "STEPWELL_BENCH_COMMIT": "under test", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


def check(out: Path, *names: str) -> None:
    for name in names:
        assert "| " in (out / f"{name}.md").read_text()
        assert {"machine", "date", "command", "commit"} <= set(json.loads((out / f"{name}.json").read_text()))
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_speed(tmp_path: Path) -> None:
    run("speed", tmp_path, "--entries", "50000", "--repeats", "1")
    check(tmp_path, "speed")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (make test-triton)")
def test_device(tmp_path: Path) -> None:
    run("device", tmp_path, "--device", "cpu", "--entries", "9000", "--leaves", "2", "--repeats", "1", "--no-compile")
    assert "known tables" in (tmp_path / "device.md").read_text()
    assert {"machine", "codecs", "copy"} <= set(json.loads((tmp_path / "device.json").read_text()))


@pytest.mark.soak
def test_live(tmp_path: Path) -> None:
    sizes = ["--width", "64", "--layers", "1", "--length", "32", "--batch", "2"]
    run("live", tmp_path, "--rounds", "1", "--kills", "1", "--steps", "60", *sizes)
    check(tmp_path, "live")
    (kill,) = json.loads((tmp_path / "live.json").read_text())["kills"]
    assert kill["source"] == "chain"


@pytest.mark.soak
def test_breakdown_and_overhead(tmp_path: Path, data: Path) -> None:
    run("breakdown", tmp_path, "--data", str(data), "--records", "2", "--only", "logistic/mnist,mf/movielens")
    run("overhead", tmp_path, "--data", str(data), "--steps", "2", "--seeds", "0", "--only", "lenet/fashion")
    check(tmp_path, "breakdown", "buckets", "overhead")


@pytest.mark.soak
def test_rework_and_its_baselines(tmp_path: Path, data: Path) -> None:
    schemes = "lc(bits=3);SCAR 5;SCAR 10;TOPN 2.5;TOPN 5;TOPN 10"
    options = ["--data", str(data), "--seeds", "0", "--only", "logistic/mnist", "--schemes", schemes]
    run("rework", tmp_path, *options)
    check(tmp_path, "rework")
    found = {row["scheme"]: row for row in json.loads((tmp_path / "rework.json").read_text())["summary"]}
    assert set(found) == {*schemes.split(";"), "TOPN+index 5", "TOPN+index 10"}
    assert found["TOPN+index 5"]["rework"] == found["TOPN 2.5"]["rework"]


@pytest.mark.soak
def test_rework_of_a_part(tmp_path: Path, data: Path) -> None:
    options = ["--data", str(data), "--seeds", "0", "--only", "logistic/mnist", "--schemes", "FULL 8;SCAR 12.5"]
    run("rework", tmp_path, *options, "--lost", "0.5,1")
    found = {row["scheme"]: row for row in json.loads((tmp_path / "rework.json").read_text())["summary"]}
    assert set(found) == {"FULL 8, lost 0.5", "FULL 8", "SCAR 12.5, lost 0.5", "SCAR 12.5"}
    assert 0 < found["FULL 8, lost 0.5"]["error"] < found["FULL 8"]["error"]
    assert "SCAR's paper" in (tmp_path / "rework.md").read_text()


def test_the_baselines_are_what_their_papers_say() -> None:
    code = """
import numpy as np, schemes
base = {"x": np.zeros(640, np.float32)}
first = {"x": np.zeros(640, np.float32)}
first["x"][:64] = 3; first["x"][100] = 10; first["x"][300:310] = 1
# TOPN keeps the largest differences exactly; what it left out is in the next difference.
one = schemes.topn([base, first], 1 / 640)
assert np.flatnonzero(one.state["x"]).tolist() == [100] and one.state["x"][100] == 10 and one.share == 1 / 640
two = schemes.topn([base, first, first], 64 / 640)
assert (two.state["x"] == first["x"]).sum() == 640
# SCAR saves the blocks that are farthest from what was saved of them, whole: the first has 24, the second 10.
one = schemes.scar([base, first], 0.1)
assert np.flatnonzero(one.state["x"]).tolist() == list(range(64))
two = schemes.scar([base, first, first], 0.1)
assert np.flatnonzero(two.state["x"]).tolist() == [*range(64), 100]
"""
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER, check=True, timeout=100)
