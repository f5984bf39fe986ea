"""Which ranks share a node: by what they see of each other, not by an id that an image may have been cloned with."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.agent.target import node_target
from stepwell.events.level_events import NodeCloned, OneCache
from stepwell.events.run_events import Event
from stepwell.levels.node_map import Machine, Sitting, find_sittings
from stepwell.storage.store.mounts import mount_of
from stepwell.storage.store.node_id import node_id
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight
from tests.ranks.groups.circle import Circle
from tests.training.loop.small import Small

SAMPLES = 96
ARGUMENTS = ("--samples", SAMPLES, "--epochs", 6)


def clone(folder: Path, names: str) -> None:
    """Caches whose nodes were made from one image."""
    node_id(folder / names[0])
    for name in names[1:]:
        (folder / name).mkdir()
        shutil.copy(folder / names[0] / "node.json", folder / name)


def find(
    folder: Path, caches: Sequence[str], machines: Sequence[Machine], domains: Sequence[str | None] | None = None
) -> tuple[list[Sitting], list[tuple[int, Event]]]:
    """What all ranks find, and what each of them says."""
    circle = Circle(len(caches))
    found: list[list[Sitting]] = [[] for _ in caches]
    said: list[tuple[int, Event]] = []

    def work(rank: int) -> None:
        gather = circle.rank(rank).all_gather
        domain = None if domains is None else domains[rank]
        say = lambda event: said.append((rank, event))  # noqa: E731
        found[rank] = find_sittings(gather, rank, folder / caches[rank], domain, say, machines[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(caches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(found) and all(answer == found[0] for answer in found), found
    assert not list(folder.rglob("*.tmp"))
    return found[0], said


def on(*names: str) -> list[Machine]:
    return [Machine(name, name) for name in names]


def test_nodes_with_one_id_and_caches_of_their_own_get_ids_of_their_own(tmp_path: Path) -> None:
    clone(tmp_path, "abc")
    caches, machines = "aabbcc", on("a", "a", "b", "b", "c", "c")
    found, said = find(tmp_path, caches, machines)
    ids = [sitting.node for sitting in found]
    assert ids[::2] == ids[1::2] == [node_id(tmp_path / name) for name in "abc"] and len(set(ids)) == 3
    assert len({sitting.domain for sitting in found}) == 3
    assert [(rank, type(event), event.text()[:46]) for rank, event in sorted(said, key=lambda item: item[0])] == [
        (rank, NodeCloned, f"The nodes of rank {rank} and rank 0 had the same id") for rank in (2, 4)
    ]
    assert find(tmp_path, caches, machines) == (found, []), "once and for all"


def test_a_cache_that_cannot_be_written_is_told_apart_for_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone(tmp_path, "ab")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("stepwell.levels.node_map.Path.touch", refuse)
    monkeypatch.setattr("stepwell.storage.store.files.put", refuse)
    found, said = find(tmp_path, "ab", on("a", "b"))
    assert found[0].node != found[1].node and len(said) == 1


def test_containers_of_one_machine_may_share_a_cache(tmp_path: Path) -> None:
    node_id(tmp_path / "a")
    found, said = find(tmp_path, "aa", [Machine("pod-1", "boot"), Machine("pod-2", "boot")])
    assert found[0] == found[1] and not said


def test_machines_that_share_a_directory_are_told(tmp_path: Path) -> None:
    """A network file system in the place of local disks: it is lost as one."""
    node_id(tmp_path / "a")
    found, said = find(tmp_path, "aaa", on("a", "b", "c"))
    assert len(set(found)) == 1
    assert [(type(event), event.ranks) for _, event in said] == [(OneCache, [0, 1, 2])]  # type: ignore[attr-defined]


def test_caches_of_their_own_on_one_machine_are_lost_together(tmp_path: Path) -> None:
    found, said = find(tmp_path, "abcd", on("x", "x", "y", "y"))
    assert len({sitting.node for sitting in found}) == 4 and not said
    domains = [sitting.domain for sitting in found]
    assert domains[0] == domains[1] != domains[2] == domains[3]
    assert [sitting.domain for sitting in find(tmp_path, "ab", on("x", "x"), ["left", "right"])[0]] == ["left", "right"]


@pytest.mark.slow
def test_a_job_on_nodes_from_one_image_survives_the_loss_of_one(make_job: MakeJob, straight: Straight) -> None:
    job = make_job("job", "--sleep", 0.02, "--protect", "Pairs()", "--flush", 99, *ARGUMENTS, kind=Cluster)
    assert isinstance(job, Cluster)
    clone(job.folder, ["node.a", "node.b", "node.c", "node.d"])  # type: ignore[arg-type]
    launch = job.start("abcd")
    job.wait_committed(15, launch)
    assert len(job.events("node-cloned")) == 3
    assert "cloned from one image" in launch.ranks[3].log()
    job.end_all(launch)
    job.lose("b")
    step = job.newest_step()
    job.start("axcd").wait_well()
    assert job.ledger.resumed()[1] >= step
    assert [event["source"] for event in job.events("restore") if not event.get("rank")] == ["node"]
    kept = [len(list(job.folder.glob(f"node.{node}/runs/*/step-*"))) for node in "axcd"]
    assert max(kept) <= 2 + node_target._MOST_UNDECIDED, (
        f"caches are pruned, but for what still waits for a rank: {kept}"
    )
    assert job.difference(straight(4, *ARGUMENTS)) is None
    job.check_nothing_left()


def test_a_cache_that_is_made_beside_its_disk_is_named(run_dir: Path, tmp_path: Path) -> None:
    """Its disk may not be mounted: it would fill the one of the system. Once it is there, nothing is said."""
    where = tmp_path / "not mounted" / "cache"
    options = {"levels": [stepwell.Node(where), stepwell.Shared(every=9)]}
    for _ in range(2):
        run = Small(run_dir, options)
        run.ckpt.restore()
        run.train(1)
        run.ckpt.close()
    (said,) = run.events("cache-made")
    assert (said["path"], said["missing"]) == (str(where), str(where.parent))
    mount, kind = mount_of(tmp_path)
    assert (said["mount"], said["file_system"]) == (mount, kind) and said["free_bytes"] > 0


def test_one_in_a_file_system_of_its_own_is_made_quietly(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.restore.from_nodes.mount_of", lambda path: (str(tmp_path), "ext4"))
    run = Small(run_dir, {"levels": [stepwell.Node(tmp_path / "cache")]})
    run.ckpt.restore()
    run.ckpt.close()
    assert not run.events("cache-made")


@pytest.mark.parametrize("levels", [stepwell.Node("/cache"), "/cache", {"node": "/cache"}])
def test_levels_that_are_no_list_are_refused_with_what_to_give(levels: Any, run_dir: Path) -> None:
    with pytest.raises(stepwell.ConfigError, match=r"give a list: levels=\[Node\(\.\.\.\)\]"):
        Small(run_dir, {"levels": levels})
