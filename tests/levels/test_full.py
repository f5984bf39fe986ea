"""A node's own disk is full for a while: its checkpoints are void, older ones stay, the other nodes do not fill up."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Namespace
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight, soak

SAMPLES, EPOCHS = 96, 16
ARGUMENTS = ("--samples", SAMPLES, "--epochs", EPOCHS)


class Small(Cluster):
    """Nodes a and b are small file systems, in a mount namespace."""

    def mount(self) -> None:
        """Raises OSError if that is not permitted."""
        places = [self.folder / f"node.{node}" for node in "ab"]
        for place in places:
            place.mkdir()
        self.namespace = Namespace("\n".join(f"mount -t tmpfs -o size=4m tmpfs {place}" for place in places))
        self._inside = self.namespace.pid

    def inside(self, node: str) -> Path:
        assert self.namespace is not None
        return self.namespace.seen(self.folder / f"node.{node}")

    def steps(self, node: str) -> list[int]:
        """Checkpoints that are whole on a node, the oldest first."""
        found = sorted(self.inside(node).glob("runs/*/step-*/manifest.json"))
        return [int(path.parent.name[5:17]) for path in found]

    def directories(self, node: str) -> int:
        """Of how many checkpoints there are bytes."""
        return len({path.parent for path in self.inside(node).glob("runs/*/step-*/*.safetensors")})


@pytest.fixture
def small(make_job: MakeJob) -> Iterator[Small]:
    job = make_job("job", "--sleep", 0.03, "--flush", 99, *ARGUMENTS, kind=Small)
    assert isinstance(job, Small)
    try:
        job.mount()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"mounting in a namespace is not permitted here: {error}")
    yield job
    job.end_everything()
    assert job.namespace is not None
    job.namespace.close()


@pytest.mark.slow
@pytest.mark.parametrize(("full", "protect"), [soak("b", "Pairs()"), soak("a", "Pairs()"), soak("b", "Xor(4)")])
def test_a_node_without_room_costs_its_checkpoints_and_nothing_else(
    full: str, protect: str, small: Small, straight: Straight
) -> None:
    job, other = small, "a" if full == "b" else "b"
    launch = job.start("abcd", "--protect", protect)
    job.wait_while_alive(launch, lambda: len(job.steps(other)) == 2, "two checkpoints on the nodes")
    filler = job.inside(full) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    job.wait_step(job.ledger.last_step(0) + 6, launch)  # what was under way is over
    before, reached, most = job.steps(other), job.ledger.last_step(0), 0

    def has_gone_on() -> bool:
        nonlocal most
        most = max(most, job.directories(other))
        return job.ledger.last_step(0) >= reached + 24

    job.wait_while_alive(launch, has_gone_on, "training goes on")
    assert job.steps(other)[-1] >= before[-1] and len(job.steps(other)) >= 2, "older good ones stay"
    assert most <= 2 + 4 + 2, "kept, undecided, and under way"
    filler.unlink()
    newest = job.steps(other)[-1]
    job.wait_while_alive(launch, lambda: job.steps(other)[-1] > newest, "there is a newer one again")
    launch.wait_well()
    assert job.difference(straight(4, *ARGUMENTS)) is None
    job.check_nothing_left()
