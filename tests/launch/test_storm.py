"""Anything may happen to any node at any moment, again and again; the job ends as if nothing had."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.crash.harness import report
from tests.launch.cluster import Cluster, losses_in
from tests.launch.conftest import MakeCluster, Undisturbed

SLOTS, MOST, EPOCHS = 3, 6, 60


class Storm:
    """Draws what happens next. Nodes that are lost are replaced by new ones, as a cluster does."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.draw = random.Random(seed)
        self.made = 0
        self.did: list[str] = []
        self.frozen: str | None = None

    def add(self) -> None:
        self.cluster.start(f"n{self.made}")
        self.made += 1

    def act(self) -> None:
        cluster, draw = self.cluster, self.draw
        name = draw.choice([name for name, node in cluster.nodes.items() if node.agent.poll() is None])
        kinds = ["crash", "lose", "two", "freeze", "restart", "terminate"]
        kind = draw.choice(kinds) if self.frozen is None else draw.choice([*kinds, "thaw", "thaw"])
        self.did.append(kind)
        if kind == "crash":
            (cluster.folder / f"crash.{name}").touch()
        elif kind == "freeze" and self.frozen is None:
            self.frozen = name
            cluster.nodes[name].signal_all(signal.SIGSTOP)
        elif kind == "thaw":
            self.thaw()
        elif kind == "restart" and name != self.frozen:
            cluster.nodes[name].kill()
            cluster.start(name)
        elif kind in ("lose", "two", "terminate") and name != self.frozen:
            if kind == "terminate":
                cluster.nodes[name].agent.terminate()
                cluster.nodes[name].agent.wait(60)
            cluster.lose(name)
            del cluster.nodes[name]
            self.add()
            if kind == "two":
                self.act()

    def thaw(self) -> None:
        name, self.frozen = self.frozen, None
        if name is not None and name in self.cluster.nodes:
            self.cluster.nodes[name].signal_all(signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_storm(make_cluster: MakeCluster, undisturbed: Undisturbed) -> None:
    seed = int(os.environ.get("STEPWELL_SOAK_SEED") or random.SystemRandom().randrange(1 << 30))
    cluster = make_cluster(SLOTS, MOST, epochs=EPOCHS, pace=0.05, node_failures=0)
    storm = Storm(cluster, seed)
    expected = undisturbed(SLOTS, EPOCHS)
    for _ in range(MOST):
        storm.add()
    try:
        while max(losses_in(cluster.folder), default=0) < 0.8 * len(expected):
            storm.act()
            time.sleep(storm.draw.choice([0.2, 2.0, 6.0, 12.0]))  # the weather, not a wait for something
        storm.thaw()
        for crash in cluster.folder.glob("crash.*"):
            crash.unlink(missing_ok=True)
        assert set(cluster.codes(seconds=300).values()) == {0}, cluster.logs()
        cluster.check_log(expected)
    finally:
        report(f"hot restart, storm {seed}: {len(storm.did)} events, {cluster.rounds()} rounds")
