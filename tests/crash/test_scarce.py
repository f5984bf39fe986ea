"""What a run needs is scarce: room on the disk, shared memory, host memory. Training goes on, and says so.

Mounts live in a mount namespace of their own: nothing outside sees them, and they end with the last process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.conftest import MakeRun
from tests.crash.harness import Ending, Namespace, Run, wait_for
from tests.crash.scenes import check_no_snapshot_lost

LARGE = "430000"
"""Width of a net whose state has 80 MB."""
LARGE_BYTES = 76 << 20
Mount = Callable[[str], Namespace]


@pytest.fixture
def mounted() -> Iterator[Mount]:
    """Mount something where only the trainers of this test see it."""
    made: list[Namespace] = []

    def mount(command: str) -> Namespace:
        try:
            made.append(Namespace(command))
        except OSError as error:
            pytest.skip(f"mounting in a namespace is not permitted here: {error}")
        return made[-1]

    yield mount
    for namespace in made:
        namespace.close()


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system(kind: str, mounted: Mount, make_run: MakeRun, reference: Ending, tmp_path: Path) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    if kind == "tmpfs":
        namespace = mounted(f"mount -t tmpfs -o size=1m tmpfs {disk}")
    else:
        subprocess.run(["truncate", "-s", "4M", str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)], check=True)
        namespace = mounted(f"mount -o loop {image} {disk}")
    run = make_run(where=disk / "run", namespace=namespace, TRAIN_PACE="0.02", TRAIN_EVERY="2")
    trainer = run.start()
    wait_for(lambda: run.newest_step() >= 6, "two good checkpoints")
    ballast = namespace.seen(disk) / "ballast"
    fill(ballast)
    wait_for(lambda: "Cannot write step" in trainer.log(), "the agent says that the disk is full")
    assert f"[Errno {errno.ENOSPC}]" in trainer.log()
    stuck = run.check_newest()
    good = run.good()
    assert len(good) >= 2
    for entry in good:
        run.verify(entry)
    ballast.unlink()
    wait_for(lambda: run.newest_step() > stuck, "saves work again")
    assert not trainer.has_ended()
    assert trainer.wait() == 0, trainer.log()
    run.check_resumes()
    assert run.ending().difference(reference, is_log_whole=False) is None
    run.check_nothing_left()


def test_a_small_dev_shm(mounted: Mount, make_run: MakeRun) -> None:
    """Containers have 64 MB there; the arena of a larger state is not bounded by it."""
    shared = Path("/dev/shm")
    namespace = mounted(f"mount -t tmpfs -o size=64m tmpfs {shared}")
    seen = os.statvfs(namespace.seen(shared))
    assert seen.f_blocks * seen.f_frsize == 64 << 20 < LARGE_BYTES
    run = make_run(namespace=namespace, TRAIN_WIDTH=LARGE, TRAIN_EVERY="6", TRAIN_EPOCHS="1")
    trainer = run.start()
    assert trainer.wait() == 0, trainer.log()
    (arena,) = run.events("arena")
    assert arena["slots"] == 2 and arena["slot_bytes"] > LARGE_BYTES and not arena["reason"]
    run.check_newest()
    run.check_nothing_left()


@pytest.mark.parametrize(("limit", "slots"), [(1 << 40, 2), (120 << 20, 1), (24 << 20, 0)])
def test_memory_that_the_kernel_refuses(limit: int, slots: int, make_run: MakeRun) -> None:
    """Fewer slots, then streamed saves; the first case is the control."""
    run = make_run(TRAIN_WIDTH=LARGE, TRAIN_EVERY="6", TRAIN_EPOCHS="1")
    trainer = run.start(TRAIN_FILE_BYTES=str(limit))
    assert trainer.wait() == 0, trainer.log()
    (arena,) = run.events("arena")
    assert arena["slots"] == slots and ("the kernel refused" in arena["reason"]) == (slots < 2)
    run.check_newest()
    run.check_nothing_left()


def check_cap(run: Run, slots: int, cap: int) -> None:
    arenas = run.events("arena")
    assert {arena["slots"] for arena in arenas} == {slots}
    for arena in arenas:
        assert "host_memory" in arena["reason"]
        assert 4096 + max(slots, 2 if slots == 0 else 1) * arena["slot_bytes"] <= cap


@pytest.mark.parametrize(("cap", "slots"), [(28672, 1), (16384, 0)])
def test_a_cap_on_host_memory(cap: int, slots: int, make_run: MakeRun, reference: Ending) -> None:
    """One slot, then streamed saves through a few pages: checkpoint and resume stay right, kill included."""
    run = make_run(TRAIN_HOST_MEMORY=str(cap))
    assert run.start(STEPWELL_CRASH="trainer!trigger.begin:0:6").wait() == -9
    run.finish()
    check_cap(run, slots, cap)
    strategies = {event["strategy"] for event in run.events("snapshot")}
    assert strategies == ({"overlap"} if slots else {"streamed"})
    check_no_snapshot_lost(run)
    run.check_identical(reference)
    run.check_nothing_left()


@pytest.mark.parametrize("point", ["shard.renamed", "record.renamed", "manifest.linked", "manifest.durable"])
def test_an_agent_that_dies_in_a_streamed_save(
    point: str, make_run: MakeRun, reference: Ending, tmp_path: Path
) -> None:
    """Training waits for a streamed save; the next agent gets it from the start."""
    run = make_run(TRAIN_HOST_MEMORY="16384")
    trainer = run.start(STEPWELL_CRASH=f"agent!{point}:0:3", STEPWELL_CRASH_MARK=str(tmp_path / "mark"))
    assert trainer.wait() == 0, trainer.log()
    assert (tmp_path / "mark").exists() and len(run.events("agent-death")) == 1
    check_no_snapshot_lost(run)
    run.check_identical(reference)
    run.check_nothing_left()


def test_a_fault_in_a_streamed_save(make_run: MakeRun, reference: Ending) -> None:
    run = make_run(TRAIN_HOST_MEMORY="16384")
    trainer = run.start(STEPWELL_FAULT="agent!open:ENOSPC:4,write:EIO:18,fsync:EDQUOT:13,link:EROFS:7")
    assert trainer.wait() == 0, trainer.log()
    assert len(run.events("persist-failed")) == 4
    run.check_identical(reference)
    run.check_nothing_left()
