"""Hot restart on hosts: a torchrun agent on each, caches on their own disks, the store on the head."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash.harness import _read, report
from tests.hosts.lab import HEAD, Host, Lab
from tests.launch.cluster import STORE, Cluster

PHASES = (
    "until the workers that were left had been ended",
    "until all new ones were started",
    "until they had met and restored",
    "until the first step",
)


def workers(host: Host) -> list[int]:
    """Those of a host, and not the agent, which has the script in its command line too."""
    return [pid for pid in host.processes() if _read(pid, "cmdline").split(b"\0")[1:2] == [b"-u"]]


class HostCluster(Cluster):
    """Its nodes are the hosts of a lab."""

    def __init__(self, folder: Path, slots: int, most: int, *, lab: Lab, **options: Any) -> None:
        self.lab = lab
        self.address = lab.hosts[HEAD].address
        self._old: set[int] = set()
        """Workers on the hosts that were left, at a loss."""
        self._stopped_at = self._started_at = 0.0
        super().__init__(folder, slots, most, **options)

    def onto(self, name: str) -> list[str]:
        host = self.lab.hosts[HEAD if name == STORE else name]
        return ["nsenter", "-t", str(host.pid), "-n", "-m", "-u", "-p"]

    def environment(self, name: str) -> dict[str, str]:
        found = super().environment(name) | {"GLOO_SOCKET_IFNAME": "eth0", "STEPWELL_CACHE": str(self.lab.disk)}
        del found["STEPWELL_NODE"]  # a host is told by what it is
        return found

    def lose(self, name: str) -> float:
        lost = self.lab.hosts[name]
        self._old = {pid for host in self.lab.hosts.values() if host.pid and host is not lost for pid in workers(host)}
        self._stopped_at = self._started_at = 0.0
        at = time.monotonic()
        lost.vanish(self.nodes[name].kill)
        return at

    def wait_back(self, after: float, rounds: int) -> float:
        """Also says which part of it took how long."""
        seconds = super().wait_back(after, rounds)
        begun = [note for note in self.notes() if "begin" in note]
        lineage = sorted({note["lineage"] for note in begun})[rounds]
        restored = max(note["time"] for note in begun if note["lineage"] == lineage)
        ends = (self._stopped_at, self._started_at, restored, after + seconds)
        phases = [f"{end - start:.1f} s {what}" for start, end, what in zip((after, *ends), ends, PHASES, strict=False)]
        report(f"hot restart, phases: {', '.join(phases)}")
        return seconds

    def wait(self, condition: Callable[[], Any], what: str, *more: float) -> Any:
        """Keeps an eye on the workers meanwhile."""

        def look() -> Any:
            if self._old and not self._started_at:
                there = [pid for host in self.lab.hosts.values() if host.pid for pid in workers(host)]
                if not self._stopped_at and not self._old & set(there):
                    self._stopped_at = time.monotonic()
                if self._stopped_at and len(there) == self.slots:
                    self._started_at = time.monotonic()
            return condition()

        return super().wait(look, what, *more)

    def wait_saved(self) -> None:
        """Until this start of the workers has a checkpoint that is whole on some disk."""

        def is_saved() -> bool:
            newest = f".l{len(list((self.folder / 'run' / 'lineage').glob('*.json'))):04d}"
            disks = [host.disk for host in self.lab.hosts.values() if host.pid]
            return any(newest in path.parent.name for disk in disks for path in disk.glob("**/step-*/manifest.json"))

        self.wait(is_saved, "a checkpoint is whole")
