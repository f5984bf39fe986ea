"""A job of one rank for each host, with its caches on the hosts' own disks and its run in a directory that all see."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepwell.levels.assignments import run_cache
from stepwell.storage.store.lineage import read_run
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Server, Trainer, wait_for
from tests.hosts.lab import HEAD, Host, Lab
from tests.levels.cluster import Cluster
from tests.ranks.launch import HERE, Launch

DISK = "node.disk"
"""Where the trainer of `tests/ranks` looks for the cache of the node that is called `disk`."""


class HostJob(Cluster):
    """The head serves the store, so the loss of any other host leaves it alone."""

    def __init__(self, server: Server, folder: Path, *arguments: object, lab: Lab, **env: str) -> None:
        super().__init__(server, folder, *arguments, **env)
        self.lab = lab
        self.on: list[Host] = []
        """Where each rank of the newest launch is."""

    def start(self, nodes: Sequence[str], *arguments: object, **env: str) -> Launch:
        """One rank on each of these hosts."""
        self.on = [self.lab.hosts[name] for name in nodes]
        number, port_file = len(self.launches), self.folder / f"port.{len(self.launches)}"
        head = {"MASTER_ADDR": self.lab.hosts[HEAD].address, "GLOO_SOCKET_IFNAME": "eth0", "RANKS_NODE": "disk"}
        shared = {**self.env, **head, "RANKS_LAUNCH": str(number), "TORCHELASTIC_USE_AGENT_STORE": "True", **env}
        store = self._fork_on(self.lab.hosts[HEAD], [HERE / "store.py", port_file], shared | {"RANK": "store"}, "store")
        wait_for(port_file.exists, "the store serves")
        shared |= {"WORLD_SIZE": str(len(nodes)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        shared |= {"MASTER_PORT": port_file.read_text()}
        command = self.command(*self.arguments, *arguments)
        ranks = [
            self._fork_on(host, command, shared | {"RANK": str(rank)}, f"{number}.{rank}")
            for rank, host in enumerate(self.on)
        ]
        self.launches.append(Launch(number, ranks, store))
        self.world = len(nodes)
        return self.launches[-1]

    def _fork_on(self, host: Host, command: list[object], env: Mapping[str, str], name: str) -> Trainer:
        request = {
            "start": [str(part) for part in command],
            "env": dict(env),
            "log": str(self.folder / f"log.{name}"),
            "namespace": 0,
            "host": host.pid,
        }
        self.trainers.append(Trainer(self.server, request))
        return self.trainers[-1]

    # -- hosts --------------------------------------------------------------------------------------------------------

    def vanish(self, name: str, *, disk: bool = True) -> None:
        """A host is gone with all that it ran; its rank is, too."""
        host = self.lab.hosts[name]
        lost = [self.launches[-1].ranks[rank] for rank, mine in enumerate(self.on) if mine is host]
        host.vanish(lambda: [rank.wait() for rank in lost], disk=disk)

    def reboot(self, name: str, *, disk: bool = True) -> None:
        """The host comes back under the same name. `disk`: with another, empty one."""
        self.vanish(name, disk=disk)
        self.lab.hosts[name].boot()

    def cut(self, name: str, seconds: float) -> None:
        """Its cable is out for a while."""
        self.lab.hosts[name].cut()
        try:
            time.sleep(seconds)  # the event itself: it has no end to wait for
        finally:
            self.lab.hosts[name].plug()

    def sent(self) -> dict[str, int]:
        """Bytes that each host has sent since it came up."""
        return {name: host.sent_bytes() for name, host in self.lab.hosts.items() if host.pid}

    def caches(self) -> list[RunPaths]:
        run = read_run(self.paths).id
        there = [host for host in self.lab.hosts.values() if host.name != HEAD]
        return [run_cache(host.disk, run) for host in there if (host.disk / "runs").exists()]

    def end_all(self, launch: Launch) -> None:
        """All ranks and agents end at once; the hosts stay, and their disks."""
        for agent in self.agents():
            agent.kill()
            agent.close()
        launch.kill()
        launch.end_store()
