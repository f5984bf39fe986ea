"""Power loss: the file system forgets what was not synced, and any part of it may have reached the disk.

The power goes at every operation of a few commits and prunes in turn. Afterwards whatever was reported durable is
there and verifies, and nothing is listed that does not. With either kind of sync switched off the same test fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.agent.files import writer
from stepwell.agent.target import shared_target
from stepwell.agent.target.shared_target import Persister
from stepwell.errors import DamagedError, StepwellError
from stepwell.events import journal
from stepwell.faults import OF_CHAINS, OF_LEVELS, OF_MANY, POINTS
from stepwell.storage.store import catalog, commit, files, retention, spare
from stepwell.storage.store.paths import RunPaths
from stepwell.types import Keep
from tests.agent.puppet import Puppet, verify
from tests.crash.conftest import MakeRun
from tests.crash.harness import HERE, Ending, Namespace, report, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
SAVES = 4
FROZEN_BYTES = 3_000
DRAWS = [("nothing", 0), ("everything", 0)] + [(mode, seed) for mode in ("prefix", "any") for seed in range(4)]
ELSEWHERE = OF_MANY | OF_LEVELS | OF_CHAINS
AGENT_POINTS = [point for point, text in POINTS.items() if text.startswith("agent") and point not in ELSEWHERE]


class PowerDisk(Namespace):
    """A mounted forgetful disk, in a mount namespace of its own."""

    def __init__(self, folder: Path) -> None:
        mount = folder / "mount"
        mount.mkdir()
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            sys.executable,
            str(HERE / "powerfs.py"),
            str(mount),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid, self.mount = self._process.pid, mount
        self.root = self.seen(mount)
        self._dumps = folder / "dumps"
        self._dumps.mkdir()
        wait_for(lambda: self.root.is_mount() or self._process.poll() is not None, "mounted")
        assert self._process.poll() is None, "the file system did not start; its error is above"

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    @contextlib.contextmanager
    def surviving(self, name: str, mode: str, seed: int) -> Iterator[Path]:
        """What a cut right now would leave of a directory below the root."""
        target = self._dumps / f"{name}-{mode}-{seed}"
        self.ask(dump=str(target), of=name, mode=mode, seed=seed)
        yield target
        shutil.rmtree(target)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def need_fuse() -> None:
    """Skip where a disk of this kind cannot be mounted."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"FUSE is not there: {error} (`make soak` installs it where it may)")
    if os.getuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting FUSE in a namespace needs root and /dev/fuse")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PowerDisk]:
    need_fuse()
    monkeypatch.setattr("stepwell.agent.files.sink.file_system_type", lambda root: "ext4")  # as which it stands here,
    monkeypatch.setattr(spare, "_is_ours_alone", lambda path: True)  # but FUSE has no leases; nobody else reads it
    disk = PowerDisk(tmp_path)
    yield disk
    disk.close()


class Killed(BaseException):
    """Stands for the SIGKILL of an agent at a point: nothing of it runs on."""


class Work:
    """Commits and prunes on the disk, as the agent does them. `durable`: the steps reported so."""

    def __init__(self, root: Path) -> None:
        self.puppet = Puppet(root, frozen_bytes=FROZEN_BYTES)
        self.durable: list[int] = []

    def __enter__(self) -> Work:
        self.puppet.open()
        self.puppet.prepare()
        self.puppet.fill_frozen()
        self._persister = self._new_agent()
        return self

    def _new_agent(self) -> Persister:
        return Persister(
            self.puppet.paths, journal.EventLog(Path(os.devnull), who="agent"), lineage=self.puppet.lineage
        )

    def save(self, step: int) -> None:
        """One save; an agent that is killed in it is replaced by one that begins again."""
        self.puppet.complete(step, step % 2, self.puppet.next_number())
        try:
            self._persist(step)
        except Killed:
            self._persister = self._new_agent()
            self._persist(step)

    def _persist(self, step: int) -> None:
        self._persister.persist(self.puppet.pending(step, step % 2))
        if step not in self.durable:
            self.durable.append(step)
        self._persister.prune(self.puppet.lineage, Keep())

    def __exit__(self, *_: object) -> None:
        self.puppet.close()


