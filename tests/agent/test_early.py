"""Writing begins while the snapshot is still being copied, and nothing of it counts before the verdict."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from stepwell.handover.find_agents import find_orphan
from stepwell.handover.protocol import Durable, Released, WriteFailed
from stepwell.storage.format.checksum import BLOCK_BYTES
from stepwell.storage.store import catalog
from stepwell.storage.store.paths import RunPaths
from tests.agent.puppet import Puppet, content, here, make_orphan, verify, wait_for


def directories(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.root.glob("step-*"))


def is_stopped(pid: int) -> bool:
    return ") T " in Path(f"/proc/{pid}/stat").read_text()


def test_the_bytes_are_on_disk_before_the_verdict_and_count_after_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_CRASH", "agent!shard.synced:0:1:stop")
    puppet = Puppet(run_dir, leaf_bytes=3 * BLOCK_BYTES)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.fill_all(1, 0, sequence)
    wait_for(lambda: is_stopped(puppet.client.pid), "all bytes are synced")
    os.kill(puppet.client.pid, signal.SIGCONT)
    (temporary,) = puppet.temporary()
    assert temporary.stat().st_size == puppet.live.nbytes
    assert [path.name for path in temporary.parent.iterdir()] == [temporary.name]
    puppet.arena.set_sequence(0, sequence)
    assert not puppet.good() and not any(isinstance(m, Durable) for m in puppet.messages)
    puppet.arena.set_verdict(0, sequence, is_good=True)
    puppet.wait(Released, sequence=sequence)
    assert puppet.close()
    (entry,) = puppet.good()
    verify(puppet.paths, entry)


def test_a_void_snapshot_leaves_nothing_and_is_no_failure(run_dir: Path) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.fill_half(1, 0, sequence)
    wait_for(puppet.temporary, "it is being written")
    puppet.arena.set_verdict(0, sequence, is_good=False)
    puppet.wait(Released, sequence=sequence)
    assert directories(puppet.paths) == []
    assert isinstance(puppet.save(2), Durable)
    assert puppet.close()
    assert puppet.steps() == [2] and not puppet.events("persist-failed")
    assert not any(isinstance(message, WriteFailed) for message in puppet.messages)


def test_suspects_are_read_when_it_is_complete(run_dir: Path) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.fill_all(1, 0, sequence)
    wait_for(puppet.temporary, "it is being written")
    puppet.arena.set_suspects(0, 1, 0)
    puppet.arena.set_sequence(0, sequence)
    puppet.arena.set_verdict(0, sequence, is_good=True)
    puppet.wait(Durable, sequence=sequence)
    assert puppet.close()
    (entry,) = puppet.good()
    assert entry.manifest is not None and entry.manifest.suspect == "1 non-finite, first model/w"


@pytest.mark.parametrize("scene", ["half_a_snapshot", "all_but_a_verdict"])
def test_what_never_becomes_complete_goes_with_its_trainer(scene: str, run_dir: Path) -> None:
    make_orphan(run_dir, linger=30, scene=scene)
    paths = RunPaths(run_dir)
    wait_for(lambda: directories(paths) == ["step-000000000001.l0001"], "the rest is gone")
    found = find_orphan(here(run_dir), 0)
    assert found is not None
    channel, offer, fds = found
    assert len(offer.snapshots) == 1 and '"step":1,' in offer.snapshots[0].record
    puppet = Puppet(run_dir)
    puppet.client.adopt(channel, offer, fds)
    puppet.start(parent=1, step=1)
    assert isinstance(puppet.save(2), Durable)
    assert puppet.close()
    assert puppet.steps() == [2, 1] and not puppet.events("persist-failed")
    for entry in puppet.good():
        verify(paths, entry)


@pytest.mark.parametrize("point", ["persist.begin", "shard.middle", "shard.written", "shard.synced"])
def test_an_agent_killed_in_between_is_replaced(
    point: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("STEPWELL_CRASH", f"agent!{point}:0:1")
    monkeypatch.setenv("STEPWELL_CRASH_MARK", str(mark))
    puppet = Puppet(run_dir, leaf_bytes=3 * BLOCK_BYTES)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.fill_all(1, 0, sequence)
    wait_for(lambda: puppet.events("agent-death"), "it died")
    assert not puppet.good()
    puppet.complete(1, 0, sequence)
    puppet.wait(Durable, sequence=sequence)
    assert puppet.close()
    (entry,) = puppet.good()
    verify(puppet.paths, entry)
    assert not [*run_dir.rglob("*.tmp")]


def test_what_a_killed_agent_wrote_of_a_void_snapshot_is_swept(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_CRASH", "agent!shard.written:0:1")
    monkeypatch.setenv("STEPWELL_CRASH_MARK", str(tmp_path / "mark"))
    puppet = Puppet(run_dir)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.fill_all(1, 0, sequence)
    wait_for((tmp_path / "mark").exists, "it died")
    puppet.arena.set_verdict(0, sequence, is_good=False)
    puppet.wait(Released, sequence=sequence)
    assert isinstance(puppet.save(2), Durable)
    assert puppet.close()
    assert directories(puppet.paths) == ["step-000000000002.l0001"] and not [*run_dir.rglob("*.tmp")]


def test_an_error_in_between_is_told_and_the_complete_snapshot_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "agent!write:EIO:1")
    puppet = Puppet(run_dir)
    puppet.start()
    sequence = puppet.begin(1, 0)
    puppet.fill_all(1, 0, sequence)
    failure = puppet.wait(WriteFailed, sequence=sequence)
    assert isinstance(failure, WriteFailed) and not failure.final
    puppet.complete(1, 0, sequence)
    puppet.wait(Durable, sequence=sequence)
    assert puppet.close()
    (entry,) = puppet.good()
    verify(puppet.paths, entry)


def test_a_slot_that_is_filled_anew_ends_what_was_being_written(run_dir: Path) -> None:
    """As when a snapshot could not be started: void, and free for the next one, before the agent looked."""
    puppet = Puppet(run_dir, leaf_bytes=3 * BLOCK_BYTES)
    puppet.start()
    first = puppet.begin(1, 0)
    puppet.fill_half(1, 0, first)
    wait_for(puppet.temporary, "it is being written")
    second = puppet.begin(2, 0)
    puppet.fill_half(2, 0, second)
    puppet.complete(2, 0, second)
    puppet.wait(Durable, sequence=second)
    assert puppet.close()
    assert puppet.steps() == [2] and directories(puppet.paths) == ["step-000000000002.l0001"]
    verify(puppet.paths, puppet.good()[0])


def test_closing_ends_what_is_not_complete(run_dir: Path) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    puppet.fill_half(1, 0, puppet.begin(1, 0))
    wait_for(puppet.temporary, "it is being written")
    assert puppet.close()
    assert directories(puppet.paths) == []


def test_a_complete_one_comes_before_one_that_is_still_copied(run_dir: Path) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    first = puppet.begin(1, 1)
    puppet.complete(1, 1, first)
    second = puppet.begin(2, 0)
    puppet.fill_half(2, 0, second)
    puppet.wait(Durable, sequence=first)
    puppet.wait(Released, sequence=first)  # while the second is waited for
    puppet.complete(2, 0, second)
    puppet.wait(Durable, sequence=second)
    assert puppet.close()
    assert [event["step"] for event in puppet.events("commit")] == [1, 2]


def test_many_snapshots_that_arrive_in_pieces(run_dir: Path) -> None:
    """Some become void half way. All others are committed whole."""
    draw = random.Random(5)
    puppet = Puppet(run_dir, leaf_bytes=2 * BLOCK_BYTES + 12_345)
    puppet.start()
    expected = []
    for step in range(1, 16):
        slot, sequence, is_good = step % 2, puppet.begin(step, step % 2), draw.random() < 0.7
        whole = puppet.live.header + content(step, puppet.live.nbytes - len(puppet.live.header))
        image, done = puppet.arena.image(slot, puppet.live.nbytes), 0
        while done < len(whole):
            end = min(len(whole), done + draw.randrange(1, BLOCK_BYTES))
            image[done:end] = whole[done:end]
            puppet.arena.set_filled(slot, sequence, end)
            done = end if is_good or draw.random() < 0.7 else len(whole)
        image.release()
        if is_good:
            puppet.complete(step, slot, sequence)
            puppet.wait(Durable, sequence=sequence)
            expected.append(step)
            (entry,) = [entry for entry in puppet.good() if entry.id.step == step]
            verify(puppet.paths, entry)
        else:
            puppet.arena.set_verdict(slot, sequence, is_good=False)
        puppet.wait(Released, sequence=sequence)
    assert puppet.close()
    assert [event["step"] for event in puppet.events("commit")] == expected
    assert not [entry for entry in catalog.scan(puppet.paths) if not entry.is_committed]
