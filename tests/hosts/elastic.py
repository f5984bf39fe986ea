"""Hot restart on hosts: a torchrun agent on each, caches on their own disks, the store on the head."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.hosts.lab import HEAD, Lab
from tests.launch.cluster import STORE, Cluster


class HostCluster(Cluster):
    """Its nodes are the hosts of a lab."""

    def __init__(self, folder: Path, slots: int, most: int, *, lab: Lab, **options: Any) -> None:
        self.lab = lab
        self.address = lab.hosts[HEAD].address
        super().__init__(folder, slots, most, **options)

    def onto(self, name: str) -> list[str]:
        host = self.lab.hosts[HEAD if name == STORE else name]
        return ["nsenter", "-t", str(host.pid), "-n", "-m", "-u", "-p"]

    def environment(self, name: str) -> dict[str, str]:
        found = super().environment(name) | {"GLOO_SOCKET_IFNAME": "eth0", "STEPWELL_CACHE": str(self.lab.disk)}
        del found["STEPWELL_NODE"]  # a host is told by what it is
        return found

    def lose(self, name: str) -> float:
        at = time.monotonic()
        self.lab.hosts[name].vanish(self.nodes[name].kill)
        return at

    def wait_saved(self) -> None:
        """Until this start of the workers has a checkpoint that is whole on some disk."""

        def is_saved() -> bool:
            newest = f".l{len(list((self.folder / 'run' / 'lineage').glob('*.json'))):04d}"
            disks = [host.disk for host in self.lab.hosts.values() if host.pid]
            return any(newest in path.parent.name for disk in disks for path in disk.glob("**/step-*/manifest.json"))

        self.wait(is_saved, "a checkpoint is whole")
