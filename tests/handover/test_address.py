"""Agents are found by names that only their run can make or recognise; nobody else's socket is taken for one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from stepwell.handover import agent_address
from stepwell.handover.agent_address import FoundSocket, connect, find_agents, find_pids, find_ranks, listen, place
from stepwell.handover.channel import is_same_user, peer
from stepwell.ranks.wire.secret import draw_secret


@pytest.fixture
def where() -> str:
    return place(bytes.fromhex(draw_secret()), "run", "1.2")


def named(name: str) -> socket.socket:
    """Somebody's socket, which listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    sock.listen()
    return sock


def test_an_agent_is_found_by_run_and_rank_and_gone_with_its_socket(where: str) -> None:
    assert find_agents(where, 0) == []
    with listen(where, 0):
        (found,) = find_agents(where, 0)
        assert find_agents(where, 1) == [] and find_ranks(where) == [0]
        channel = connect(found, timeout=5)
        assert channel is not None
        assert is_same_user(channel.socket) and peer(channel.socket) == (os.getpid(), os.getuid())
        channel.close()
    assert find_agents(where, 0) == []
    assert connect(found, timeout=5) is None


def test_another_run_another_directory_and_no_key_find_nothing() -> None:
    key = bytes.fromhex(draw_secret())
    with listen(place(key, "run", "1.2"), 0):
        assert find_ranks(place(key, "run", "1.2")) == [0]
        others = place(key, "run", "1.3"), place(key, "run2", "1.2"), place(bytes(32), "run", "1.2"), ""
        assert [find_ranks(other) for other in others] == [[], [], [], []]


def test_the_name_tells_nothing_of_the_run(where: str) -> None:
    with listen(where, 3):
        (found,) = find_agents(where, 3)
        assert where not in found.name and len(found.name) < 100
        assert found.pid == os.getpid() and found.is_here and found.may_live


NAMES = {
    "no UTF-8": lambda real: b"\xff\xfe stepwell/",
    "line ends": lambda real: b"a\n\n  \nb\n",
    "empty": lambda real: b"\n",
    "a row": lambda real: b"\n0: 00000002 00000000 00010000 0001 01 1 @" + real[:50],
    "another rank": lambda real: real.replace(b"/3/", b"/4/"),
    "another process": lambda real: real[:-1] + b"0" if real[-1:] != b"0" else real[:-1] + b"1",
    "a tail": lambda real: real + b"/8",
    "a line end": lambda real: real + b"\n",
    "many digits": lambda real: real + b"9" * 20,
    "the old form": lambda real: b"stepwell/run.1.2/3/%d" % os.getpid(),
}


@pytest.mark.parametrize("make", NAMES.values(), ids=NAMES.keys())
def test_names_of_other_sockets_hide_no_agent_and_are_none(make: Callable[[bytes], bytes], where: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, listen(where, 3):
        real = find_agents(where, 3)[0].name.encode()
        other.bind(b"\0" + make(real))
        other.listen()
        assert len(find_agents(where, 3)) == 1 and find_agents(where, 0) == find_agents(where, 4) == []
        assert find_ranks(where) == [3]
        assert find_pids(where) == [os.getpid()]


def test_a_socket_that_does_not_listen_is_no_agent(where: str) -> None:
    with listen(where, 0):
        (found,) = find_agents(where, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(found.address)
        assert find_agents(where, 0) == [] and find_ranks(where) == []


def test_a_name_that_is_taken_after_the_death_of_its_agent_is_nobody(where: str) -> None:
    code = "import sys; from stepwell.handover import agent_address as address; sock = address.listen(sys.argv[1], 0); "
    code += "print(address.find_agents(sys.argv[1], 0)[0].name, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        name = agent.stdout.readline().strip()
        assert [found.name for found in find_agents(where, 0)] == [name]
        agent.communicate()
    with named(name):
        assert find_agents(where, 0) == [] and find_ranks(where) == [] and find_pids(where) == []


def test_a_full_queue_is_not_taken_for_gone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner has no time just now; as soon as it has, who waits gets through."""
    monkeypatch.setattr(agent_address, "_BACKLOG", 0)
    monkeypatch.setattr(agent_address, "_LOOK_SECONDS", 1.0)
    with listen(where, 0) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as crowd:
        (found,) = find_agents(where, 0)
        crowd.connect(found.address)
        with pytest.raises(TimeoutError, match="has accepted no connection"):
            connect(found, timeout=1)
        assert find_pids(where) == [os.getpid()], "in doubt it lives"
        listener.accept()[0].close()
        channel = connect(found, timeout=20)
        assert channel is not None
        channel.close()


def test_a_listener_of_another_process_is_not_believed(where: str) -> None:
    with listen(where, 0):
        (found,) = find_agents(where, 0)
        other = FoundSocket(found.name, 0, found.namespace, found.began, found.pid + 1)
        assert connect(other, timeout=5) is None
