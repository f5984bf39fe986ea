"""The five steps of CheckFreq's README on 8 ranks under torchrun: killed and started again, the same bits.

`tests/ranks/test_scripts.py` does it on 2 ranks, without torchrun, in seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.events.journal import read_events
from tests.adapters.train_ranks import BATCH, EPOCHS, SAMPLES

SCRIPT = Path(__file__).parent / "train_ranks.py"
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def torchrun(where: Path, ranks: int, *, restarts: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", str(SCRIPT), str(where)]
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, "STEPWELL_LINGER": "20", **fixed, **settings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def weights(output: str) -> list[str]:
    """What each rank said at its end. Two may have said it before either ended its line."""
    return sorted(re.findall(r"rank \d+ weights [0-9a-f]{64}", output))


def history(where: Path, ranks: int) -> list[list[str]]:
    """Each rank's steps, each as often as it was done."""
    return [Path(f"{where}.ledger.{rank}").read_text().splitlines() for rank in range(ranks)]


def check_histories(where: Path, straight: Path, ranks: int) -> None:
    """Steps that were done again are the same, and none is missing; all ranks together see each sample once."""
    restored = [event["step"] for event in read_events(where / "events.jsonl") if event["kind"] == "restore"]
    assert restored and min(restored) > 0
    for mine, expected in zip(history(where, ranks), history(straight, ranks), strict=True):
        assert list(dict.fromkeys(mine)) == expected
    lines = [line for lines in history(straight, ranks) for line in lines]
    batches = [re.match(r"\d+ (\d+) \[([\d, ]+)\]", line) for line in lines]
    for epoch in range(EPOCHS):
        texts = [found[2] for found in batches if found is not None and int(found[1]) == epoch]
        seen = sorted(int(index) for text in texts for index in text.split(", "))
        assert seen == list(range(SAMPLES)), "although the seeds of the ranks differ"


@pytest.mark.parametrize(
    ("ranks", "mode", "restarts"),
    [(8, "MANUAL", 1), (8, "AUTO", 0)],
)
def test_five_steps_on_many_ranks_killed_and_resumed(ranks: int, mode: str, restarts: int, tmp_path: Path) -> None:
    where, straight = tmp_path / "run", tmp_path / "straight"
    settings = {"CF_MODE": mode, "CF_FREQ": "2"}
    whole = torchrun(straight, ranks, **settings)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    victim = ranks - 1
    steps = SAMPLES // BATCH // ranks
    first = torchrun(where, ranks, restarts=restarts, **settings, CF_KILL=f"{steps + steps // 2}:{victim}")
    if restarts:
        done = first
    else:
        assert first.returncode != 0
        done = torchrun(where, ranks, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(weights(whole.stdout)) == ranks and weights(done.stdout) == weights(whole.stdout)
    check_histories(where, straight, ranks)
