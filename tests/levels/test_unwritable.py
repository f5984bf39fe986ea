"""A node whose cache is read-only or full: its parts go straight to the shared place, and no checkpoint is lost."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.levels import cached as cache
from tests.crash.harness import wait_for
from tests.levels.cluster import Cluster
from tests.levels.test_full import ARGUMENTS, EPOCHS, SAMPLES, Small, small
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.training.loop.small import Small as Alone

__all__ = ["small"]
STEPS = EPOCHS * 6


def spoil(job: Small, node: str, how: str) -> None:
    """The cache of a node takes nothing any more."""
    if how == "full":
        with contextlib.suppress(OSError), (job.inside(node) / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
        return
    place, deadline = str(job.folder / f"node.{node}"), time.monotonic() + 30
    command = ["nsenter", "-t", str(job._inside), "-m", "mount", "-o", "remount,bind,ro", place]
    while subprocess.run(command, stderr=subprocess.DEVNULL).returncode:  # while something is being written there
        assert time.monotonic() < deadline
        time.sleep(0.01)


def newest_elsewhere(job: Small, node: str) -> int:
    """The newest checkpoint that is whole, as the other one of the two nodes has it."""
    return max(job.steps("a" if node == "b" else "b"), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "how", "protect"),
    [
        ("b", "read-only", "Pairs()"),
        ("a", "read-only", "Xor(4)"),
        soak("a", "full", "Pairs()"),
        soak("b", "full", "ReedSolomon(4, 2)"),
        soak("a", "read-only", "Single()"),
    ],
)
def test_a_node_that_cannot_be_written_loses_no_checkpoint(
    node: str, how: str, protect: str, small: Small, straight: Straight
) -> None:
    job = small
    barrier = job.barrier("spoilt")  # or the run of a busy machine is at its end before there is a checkpoint
    launch = job.start("abcd", "--protect", protect, "--stop", f"12:{barrier}")
    job.wait_while_alive(launch, lambda: job.steps("a") and job.steps("b"), "checkpoints on the nodes")
    spoil(job, node, how)
    barrier.touch()
    before = job.ledger.last_step(0)
    job.wait_while_alive(launch, lambda: newest_elsewhere(job, node) > before + 9, "checkpoints go on being whole")
    rank = "ab".index(node)
    said = [event for event in job.events("cache-failing") if event.get("rank", 0) == rank]
    assert (len(said) == 1 or how == "full") and f"node.{node}" in said[0]["path"], said
    assert "straight to the shared place" in launch.ranks[rank].log()
    job.end_all(launch)
    step = newest_elsewhere(job, node)
    again = job.start("abcd", "--protect", protect)
    again.wait_well()
    assert job.ledger.resumed()[1] >= step, "nothing was lost"
    if how == "read-only":
        assert "straight to the shared place" in again.ranks[rank].log().partition("Traceback")[0]
    wait_for(lambda: job.flushed() and job.flushed()[-1] == STEPS, "the last one is in the shared place")
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    assert job.difference(straight(4, *ARGUMENTS)) is None
    left = [path.name for path in Path(str(job.paths.root)).glob("step-*")]
    assert len(left) <= 2 + 2, f"parts of old checkpoints do not stay: {left}"


@pytest.mark.parametrize("host_memory", [None, 2048])
def test_one_process_whose_cache_is_gone_for_a_while(host_memory: int | None, run_dir: Path, tmp_path: Path) -> None:
    """Alone all of a checkpoint goes straight to the shared place, and is committed there; streamed saves too."""
    cache = tmp_path / "cache"
    options: dict[str, Any] = {
        "levels": [stepwell.Node(cache), stepwell.Shared(every=99)],
        "policy": stepwell.Every(steps=1),
    }
    options["host_memory"] = host_memory
    run = Outspoken(run_dir, options)
    run.ckpt.restore()
    run.train_until(lambda: list(cache.glob("runs/*/step-*/manifest.json")))
    (cache / "runs").rename(tmp_path / "away")
    (cache / "runs").write_bytes(b"in the way")
    run.train_until(lambda: run.events("cache-failing"))
    run.train_until(lambda: len(list(run_dir.glob("step-*/manifest.json"))) >= 2)
    assert run.ckpt.status().shared_step is not None
    (cache / "runs").unlink()
    run.train_until(lambda: run.events("cache-works"))
    for _ in range(8):
        run.train_until(lambda: True)
    step = run.ckpt.status().committed_step
    run.ckpt.close(save=False)
    assert len(list(run_dir.glob("step-*/manifest.json"))) <= 3, "retention goes on there"
    again = Alone(run_dir, options)
    assert again.ckpt.restore() and again.ckpt.status().step == step
    again.ckpt.close(save=False)


class Outspoken(Alone):
    """Trains until something is so, in one loop: one that begins anew after an epoch's last batch would be refused."""

    def train_until(self, condition: Callable[[], Any], most: int = 400) -> None:
        for batch in self.batches:
            self.update(batch)
            self.ckpt.wait(60)
            most -= 1
            if condition():
                return
            assert most, "that does not come"

    @functools.cached_property
    def batches(self) -> Iterator[torch.Tensor]:
        return (batch for _ in self.ckpt.epochs(10_000) for batch in self.ckpt.data)


@pytest.mark.slow
def test_a_cache_that_is_emptied_under_a_live_agent_is_used_again(make_job: MakeJob, straight: Straight) -> None:
    """Somebody cleans up the node's disk: what comes later is held and protected there as before."""
    job = make_job("job", "--sleep", 0.03, "--protect", "Pairs()", "--flush", 99, *ARGUMENTS, kind=Cluster)
    assert isinstance(job, Cluster)
    launch = job.start("abcd")
    job.wait_committed(6, launch)
    (job.folder / "node.b").rename(job.folder / "cleaned")
    shutil.rmtree(job.folder / "cleaned", ignore_errors=True)  # the agent may be writing there
    reached = job.ledger.last_step(0)
    job.wait_committed(reached + 12, launch)
    job.end_all(launch)
    step = job.newest_step()
    level = cache.read_level(job.cache("a"), job.whole()[-1])
    assert level is not None and not level.degraded, level
    job.lose("b")  # it and a hold each other's
    job.start("axcd").wait_well()
    assert job.ledger.resumed()[1] >= step
    assert job.difference(straight(4, *ARGUMENTS)) is None
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", soak("b")])
def test_a_cache_that_cannot_be_read_either_costs_no_checkpoint(
    node: str, make_job: MakeJob, straight: Straight
) -> None:
    """A disk that has died answers every look with an error, as a file in the place of the directory does."""
    job = make_job("job", "--sleep", 0.03, "--protect", "Pairs()", "--flush", 2, *ARGUMENTS, kind=Cluster)
    assert isinstance(job, Cluster)
    launch = job.start("abcd", STEPWELL_GROUP_SECONDS="30")
    job.wait_committed(6, launch)
    place = job.folder / f"node.{node}"
    place.rename(job.folder / "died")
    place.write_bytes(b"")
    launch.wait_well()
    wait_for(lambda: job.flushed()[-1] == STEPS, "the end is in the shared place")
    assert job.difference(straight(4, *ARGUMENTS)) is None