def judge(root: Path, durable: list[int]) -> str | None:
    """What is wrong with what survived, or None."""
    paths, good = RunPaths(root), []
    for entry in catalog.scan(paths):
        if entry.is_live and entry.is_committed:
            try:
                if entry.manifest is None:
                    return f"{entry.id} is listed, but damaged: {entry.damage}"
                verify(paths, entry)
            except DamagedError as error:
                return f"{entry.id} is listed, but: {error}"
            good.append(entry.id.step)
    if durable and durable[-1] not in good:
        return f"step {durable[-1]} was reported durable; there are {good}"
    return None


def cut_everywhere(disk: PowerDisk) -> tuple[int, int, list[str]]:
    """Cut at every operation in turn. Returns operations, survivors looked at, and what was wrong with them."""
    problems, looked, number = [], 0, 0
    while True:
        number += 1
        name, durable = f"cut-{number}", []
        disk.ask(arm=number)
        with contextlib.suppress(OSError, StepwellError), Work(disk.root / name / "run") as work:
            durable = work.durable
            for step in range(1, SAVES + 1):
                work.save(step)
        state = disk.ask(state=True)
        for mode, seed in DRAWS:
            with disk.surviving(name, mode, seed) as root:
                looked += 1
                if problem := judge(root / "run", durable):
                    problems.append(f"cut at operation {number}, {mode} {seed}: {problem}")
        if not state["is_off"]:
            return number - 1, looked, problems


def test_a_cut_at_every_operation(disk: PowerDisk) -> None:
    operations, looked, problems = cut_everywhere(disk)
    report(
        f"power cut, at each of {operations} operations of {SAVES} commits with prunes: {looked} survivors, all right"
    )
    assert not problems, problems[:5]
    assert operations > 80


@pytest.mark.parametrize("switched_off", ["sync", "sync_directory"])
def test_control_without_sync_the_cut_is_noticed(
    switched_off: str, disk: PowerDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, switched_off, lambda *_: None)
    _, looked, problems = cut_everywhere(disk)
    report(f"power cut, control without {switched_off}: {len(problems)} of {looked} survivors are wrong")
    assert problems


@pytest.mark.parametrize("point", AGENT_POINTS)
def test_a_cut_after_an_agent_was_killed_and_replaced(
    point: str, disk: PowerDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dead agent left unsynced is synced by the next one before it reports anything."""
    passed: list[str] = []

    def kill_once(name: str, rank: int = 0) -> None:
        if name == point:
            passed.append(name)
            if len(passed) == 3:
                raise Killed

    for module in (shared_target, writer, commit, files, retention, spare):
        if hasattr(module, "crash_point"):
            monkeypatch.setattr(module, "crash_point", kill_once)
    with Work(disk.root / "killed" / "run") as work:
        for step in range(1, 7):
            work.save(step)
            for mode, seed in DRAWS:
                with disk.surviving("killed", mode, seed) as root:
                    assert judge(root / "run", work.durable) is None
    assert len(passed) >= 3 and work.durable == [1, 2, 3, 4, 5, 6]


def test_training_goes_on_after_a_cut(disk: PowerDisk, make_run: MakeRun, reference: Ending, tmp_path: Path) -> None:
    """Real trainers and agents: the power goes at a random operation, and the run is continued from what survived."""
    drawn = int(os.environ.get("STEPWELL_SOAK_SEED") or secrets.randbits(20))
    chance, resumed = random.Random(drawn), 0
    for number in range(20):
        name = f"train-{number}"
        disk.ask(arm=chance.randint(1, 400))
        run = make_run(name, where=disk.mount / name / "run", namespace=disk, TRAIN_PACE="0.004")
        trainer = run.start()
        wait_for(lambda trainer=trainer: disk.ask(state=True)["is_off"] or trainer.has_ended(), "the power is gone")
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        run.kill_agents()
        where = tmp_path / f"survived-{number}"
        disk.ask(dump=str(where), of=name, mode=chance.choice(("nothing", "prefix", "any")), seed=number)
        after = make_run(f"after-{number}", where=where / "run")
        resumed += after.check_newest() > 0
        after.finish()
        assert after.ending().difference(reference, is_log_whole=False) is None, f"STEPWELL_SOAK_SEED={drawn}"
        after.check_nothing_left()
    report(f"power cut, 20 trainings: {resumed} resumed, all identical; STEPWELL_SOAK_SEED={drawn}")
    assert resumed >= 5
