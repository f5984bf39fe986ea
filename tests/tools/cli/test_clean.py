"""`clean`: what dead processes left behind goes, and nothing of a live run ever does."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.events.journal import read_events
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.commands import clean as module
from stepwell.tools.cli.liveness import Life, look_for_life
from tests.tools.cli.commands import Training, good, listing, stepwell, wait_for

DEAD = Life(False, "switched off for a control", None, (), None, True)
DAYS = 3 * 86400.0


def leave(run: Path) -> list[Path]:
    """Temporary files in every place where a kill may leave one; the number is of no process (above the limit)."""
    left = [
        run / "run.json.4194999.tmp",
        run / "nodes.json.77.4194999.tmp",
        run / "secret.77.4194999.tmp",
        run / "lineage" / "0003.json.4194999.tmp",
        run / "step-000000000008.l0002" / "manifest.json.4194999.tmp",
        run / "step-000000000008.l0002" / "rank-00000.safetensors.tmp",
    ]
    for path in left:
        path.write_bytes(b"x" * 10)
    return left


def test_what_a_crash_left_goes(crashed: Path) -> None:
    left = crashed / "step-000000000010.l0003"
    size = sum(path.stat().st_size for path in left.iterdir())
    assert any(path.name.endswith(".tmp") for path in left.iterdir())  # the agent died with the manifest unlinked
    before = listing(crashed)
    answer = good("clean", crashed)
    assert f"removed  uncommitted  {left.name}" in answer.out
    assert answer.out.splitlines()[-1].startswith(f"{crashed}: 1 leftover removed, ")
    assert not left.exists()
    assert listing(crashed) == {name: n for name, n in before.items() if not name.startswith(left.name)}
    assert sum(before.values()) - sum(listing(crashed).values()) == size
    assert good("clean", crashed).out == f"{crashed}: nothing to clean\n"


def test_temporary_files_go_and_nothing_else(run: Path) -> None:
    before = listing(run)
    left = leave(run)
    mine = run / "notes.tmp"  # not a name of ours
    mine.write_text("mine")
    (run / "step-000000000008.l0002" / "link.tmp").symlink_to(run / "run.json")
    document = good("clean", run, "--json").json
    (result,) = document["runs"]
    assert set(result) == {"run", "removed", "removed_bytes", "left_alone", "failed"}
    assert {item["path"] for item in result["removed"]} == {str(path.relative_to(run)) for path in left}
    assert result["removed_bytes"] == 10 * len(left)
    assert mine.read_text() == "mine"
    mine.unlink()
    (run / "step-000000000008.l0002" / "link.tmp").unlink()
    assert listing(run) == before
    good("verify", run)


def test_several_runs_and_a_wrong_name_ends_nothing_half_way(crashed: Path, run: Path) -> None:
    answer = stepwell("clean", crashed, run / "nowhere")
    assert (answer.code, answer.out) == (2, "")
    assert (crashed / "step-000000000010.l0003").exists()
    out = good("clean", crashed, run).out
    assert "1 leftover removed" in out
    assert f"{run}: nothing to clean" in out


def test_a_temporary_file_of_a_living_process_stays(run: Path) -> None:
    """A trainer that is starting has not taken the progress file over yet; its number is in the file's name."""
    path = run / "lineage" / f"0003.json.{os.getpid()}.tmp"
    path.write_text("x")
    out = good("clean", run).out
    assert path.exists()
    assert "skipped: another process has just written 0003.json" in " ".join(out.split())


# A live run


def failing(run: Path, start: Callable[..., Training]) -> Training:
    """A run whose writes fail, so that an uncommitted directory is there for as long as it lives."""
    broken = {"STEPWELL_FAULT": "agent!fsync:EIO:1+"}
    training = start(run, "--until-file", run / "stop", "--every-step", "--restore-step", 8, **broken)
    wait_for(lambda: [e for e in read_events(run / "events.jsonl") if e["kind"] == "persist-failed"], "a failed write")
    wait_for(lambda: uncommitted(run), "an uncommitted directory")
    return training


