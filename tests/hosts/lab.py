"""Hosts on one machine: each with a network, a process table, mounts, a name, an address and a disk of its own.

Owns:    the lab (a network namespace with a switch in it, and the hosts' disks) and its hosts; cables, their speed, and
         what went over them; hosts that vanish and come back.
Not:     what runs on them (job).
Holds:   nothing outside the lab's namespaces is changed: they end with its processes, mounts and links with them. All
         hosts see the files of this machine; under `Lab.disk` each sees its own disk, a file system in memory.

Needs root, iproute2 and util-linux: `why_not` tells what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.crash.harness import Process, wait_for

HEAD = "head"
"""The host on which a launcher would run: no ranks, and it never vanishes."""
_NETWORK = "10.77.0"
_DISK_BYTES = 256 << 20
_INIT = "trap : TERM; echo up; while :; do sleep 1000; done"
"""The first process of a host: takes in orphans, and ends the host with it."""


def why_not() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        subprocess.run(
            ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "ip", "link", "add", "probe", "type", "bridge"],
            check=True,
            capture_output=True,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        return f"hosts need namespaces and bridges: {error.stderr.strip()}"
    return None


def run(*words: object) -> str:
    """A command's output. Raises AssertionError with what it printed."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr.strip()}"
    return done.stdout


