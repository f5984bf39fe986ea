"""The shared place is read-only, full, hangs or does not answer, and comes back: training goes on meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.levels import cached
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Namespace, wait_for
from tests.crash.test_power import PowerDisk, need_fuse
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Launch

SAMPLES, EPOCHS, STEPS = 96, 16, 96
ARGUMENTS = ("--samples", SAMPLES, "--epochs", EPOCHS)


class Apart(Cluster):
    """Its run directory is a file system of its own, in a mount namespace."""

    def mount(self) -> None:
        """Raises OSError if that is not permitted."""
        self.where.mkdir()
        image = self.folder / "image"
        subprocess.run(["truncate", "-s", "16M", image], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, stdout=subprocess.DEVNULL)
        self.namespace = Namespace(f"mount -o loop {image} {self.where}")
        self._inside = self.namespace.pid
        self.paths = RunPaths(self.namespace.seen(self.where))

    def do(self, *command: str) -> None:
        """Run something in the namespace."""
        subprocess.run(["nsenter", "-t", str(self._inside), "-m", *command, str(self.where)], check=True)

    def fill(self) -> None:
        """Until there is no room."""
        with contextlib.suppress(OSError), (Path(str(self.paths.root)) / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    def steps_held(self) -> int:
        """Checkpoints of which something lies on the fullest node."""
        return max(len(cached.steps(paths)) for paths in self.caches_of(self.run_id))

    def caches_of(self, run: str) -> list[RunPaths]:
        return [RunPaths(path / "runs" / run) for path in sorted(self.folder.glob("node.*"))]

    def newest_on_nodes(self) -> int:
        found = [id.step for paths in self.caches_of(self.run_id) for id in cached.steps(paths)]
        return max(found, default=0)


class Remote(Apart):
    """Its run directory is served by a process, as by a network: who waits for it can be ended, unlike with a disk."""

    def mount(self) -> None:
        disk = PowerDisk(self.folder)
        self.namespace, self._inside = disk, disk.pid
        self.where = disk.mount
        self.paths = RunPaths(disk.seen(self.where))

    def signal(self, number: int) -> None:
        os.kill(self._inside, number)


TROUBLE: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "read-only": (lambda job: job.do("chattr", "+i"), lambda job: job.do("chattr", "-i")),
    "full": (Apart.fill, lambda job: (Path(str(job.paths.root)) / "filler").unlink()),
    "hangs": (lambda job: job.do("fsfreeze", "-f"), lambda job: job.do("fsfreeze", "-u")),
    "does not answer": (lambda job: job.signal(signal.SIGSTOP), lambda job: job.signal(signal.SIGCONT)),
}


@pytest.fixture
def apart(request: pytest.FixtureRequest, make_job: MakeJob) -> Iterator[Apart]:
    """Of the kind that the test's trouble needs."""
    _, ends = TROUBLE[request.getfixturevalue("trouble")]
    kind = Remote if ends is TROUBLE["does not answer"][1] else Apart
    if kind is Remote:
        need_fuse()
    job = make_job(
        "job", "--sleep", 0.03, "--protect", "Pairs()", "--flush", 2, *ARGUMENTS, kind=kind, STEPWELL_CLOSE_SECONDS="3",
        STEPWELL_LINGER="20",  # so long an agent stays that had something pending when its trainer left
    )  # fmt: skip
    assert isinstance(job, Apart)
    try:
        job.mount()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"mounting in a namespace is not permitted here: {error}")
    yield job
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        ends(job)
    job.end_everything()
    assert job.namespace is not None
    job.namespace.close()


def begin(job: Apart) -> Launch:
    launch = job.start("aabb")
    job.wait_while_alive(launch, lambda: job.flushed(), "something is in the shared place")
    job.run_id = next(iter((job.folder / "node.a" / "runs").iterdir())).name
    return launch


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("trouble", [soak("read-only"), soak("full"), "hangs", soak("does not answer")])
def test_a_shared_place_in_trouble_holds_nothing_up(trouble: str, apart: Apart, straight: Straight) -> None:
    job, (begins, ends) = apart, TROUBLE[trouble]
    launch = begin(job)
    begins(job)
    try:
        before, most = job.newest_on_nodes(), 0

        def has_gone_on() -> bool:
            nonlocal most
            most = max(most, job.steps_held())
            return job.newest_on_nodes() >= before + 30

        job.wait_while_alive(launch, has_gone_on, "the nodes' checkpoints go on")
        assert most <= 2 + 2 + 3, "kept, waiting to be carried, and under way"
    finally:
        ends(job)
    launch.wait_well()
    wait_for(lambda: job.flushed()[-1] == STEPS, "the end is in the shared place")
    reference = straight(4, *ARGUMENTS)
    assert job.ledger.problem(SAMPLES, EPOCHS) is None
    assert job.difference(reference) is None
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [soak("full"), soak("read-only"), soak("does not answer")])
def test_a_run_ends_though_the_shared_place_does_not_come_back(trouble: str, apart: Apart, straight: Straight) -> None:
    """No agent stays for ever; the nodes have the end, and the next start carries it on."""
    job, (begins, ends) = apart, TROUBLE[trouble]
    launch = begin(job)
    job.wait_step(STEPS - 20, launch)
    begins(job)
    try:
        launch.wait_well(90)
        job.wait_gone(60)
    finally:
        ends(job)
    assert STEPS not in job.flushed()
    job.start("aabb").wait_well()
    wait_for(lambda: job.flushed()[-1] == STEPS, "the end is in the shared place")
    assert list(job.ledger.resumed().values())[-1] == STEPS
    assert job.difference(straight(4, *ARGUMENTS)) is None
    job.check_nothing_left()