def uncommitted(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*.l0003") if not (path / "manifest.json").exists())


def test_nothing_of_a_live_run_goes_until_trainer_and_agent_are_dead(run: Path, start: Callable[..., Training]) -> None:
    training = failing(run, start)
    os.kill(training.process.pid, 19)  # SIGSTOP: the directory does not change while we look
    answer = good("clean", run)
    assert f"skipped: its trainer, process {training.process.pid}, is running" in " ".join(answer.out.split())
    assert uncommitted(run)
    training.kill()
    wait_for(lambda: [e for e in read_events(run / "events.jsonl") if e["kind"] == "trainer-death"], "the agent's look")
    answer = good("clean", run)
    assert f"its agent, process {training.agent_pid}, still holds memory" in " ".join(answer.out.split())
    assert uncommitted(run)
    training.kill_agent()
    answer = good("clean", run)
    assert "removed  uncommitted" in answer.out
    assert not uncommitted(run)
    good("verify", run)


def test_control_without_looking_for_life_a_live_run_loses_its_directory(
    run: Path, start: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = failing(run, start)
    os.kill(training.process.pid, 19)
    training.kill_agent()  # so that nobody makes the directory again
    monkeypatch.setattr(module, "look_for_life", lambda paths: DEAD)
    assert good("clean", run, "--json").json["runs"][0]["removed"]
    assert not uncommitted(run)


def test_cleaning_again_and_again_during_training_removes_nothing(run: Path, start: Callable[..., Training]) -> None:
    """A healthy run that saves after every step: its uncommitted directories come and go under our eyes."""
    stop = run / "stop"
    training = start(run, "--until-file", stop, "--every-step", "--restore-step", 8)
    deadline, cleaned, seen = time.monotonic() + 60, 0, 0
    while (cleaned < 30 or not seen) and time.monotonic() < deadline:
        seen += len(uncommitted(run))
        (result,) = good("clean", run, "--json").json["runs"]
        assert result["removed"] == []
        assert "is running" in result["left_alone"][0]
        cleaned += 1
    assert seen, "no uncommitted directory was ever there: the test shows nothing"
    stop.touch()
    assert training.process.wait(60) == 0
    failed = [e for e in read_events(run / "events.jsonl") if e["kind"] in ("persist-failed", "damage", "prune-failed")]
    assert failed == []
    good("verify", run)
    training.wait_for_agent()
    assert good("clean", run).out == f"{run}: nothing to clean\n"


def test_a_checkpoint_committed_while_we_look_stays(
    crashed: Path, made_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of a dead trainer commits and ends between our listing and our look for life."""
    manifest = crashed / "step-000000000010.l0003" / "manifest.json"

    def commit_then_die(paths: RunPaths) -> Life:
        shutil.copy(made_run / "step-000000000008.l0002" / "manifest.json", manifest)
        return DEAD

    monkeypatch.setattr(module, "look_for_life", commit_then_die)
    assert good("clean", crashed, "--json").json["runs"][0]["removed"] == []
    assert manifest.exists()


# Who counts as alive


def forge(run: Path, *, pid: int, started: float, boot: bytes | None = None, namespace: int | None = None) -> None:
    """The progress file of somebody else. Everything that tells an age is made old; tests then touch what they mean."""
    path = run / "progress"
    layout = struct.Struct("<8sIIQIId16s")
    magic, lineage, here, step, _, agent, _, this_boot = layout.unpack_from(path.read_bytes())
    fields = (magic, lineage, here if namespace is None else namespace, step, pid, agent, started)
    path.write_bytes(layout.pack(*fields, this_boot if boot is None else boot).ljust(4096, b"\0"))
    for name in ("progress", "events.jsonl", "run.json", "lineage"):
        os.utime(run / name, (time.time() - DAYS, time.time() - DAYS))


def is_alive(run: Path) -> bool:
    return look_for_life(RunPaths(run)).is_alive


def test_the_process_that_wrote_the_file_is_alive(run: Path) -> None:
    forge(run, pid=os.getpid(), started=time.time())
    assert is_alive(run)


def test_a_later_process_with_the_same_number_is_not_it(run: Path) -> None:
    forge(run, pid=os.getpid(), started=time.time() - DAYS)
    assert not is_alive(run)
    os.utime(run / "progress")  # written just now: then the clock was set, and it is
    assert is_alive(run)


def test_a_process_that_waits_to_be_reaped_is_dead(run: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "a zombie")
        forge(run, pid=pid, started=time.time() + 1)
        assert not is_alive(run)
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("elsewhere", [{"boot": b"another machine."}, {"namespace": 12345}])
def test_a_run_elsewhere_is_alive_while_its_files_are_touched(run: Path, elsewhere: dict[str, bytes]) -> None:
    """Its process number means nothing here, whether or not a process of that number runs here."""
    for pid in (4194999, os.getpid()):
        forge(run, pid=pid, started=time.time(), **elsewhere)  # type: ignore[arg-type]
        assert not is_alive(run)
        os.utime(run / "progress", (time.time() - 60, time.time() - 60))
        assert is_alive(run)
        left = leave(run)
        assert good("clean", run, "--json").json["runs"][0]["removed"] == []
        assert all(path.exists() for path in left)


def test_leftovers_elsewhere_go_once_they_are_old(run: Path) -> None:
    forge(run, pid=4194999, started=time.time(), boot=b"another machine.")
    left = leave(run)
    os.utime(run / "lineage", (time.time() - DAYS, time.time() - DAYS))  # `leave` wrote into it
    assert good("clean", run, "--json").json["runs"][0]["removed"] == []  # somebody there may just be starting
    for path in left:
        os.utime(path, (time.time() - DAYS, time.time() - DAYS))
    assert len(good("clean", run, "--json").json["runs"][0]["removed"]) == len(left)


def test_a_run_that_says_nothing_of_its_process_is_judged_by_age(run: Path) -> None:
    (run / "progress").unlink()
    for name in ("events.jsonl", "run.json", "lineage"):
        os.utime(run / name, (time.time() - DAYS, time.time() - DAYS))
    assert not is_alive(run)
    os.utime(run / "lineage")  # a trainer that is starting makes its lineage first
    assert is_alive(run)
