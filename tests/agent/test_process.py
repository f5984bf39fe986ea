"""The agent as a process: what it is made of, what it survives, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.handover.agent_address import find_agents
from stepwell.handover.protocol import Durable, NewLayout
from tests.agent.puppet import Puppet, here, make_orphan, verify, wait_for

MOST_OWN_BYTES = 45 << 20


@pytest.fixture
def puppet(run_dir: Path) -> Iterator[Puppet]:
    puppet = Puppet(run_dir)
    puppet.start()
    yield puppet
    puppet.close()


def own_bytes(pid: int) -> int:
    """Memory that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return table["Private_Clean"] + table["Private_Dirty"]


def test_it_stays_small(puppet: Puppet) -> None:
    at_start = own_bytes(puppet.client.pid)
    for step in range(1, 30):
        assert isinstance(puppet.save(step), Durable)
    found = own_bytes(puppet.client.pid)
    print(f"own memory of the agent: {at_start / 1e6:.1f} MB at the start, {found / 1e6:.1f} MB after 29 saves")
    assert found < MOST_OWN_BYTES


def test_it_stays_small_when_the_state_is_large(run_dir: Path) -> None:
    """It writes from the shared memory: the state never goes through memory of its own."""
    puppet = Puppet(run_dir, leaf_bytes=64 << 20)
    puppet.start()
    assert isinstance(puppet.save(1), Durable) and isinstance(puppet.save(2), Durable)
    found = own_bytes(puppet.client.pid)
    print(f"own memory of the agent after two saves of 64 MiB: {found / 1e6:.1f} MB")
    assert found < MOST_OWN_BYTES
    assert puppet.close()


def test_it_stays_small_when_the_state_changes_its_form_all_the_time(run_dir: Path) -> None:
    """Each snapshot brings a layout of its own. Without a bound 50 of them were 100 MB."""
    puppet = Puppet(run_dir, leaf_bytes=20_000 * 4)
    puppet.start()
    found = []
    for step in range(1, 31):
        puppet.client.send_layout(crumbs(puppet.next_number(), 4_000))
        puppet.layout = puppet.next_number()
        puppet.client.send_layout(puppet.layout_message())
        assert isinstance(puppet.save(step), Durable)
        found.append(own_bytes(puppet.client.pid))
    print(f"own memory of the agent: {found[5] / 1e6:.1f} MB after 6 layouts, {found[-1] / 1e6:.1f} MB after 30")
    assert found[-1] - found[5] < 10 << 20
    assert puppet.close()


def crumbs(number: int, count: int) -> NewLayout:
    """A layout of many small leaves."""
    leaf = {"file": 0, "dtype": "uint8", "shape": [4], "role": "parameter", "device": "cpu", "global_shape": [4]}
    places = [{"name": f"model/{n:06d}", "start": 4 * n, "end": 4 * n + 4, "offsets": [0]} for n in range(count)]
    leaves = tuple({**leaf, **place} for place in places)
    return NewLayout(number, 4 * count, 0, leaves, versions={})


def test_it_loads_neither_torch_nor_numpy(puppet: Puppet) -> None:
    assert isinstance(puppet.save(1), Durable)
    maps = Path(f"/proc/{puppet.client.pid}/maps").read_text()
    assert "xxhash" in maps  # the check can see extension modules
    assert "torch" not in maps and "numpy" not in maps


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO])
def test_it_survives_signals_that_are_meant_for_the_job(number: int, puppet: Puppet) -> None:
    pid = puppet.client.pid
    os.kill(pid, number)
    for step in (1, 2, 3):
        assert isinstance(puppet.save(step), Durable)
    assert puppet.client.pid == pid and not puppet.events("agent-death")


def test_it_is_its_own_session(puppet: Puppet) -> None:
    """Ctrl-C at the terminal and a launcher's kill of the process group go to the trainer."""
    pid = puppet.client.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid


def test_a_clean_end_leaves_nothing(run_dir: Path) -> None:
    before = held_arenas()
    puppet = Puppet(run_dir)
    puppet.start()
    assert isinstance(puppet.save(1), Durable)
    assert find_agents(here(run_dir), 0) and held_arenas() != before  # the checks can see what they look for
    pid = puppet.client.pid
    assert puppet.close()
    assert not find_agents(here(run_dir), 0)
    assert held_arenas() == before
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    verify(puppet.paths, puppet.good()[0])


def test_without_a_successor_the_orphan_ends(run_dir: Path) -> None:
    make_orphan(run_dir, linger=0.2)
    wait_for(lambda: not find_agents(here(run_dir), 0), "the agent ends")


def held_arenas() -> list[str]:
    """Descriptors of this process that are arenas."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "memfd:stepwell" in target:
            found.append(name)
    return found
