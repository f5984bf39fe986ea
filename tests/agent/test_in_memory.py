"""Snapshots that stay in memory: written only if their trainer dies, and offered to a successor in any case."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from stepwell.agent.pending import Stage
from stepwell.agent.queue import PendingQueue
from stepwell.handover.find_agents import find_orphan
from stepwell.handover.memory import PAGE, Arena, ArenaShape
from stepwell.handover.protocol import Durable, Released
from stepwell.storage.store.paths import RunPaths
from tests.agent.puppet import Puppet, here, make_orphan, verify, wait_for
from tests.agent.test_queue import complete, make


def committed(paths: RunPaths) -> list[int]:
    return sorted(int(path.parent.name[5:17]) for path in paths.root.glob("step-*/manifest.json"))


def adopt(run_dir: Path) -> tuple[Puppet, int]:
    """Become the successor of the dead trainer, and the step that is offered."""
    found = find_orphan(here(run_dir), 0)
    assert found is not None
    channel, offer, fds = found
    puppet = Puppet(run_dir)
    puppet.client.adopt(channel, offer, fds)
    return puppet, json.loads(offer.snapshots[0].record)["step"]


def test_they_are_not_written_while_the_trainer_lives(run_dir: Path) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    first = puppet.begin(1, 0, durable=False)
    puppet.complete(1, 0, first)
    second = puppet.begin(2, 1, durable=False)
    puppet.fill_half(2, 1, second)
    puppet.complete(2, 1, second)
    puppet.wait(Released, sequence=first)  # a newer one is complete
    third = puppet.begin(3, 0)
    puppet.complete(3, 0, third)
    puppet.wait(Durable, sequence=third)
    puppet.wait(Released, sequence=second)
    puppet.complete(4, 1, puppet.begin(4, 1, durable=False))
    assert puppet.close()  # a clean end writes nothing of it either
    assert [path.name for path in run_dir.glob("step-*")] == ["step-000000000003.l0001"]


@pytest.mark.parametrize(
    ("scene", "on_disk"),
    [
        ("newest_in_memory", [1, 3]),
        ("newest_in_memory_is_filled_again", [1]),
        ("newer_than_in_memory", [1, 3]),
    ],
)
def test_after_a_death_the_newest_complete_one_is_written_and_offered(
    scene: str, on_disk: list[int], run_dir: Path
) -> None:
    make_orphan(run_dir, linger=30, scene=scene)
    paths = RunPaths(run_dir)
    puppet, offered = adopt(run_dir)
    assert offered == on_disk[-1]
    wait_for(lambda: committed(paths) == on_disk, "the agent writes the complete snapshots")
    puppet.start(parent=1, step=offered)
    assert puppet.close()
    assert puppet.steps() == on_disk[::-1]
    for entry in puppet.good():
        verify(paths, entry)


def test_while_an_older_one_is_still_being_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_FAULT", "agent!fsync:EIO:4")  # shard, record and manifest of step 1, shard of step 2
    make_orphan(run_dir, linger=30, scene="older_still_to_be_written")
    puppet, offered = adopt(run_dir)
    assert offered == 3
    wait_for(lambda: 3 in committed(RunPaths(run_dir)), "the newest is written")
    puppet.start(parent=1, step=3)
    assert puppet.close()
    assert puppet.steps()[0] == 3


def test_killed_agents_are_told_again(run_dir: Path) -> None:
    puppet = Puppet(run_dir)
    puppet.start()
    puppet.complete(1, 0, puppet.begin(1, 0, durable=False))
    os.kill(puppet.client.pid, signal.SIGKILL)
    wait_for(lambda: puppet.events("agent-death"), "replaced")
    assert isinstance(puppet.save(3), Durable)
    assert puppet.close()
    assert puppet.steps() == [3]


def test_the_queue_keeps_the_newest_of_them() -> None:
    arena = Arena.allocate(ArenaShape(1, 3, PAGE, 0))
    queue = PendingQueue()
    durable, first, second = make(arena, 1, 0), make(arena, 2, 1), make(arena, 3, 2)
    first.is_wanted = second.is_wanted = False
    for item in (durable, first, second):
        queue.add(item)
    complete(durable)
    complete(first)
    assert queue.collect(durable) == [] and queue.complete()[0] is first
    assert queue.next_due() is durable and not queue.has_incomplete()
    durable.ended = Stage.COMMITTED
    assert queue.collect(None) == [durable] and queue.next_due() is None and not queue.is_waiting()
    complete(second)
    assert queue.collect(None) == [first] and queue.complete()[0] is second
    arena.claim(2)  # the trainer fills its slot again, unasked
    assert queue.complete()[0] is first
    arena.claim(1)
    assert queue.complete()[0] is durable
    arena.close()


def test_the_queue_wants_the_newest_when_the_trainer_is_dead() -> None:
    arena = Arena.allocate(ArenaShape(1, 3, PAGE, 0))
    queue = PendingQueue()
    durable, memory, half = make(arena, 1, 0), make(arena, 2, 1), make(arena, 3, 2)
    memory.is_wanted = half.is_wanted = False
    for item in (durable, memory, half):
        queue.add(item)
    complete(durable)
    complete(memory)
    queue.drop_incomplete()
    queue.want_newest()
    assert queue.items == [durable, memory] and memory.is_wanted and half.stage is Stage.DROPPED
    arena.close()