class Host:
    """One host, and one life of it after the other."""

    def __init__(self, lab: Lab, name: str, number: int) -> None:
        self._lab = lab
        self.name, self._number = name, number
        self.address = f"{_NETWORK}.{number + 1}"
        self._cable = f"cable{number}"
        self._init: subprocess.Popen[str] | None = None
        self.pid = 0
        """Its first process, as it is numbered outside; 0: the host is not there."""
        self.lives = 0

    # -- coming and going ---------------------------------------------------------------------------------------------

    def boot(self, *, clock_seconds: int = 0) -> None:
        """Come up, with what its disk holds. `clock_seconds`: its monotonic clock is that far ahead of the others'."""
        assert not self.pid
        lab, mark = self._lab, self._lab.folder / f"boot.{self.name}"
        mark.write_text(f"{uuid.uuid4()}\n")
        script = "\n".join(
            [
                f"hostname {self.name}",
                "mount -t proc proc /proc",
                "mount -t tmpfs -o size=64m shm /dev/shm",
                f"mount --bind {lab.disk_of(self.name)} {lab.disk}",
                f"mount --bind {mark} /proc/sys/kernel/random/boot_id",
                f"mount --bind {lab.names} /etc/hosts",
                _INIT,
            ]
        )
        clock = ["--time", f"--monotonic={clock_seconds}", f"--boottime={clock_seconds}"] if clock_seconds else []
        spaces = ["--net", "--mount", "--pid", "--uts", *clock, "--fork", "--kill-child"]
        self._init = lab.enter("unshare", *spaces, "sh", "-ec", script)
        assert self._init.stdout is not None and self._init.stdout.readline() == "up\n", f"{self.name} did not boot"
        self.pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text())
        self.lives += 1
        lab.do("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.pid)
        lab.do("ip", "link", "set", self._cable, "master", "switch", "up")
        self.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")
        self.do("ip", "link", "set", "lo", "up")
        self.do("ip", "route", "add", "default", "dev", "eth0")

    def vanish(self, reap: Callable[[], object], *, disk: bool = True) -> None:
        """As with a power cut: nobody hears a goodbye. `disk`: what it held is lost too.

        reap:  waits for what was started on it from outside: its first process cannot end before
        """
        if self.pid:
            self.cut()
            assert self._init is not None
            os.kill(self.pid, signal.SIGKILL)  # all of its processes end with the first one
            reap()
            self._init.communicate(timeout=60)
            self._lab.do_if("ip", "link", "del", self._cable)
            self.pid = 0
        if disk:
            self._lab.empty(self.name)

    def do(self, *words: object) -> str:
        """A command in the host."""
        return run("nsenter", "-t", self.pid, "-n", "-m", "-u", "-p", *words)

    def processes(self) -> list[int]:
        """What runs on it, numbered as outside, but for its first process."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                if pid != self.pid and os.readlink(f"/proc/{pid}/ns/pid") == space:
                    found.append(pid)
            except OSError:
                continue
        return found

    # -- its cable ----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pull the cable."""
        self._lab.do("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """Put the cable back."""
        self._lab.do("ip", "link", "set", self._cable, "up")

    def slow(self, megabits: float) -> None:
        """What the cable carries in a second, each way."""
        shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
        self._lab.do("tc", "qdisc", "replace", "dev", self._cable, *shape)
        self.do("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def sent_bytes(self) -> int:
        """What went out of it since it came up."""
        (link,) = json.loads(self.do("ip", "-json", "-stats", "link", "show", "dev", "eth0"))
        count: int = link["stats64"]["tx"]["bytes"]
        return count

    # -- its disk -----------------------------------------------------------------------------------------------------

    @property
    def disk(self) -> Path:
        """Its disk, as this machine sees it."""
        return self._lab.seen(self._lab.disk_of(self.name))

    def fill_disk(self) -> None:
        """Leave no room on it."""
        with (self.disk / "filler").open("wb") as filler:
            try:
                while True:
                    filler.write(bytes(1 << 20))
                    filler.flush()
            except OSError:
                return


class Lab:
    """The switch, the disks, and the hosts on them: `h0`, `h1` ... and the head."""

    def __init__(self, folder: Path, count: int, disk: Path) -> None:
        """`disk`: where each host sees its own."""
        folder.mkdir(parents=True)
        disk.mkdir(parents=True, exist_ok=True)
        self.folder, self.disk, self.names = folder, disk, folder / "names"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-ec", f"echo up\n{_INIT}"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "up\n"
        names = [HEAD, *(f"h{number}" for number in range(count))]
        self.hosts = {name: Host(self, name, number) for number, name in enumerate(names)}
        lines = [f"{host.address} {host.name}" for host in self.hosts.values()]
        self.names.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        self.do("ip", "link", "add", "switch", "type", "bridge")
        self.do("ip", "link", "set", "switch", "up")
        for host in self.hosts.values():
            self.disk_of(host.name).mkdir()
            self._mount(host.name)

    def boot(self, *, clocks: bool = False) -> None:
        """All hosts come up. `clocks`: with monotonic clocks that are hours apart."""
        for number, host in enumerate(self.hosts.values()):
            host.boot(clock_seconds=3_600 * number if clocks else 0)

    def disk_of(self, name: str) -> Path:
        """Where the lab has the disk of a host."""
        return self.folder / f"disk.{name}"

    def seen(self, path: Path) -> Path:
        """A path in the lab, from outside."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def empty(self, name: str) -> None:
        """Another disk in the place of this one."""
        self.do("umount", "--lazy", self.disk_of(name))
        self._mount(name)

    def _mount(self, name: str) -> None:
        self.do("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", f"disk.{name}", self.disk_of(name))

    def do(self, *words: object) -> str:
        """A command in the lab."""
        return run("nsenter", "-t", self._holder.pid, "-n", "-m", *words)

    def do_if(self, *words: object) -> None:
        """The same, where what it is about may be gone already."""
        subprocess.run(["nsenter", "-t", str(self._holder.pid), "-n", "-m", *map(str, words)], capture_output=True)

    def enter(self, *words: object) -> subprocess.Popen[str]:
        """A process in the lab."""
        command = ["nsenter", "-t", str(self._holder.pid), "-n", "-m", *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def close(self) -> None:
        """All hosts vanish, and the lab with them. What was started on them from outside has ended."""
        for host in self.hosts.values():
            host.vanish(lambda: None, disk=False)
        holder = Process(self._holder.pid)
        os.killpg(self._holder.pid, signal.SIGKILL)
        self._holder.communicate()
        wait_for(holder.has_ended, "the lab ends")
        holder.close()
