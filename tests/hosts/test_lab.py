"""The hosts are what the tests on them take them for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hosts.conftest import MakeHosts


def test_hosts_have_names_addresses_disks_and_processes_of_their_own(make_hosts: MakeHosts) -> None:
    lab = make_hosts(2, clocks=True).lab
    one, other = lab.hosts["h0"], lab.hosts["h1"]
    assert one.do("hostname") == "h0\n" and other.do("hostname") == "h1\n"
    assert one.do("cat", "/proc/sys/kernel/random/boot_id") != other.do("cat", "/proc/sys/kernel/random/boot_id")
    one.do("touch", lab.disk / "mine")
    assert (one.disk / "mine").exists() and not list(other.disk.iterdir())
    assert one.do("cat", "/proc/1/cmdline").startswith("sh")
    before = one.sent_bytes()
    other.do("python3", "-c", f"import socket; socket.socket(2, 2).sendto(bytes(1000), ('{one.address}', 9))")
    assert other.sent_bytes() > 1000 and one.sent_bytes() >= before
    assert reaches(other.do, one.address)
    one.cut()
    assert not reaches(other.do, one.address)
    one.plug()
    one.slow(10)
    assert reaches(other.do, one.address)


def test_a_host_that_vanishes_takes_its_processes_and_may_leave_its_disk(make_hosts: MakeHosts) -> None:
    lab = make_hosts(2).lab
    host = lab.hosts["h0"]
    host.do("touch", lab.disk / "mine")
    host.do("sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
    assert host.processes()
    host.vanish(nothing, disk=False)
    host.boot()
    assert (host.disk / "mine").exists() and host.lives == 2
    host.fill_disk()
    with pytest.raises(AssertionError, match=r"I/O error|No space left"):
        host.do("sh", "-c", f"echo more >{lab.disk}/mine")
    host.vanish(nothing)
    host.boot()
    assert not list(host.disk.iterdir())


def nothing() -> None:
    """Nothing was started from outside."""


def reaches(do: Callable[..., str], address: str) -> bool:
    """Whether a call to a port where nobody listens is refused by the host, and not lost on the way."""
    call = f"socket.create_connection(('{address}', 9), 2)"
    code = f"import socket\ntry: {call}\nexcept Exception as error: print(type(error).__name__)"
    return do("python3", "-c", code) == "ConnectionRefusedError\n"
