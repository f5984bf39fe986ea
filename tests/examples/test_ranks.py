"""The image classification example on 8 ranks under torchrun: one is killed, all begin again, the same bits.

`tests/ranks/test_scripts.py` does it on 2 ranks, without torchrun, in seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.events.journal import read_events
from stepwell.tools.prove.final_states import compare_states, last_checkpoint
from tests.examples.test_image_classification import EXAMPLE, EXAMPLES

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
TINY = ["-a", "small", "-b", "2", "-j", "0", "--classes", "4", "--image-size", "8", "--epochs", "2", "--device", "cpu"]


def environment(**more: str) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **fixed, "STEPWELL_LINGER": "20", **more}


def torchrun(where: Path, ranks: int, *more: str, restarts: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", str(EXAMPLE), *TINY, "--resume"]
    command += ["--deterministic", "--chk-freq", "3", "--chk-prefix", str(where), *more]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False)


def check_same_end(where: Path, straight: Path, ranks: int) -> None:
    """It resumed, and the states of all ranks are those of the run that nothing happened to."""
    restored = [event["step"] for event in read_events(where / "events.jsonl") if event["kind"] == "restore"]
    assert restored and min(restored) > 0
    found = compare_states(last_checkpoint(straight), last_checkpoint(where))
    assert [item for item in found.differences if item.generator not in ("python", "numpy")] == []
    assert len(last_checkpoint(where).whole.parts) == ranks


@pytest.mark.parametrize(
    ("ranks", "restarts"),
    [(8, 0), (8, 3)],
)
def test_a_rank_is_killed_and_all_end_with_the_same_bits(ranks: int, restarts: int, tmp_path: Path) -> None:
    samples = ["--samples", str(2 * 8 * ranks + 3)]
    straight = torchrun(tmp_path / "straight", ranks, *samples)
    assert straight.returncode == 0, straight.stdout + straight.stderr
    crash = f"trainer!copy.complete:{ranks - 1}:3"  # SIGKILL of the last rank when its third snapshot is complete
    first = torchrun(tmp_path / "run", ranks, *samples, restarts=restarts, STEPWELL_CRASH=crash)
    done = first
    if not restarts:
        assert first.returncode != 0
        done = torchrun(tmp_path / "run", ranks, *samples)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the pictures in val" in done.stdout and done.stdout.count("done: step") == 1
    check_same_end(tmp_path / "run", tmp_path / "straight", ranks)


def test_the_runner_on_eight_ranks(tmp_path: Path) -> None:
    runner = str(EXAMPLES / "run_image_classification.sh")
    more = ["-b", "2", "--samples", "64", "--classes", "2", "--image-size", "8", "--device", "cpu"]
    result = subprocess.run(
        [runner, "-", str(tmp_path / "out"), "0", *more],
        env=environment(PYTHON=sys.executable, ARCH="small", RANKS="8"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("automatic", "epoch", "synchronous"):
        assert "done: step 8" in (tmp_path / "out" / f"{name}.log").read_text()
