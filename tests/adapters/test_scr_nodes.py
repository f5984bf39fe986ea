"""Programs of SCR's flow on four nodes, which are killed, lost and damaged: their own files come back, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.scr_job import ScrJob
from tests.crash.harness import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def job(rank_server: Server, tmp_path: Path) -> Iterator[ScrJob]:
    made = ScrJob(rank_server, tmp_path / "job", SCR_FLUSH="3")
    yield made
    made.end_everything()


def run_and_kill(job: ScrJob, *arguments: object, nodes: str = "abcd", **env: str) -> dict[str, Any]:
    """Five checkpoints, the third of them in the prefix; then all ranks are killed."""
    launch = job.start(nodes, "--stay", *arguments, **env)
    found = job.same(launch)
    launch.kill()
    launch.end_store()
    return found


def restart(job: ScrJob, nodes: str, *arguments: object, **env: str) -> dict[str, Any]:
    launch = job.start(nodes, *arguments, **env)
    launch.wait_well()
    return job.same(launch)


@pytest.mark.parametrize(
    ("scheme", "lost", "expected"),
    [("SINGLE", "b", 3), ("PARTNER", "b", 5), ("XOR", "b", 5), ("RS", "bd", 5)],
)
def test_nodes_are_lost(job: ScrJob, scheme: str, lost: str, expected: int) -> None:
    env = {"SCR_COPY_TYPE": scheme}
    assert run_and_kill(job, **env) == {"seen": [], "made": [[step, True] for step in range(1, 6)]}
    job.lose(*lost)
    spare = "".join("x" if name in lost[:1] else "y" if name in lost else name for name in "abcd")
    assert restart(job, spare, "--steps", 6, **env)["seen"] == [[expected, True]]
    assert "ckpt.6" in job.in_prefix()  # finalize carries the newest
    for rank in range(4):
        assert (job.prefix.root / "ckpt.6" / "data" / f"{rank}.bin").is_file()
