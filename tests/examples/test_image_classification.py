"""The image classification example: killed with SIGKILL, it resumes and ends with the same bits; the runner runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.events.journal import read_events
from stepwell.storage.store import catalog
from stepwell.storage.store.paths import RunPaths
from tests.adapters.scripts import Script
from tests.crash.harness import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "image_classification.py"
SHORT = [
    "-a",
    "small",
    "-b",
    "8",
    "-j",
    "0",
    "--samples",
    "100",
    "--classes",
    "4",
    "--image-size",
    "16",
    "--epochs",
    "2",
    "--deterministic",
    "--device",
    "cpu",
]
STEPS = 26


def command(where: Path, *more: str) -> list[str]:
    return [str(EXAMPLE), *SHORT, "--chk-prefix", str(where), *more]


def final_state(where: Path) -> dict[str, bytes]:
    """Tensors and plain values of the finished run."""
    newest = next(entry for entry in catalog.scan(RunPaths(where)) if entry.is_live and entry.is_committed)
    assert newest.manifest is not None and newest.manifest.finished and newest.id.step == STEPS
    record = catalog.read_record(RunPaths(where), newest.manifest)
    shards = {file.name: (newest.path / file.name).read_bytes() for file in record.files}
    return {**shards, "tree": json.dumps(record.tree, sort_keys=True).encode()}


@pytest.fixture(scope="module")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    script = Script(server, folder, *command(folder / "run", "--chk-freq", "4"))
    assert script.run() == 0, script.output
    assert "epoch 2:" in script.output and script.last_line().startswith(f"done: step {STEPS}")
    return final_state(folder / "run")


@pytest.mark.parametrize(
    ("flags", "nth"),
    [(["--chk-freq", "2"], 2), (["--chk_mode_baseline", "--chk-freq", "4"], 5)],
    ids=["first_epoch", "second_epoch"],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(
    server: Server, run_dir: Path, uninterrupted: dict[str, bytes], flags: list[str], nth: int
) -> None:
    script = Script(server, run_dir.parent, *command(run_dir, *flags, "--resume"))
    crash = f"trainer!copy.complete:0:{nth}"  # SIGKILL when the nth snapshot is complete
    assert script.run(STEPWELL_CRASH=crash) == -signal.SIGKILL, script.output
    assert script.run() == 0, script.output
    restored = [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "restore"]
    assert len(restored) == 1 and restored[0] > (13 if nth == 5 else 0)
    assert final_state(run_dir) == uninterrupted


def test_without_resume_it_does_not_overwrite(server: Server, run_dir: Path) -> None:
    script = Script(server, run_dir.parent, *command(run_dir, "--steps", "3", "--noeval"))
    assert script.run() == 0, script.output
    assert script.run() == 1 and "holds checkpoints up to step 3" in script.output


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--chk_mode_baseline"], [13, 26]),
        (["--chk_mode_baseline", "--chk-freq", "10"], [10, 20, 26]),
        (["--chk-freq", "13"], [13, 26]),
    ],
    ids=["epochs", "synchronous", "frequency"],
)
def test_flags_of_the_original(server: Server, run_dir: Path, flags: list[str], steps: list[int]) -> None:
    script = Script(server, run_dir.parent, *command(run_dir, "--noeval", *flags))
    assert script.run() == 0, script.output
    assert "of the pictures in val" not in script.output
    assert {event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "commit"} == set(steps)


def test_a_folder_of_pictures(server: Server, run_dir: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        for number in range(12):
            path = tmp_path / part / f"class_{number % 2}" / f"{number}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"P6 24 18 255\n" + bytes([20 * number]) * (24 * 18 * 3))
    script = Script(server, tmp_path, *command(run_dir, "--data", str(tmp_path)))
    assert script.run() == 0, script.output
    assert "of the pictures in val" in script.output and script.last_line().startswith("done: step 4")


@pytest.mark.soak
@pytest.mark.timeout(600)  # four interpreters that load torch, one after the other
def test_runner_with_the_originals_three_arguments(tmp_path: Path) -> None:
    runner = str(EXAMPLES / "run_image_classification.sh")
    env = {**os.environ, "PYTHON": sys.executable, "ARCH": "small"}
    more = ["-b", "8", "--samples", "24", "--classes", "2", "--image-size", "16", "--device", "cpu"]
    result = subprocess.run(
        [runner, "-", str(tmp_path / "out"), "0", *more], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("automatic", "epoch", "synchronous"):
        assert "done: step 6" in (tmp_path / "out" / f"{name}.log").read_text()
    again = subprocess.run(
        [runner, "-", str(tmp_path / "out"), "0"], env=env, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2 and "give a new folder" in again.stderr


def test_runner_and_recipe_ask_for_no_rights() -> None:
    """What the original's scripts did to the host: broad kills, swap switched off, root, a privileged container."""
    runner = (EXAMPLES / "run_image_classification.sh").read_text()
    recipe = (EXAMPLES / "Containerfile").read_text()
    for word in ("pkill", "killall", "sudo", "swapoff", "--privileged", "--ipc"):
        assert word not in runner
    lines = [line for line in recipe.splitlines() if not line.startswith("#")]
    assert not any("--privileged" in line or "--ipc" in line for line in lines)
    assert lines[-2].startswith("USER ")


def test_the_example_stays_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 300
