"""Hot restart where nodes are hosts: one that vanishes gives no sign, and its disk is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.elastic import HostCluster
from tests.hosts.lab import Lab
from tests.launch.conftest import Undisturbed, undisturbed
from tests.launch.test_nodes import lose, replaced

__all__ = ["undisturbed"]

EPOCHS = 6
MakeElastic = Callable[..., HostCluster]
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]


@pytest.fixture
def make_elastic(able: None, tmp_path: Path) -> Iterator[MakeElastic]:
    made: list[HostCluster] = []

    def make(slots: int, most: int, **options: object) -> HostCluster:
        lab = Lab(tmp_path / "lab", most, tmp_path / "disk")
        lab.boot()
        made.append(HostCluster(tmp_path / "cluster", slots, most, lab=lab, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
        cluster.lab.close()


def test_spares_take_the_place_of_hosts_that_vanish(make_elastic: MakeElastic, undisturbed: Undisturbed) -> None:
    """3 + 2: one after the other, rank 0's among them. The others keep their ranks, and read from disks."""
    cluster = make_elastic(3, 5, epochs=EPOCHS)
    cluster.start("h0", "h1", "h2", "h3", "h4")
    cluster.wait_steps(3)
    before = cluster.ranks()
    for number, victim in enumerate((before[1], before[0])):
        lose(cluster, "host vanished", victim)
        moved = replaced(before, cluster.ranks())
        assert len(moved) == number + 1 and victim in moved
        assert cluster.sources()[-1] == "node"
    assert set(cluster.codes(set(cluster.ranks().values())).values()) == {0}
    cluster.check_log(undisturbed(3, EPOCHS))
