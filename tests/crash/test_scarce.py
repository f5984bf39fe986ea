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
from tests.crash.harness import Ending, Run, Server, wait_for
from tests.crash.scenes import check_no_snapshot_lost

LARGE = "430000"
"""Width of a net whose state has 80 MB."""
LARGE_BYTES = 80 << 20
MakeServer = Callable[[str], Server]


@pytest.fixture
def in_namespace() -> Iterator[MakeServer]:
    """A fork server in its own mount namespace, after a shell command that mounts something there."""
    servers: list[Server] = []
    command = ["unshare", "--mount", "--propagation", "private"] + ([] if os.getuid() == 0 else ["--map-root-user"])

    def make(mount: str) -> Server:
        tried = subprocess.run([*command, "sh", "-ec", mount], capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"mounting in a namespace is not permitted here: {tried.stderr.strip()}")
        servers.append(Server([*command, "sh", "-ec", mount + '\\nexec "$@"', "sh"]))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system(
    kind: str, in_namespace: MakeServer, make_run: MakeRun, reference: Ending, tmp_path: Path
) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    if kind == "tmpfs":
        server = in_namespace(f"mount -t tmpfs -o size=1m tmpfs {disk}")
    else:
        make = f"truncate -s 4M {image} && mkfs.ext4 -q -F -O ^has_journal {image}"
        subprocess.run(["sh", "-ec", make], check=True)
        server = in_namespace(f"mount -o loop {image} {disk}")
    run = make_run(on=server, where=disk / "run", TRAIN_PACE="0.03", TRAIN_EVERY="2")
    trainer = run.start()
    wait_for(lambda: run.newest_step() >= 6, "two good checkpoints")
    ballast = server.seen(disk) / "ballast"
    fill(ballast)
    wait_for(lambda: "persist failed" in trainer.log(), "the agent says that the disk is full")
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


def test_a_small_dev_shm(in_namespace: MakeServer, make_run: MakeRun) -> None:
    """Containers have 64 MB there; the arena of a larger state is not bounded by it."""
    server = in_namespace("mount -t tmpfs -o size=64m tmpfs /dev/shm")
    run = make_run(on=server, TRAIN_WIDTH=LARGE, TRAIN_EVERY="6", TRAIN_EPOCHS="1")
    assert os.statvfs(server.seen(Path("/dev/shm"))).f_blocks * os.statvfs("/dev/shm").f_bsize <= 64 << 20
    trainer = run.start()
    assert trainer.wait() == 0, trainer.log()
    (arena,) = run.events("arena")
    assert arena["slots"] == 2 and arena["slot_bytes"] > LARGE_BYTES * 0.9 and not arena["reason"]
    run.check_newest()
    run.check_nothing_left()


def test_a_memory_limit_that_the_machine_states(in_namespace: MakeServer, make_run: MakeRun, tmp_path: Path) -> None:
    """The limit of the own memory cgroup counts, not only the free memory of the machine."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":")[2] for line in lines if line.split(":")[1] == "memory"), "/")
    folder = tmp_path / "cgroup" / "memory" / own.lstrip("/")
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{300 << 20}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{200 << 20}\n")
    (folder / "memory.stat").write_text("cache 0\ntotal_inactive_file 1048576\n")
    (tmp_path / "proc-cgroup").write_text(f"4:memory:{own}\n")
    server = in_namespace(
        f"mount --bind {tmp_path / 'cgroup'} /sys/fs/cgroup && umask 022"  # what a container with such a limit sees
    )
    run = make_run(on=server, TRAIN_WIDTH=LARGE, TRAIN_EVERY="6", TRAIN_EPOCHS="1")
    trainer = run.start()
    assert trainer.wait() == 0, trainer.log()
    (arena,) = run.events("arena")
    assert arena["slots"] == 1 and "free host memory" in arena["reason"]
    run.check_newest()


@pytest.mark.parametrize(("spare", "slots"), [(1 << 40, 2), (120 << 20, 1), (24 << 20, 0)])
def test_memory_that_the_kernel_refuses(spare: int, slots: int, make_run: MakeRun) -> None:
    """Fewer slots, then streamed saves; the first case is the control."""
    run = make_run(TRAIN_WIDTH=LARGE, TRAIN_EVERY="6", TRAIN_EPOCHS="1")
    trainer = run.start(TRAIN_SPARE_BYTES=str(spare))
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
