"""Real agents of torchrun, killed, frozen and brought back: who has which rank then, and what was trained on."""

from __future__ import annotations

import signal
import time

import pytest

from stepwell.launch import exit_status
from tests.crash.harness import report
from tests.launch.cluster import Cluster, losses_in
from tests.launch.conftest import MakeCluster, Undisturbed

EPOCHS = 3
pytestmark = pytest.mark.timeout(400)  # a machine that is busy with other things loads torch slowly


def wait_for_spares(cluster: Cluster, spares: int) -> None:
    cluster.wait(lambda: cluster.table().is_running and len(cluster.table().spares) == spares, f"{spares} spares wait")


def crash_worker(cluster: Cluster, name: str) -> None:
    """Its worker ends in the next step; wait until all ranks make steps again."""
    cluster.wait_saved()
    rounds, at = cluster.rounds(), time.monotonic()
    (cluster.folder / f"crash.{name}").touch()
    back(cluster, "worker crash", at, rounds)


def back(cluster: Cluster, what: str, at: float, rounds: int) -> None:
    seconds = cluster.wait_back(at, rounds)
    report(
        f"hot restart, {cluster.slots} + {cluster.most - cluster.slots} nodes, {what}: {seconds:.1f} s to a new step"
    )
    cluster.wait_steps(3, time.monotonic())


def lose(cluster: Cluster, what: str, *names: str) -> None:
    """Kill nodes with their caches; wait until all ranks make steps again."""
    cluster.wait_saved()
    rounds = cluster.rounds()
    at = [cluster.lose(name) for name in names]
    back(cluster, what, at[0], rounds)


def replaced(before: dict[int, str], after: dict[int, str]) -> dict[str, str]:
    """Who took whose rank."""
    return {before[rank]: after[rank] for rank in before if before[rank] != after[rank]}


@pytest.mark.slow
def test_a_worker_crash_moves_nobody_and_a_dead_node_only_its_spare(
    make_cluster: MakeCluster, undisturbed: Undisturbed
) -> None:
    cluster = make_cluster(2, 3, epochs=EPOCHS)
    cluster.start("a", "b", "c")
    cluster.wait_steps(3)
    before = cluster.ranks()
    (spare,) = {"a", "b", "c"} - set(before.values())
    crash_worker(cluster, before[1])
    assert cluster.ranks() == before
    assert cluster.rounds() == 2  # and the spare, which waited all the time, made nobody restart
    lose(cluster, "node of rank 0 killed", before[0])
    assert cluster.sources()[-1] == "node"  # what the other one held for it
    assert replaced(before, cluster.ranks()) == {before[0]: spare}
    assert cluster.codes([before[1], spare]) == {before[1]: 0, spare: 0}
    assert cluster.rounds() == 3 and cluster.table().restarts == 2
    cluster.check_log(undisturbed(2, EPOCHS))


@pytest.mark.soak
def test_out_of_spares_ends_every_survivor_with_its_status(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 3, epochs=200, spare_timeout=1, min_free_gb=0)
    cluster.start("a", "b")
    cluster.wait_steps(2)
    cluster.lose("b")
    assert cluster.codes(["a"]) == {"a": exit_status.OUT_OF_SPARES}
    lines = [line for line in cluster.nodes["a"].text().splitlines() if line.startswith("stepwell: job: out of spares")]
    assert len(lines) == 1, cluster.logs()
    cluster.start("late")  # whoever comes then is told the same
    assert cluster.codes(["late"]) == {"late": exit_status.OUT_OF_SPARES}


@pytest.mark.soak
def test_a_lost_store_ends_every_agent(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, 2, epochs=200)
    cluster.start("a", "b")
    cluster.wait_steps(2)
    wait_for_spares(cluster, 1)
    cluster.store.kill()
    assert cluster.codes() == {"a": exit_status.STORE_LOST, "b": exit_status.STORE_LOST}
    for name in ("a", "b"):
        assert f"lost the store 127.0.0.1:{cluster.port}" in cluster.nodes[name].text()


@pytest.mark.soak
def test_two_nodes_at_once_and_an_idle_spare(make_cluster: MakeCluster, undisturbed: Undisturbed) -> None:
    cluster = make_cluster(3, 6, epochs=12)
    cluster.start("a", "b", "c")
    cluster.wait_steps(2)
    cluster.start("d", "e", "f")
    wait_for_spares(cluster, 3)
    before, rounds = cluster.ranks(), cluster.rounds()
    idle = cluster.table().spares[0].node
    name = next(name for name in "def" if idle in (cluster.cache(name) / "node.json").read_text())
    cluster.lose(name)
    wait_for_spares(cluster, 2)
    assert cluster.rounds() == rounds and cluster.ranks() == before  # nobody noticed
    lose(cluster, "two nodes killed at once", before[0], before[2])
    moved = replaced(before, cluster.ranks())
    assert moved.keys() == {before[0], before[2]} and set(moved.values()) == {"d", "e", "f"} - {name}
    left = [before[1], *moved.values()]
    assert cluster.codes(left, 200) == dict.fromkeys(left, 0)
    cluster.check_log(undisturbed(3, 12))


@pytest.mark.soak
def test_a_frozen_node_is_replaced_and_comes_back_as_a_spare(
    make_cluster: MakeCluster, undisturbed: Undisturbed
) -> None:
    cluster = make_cluster(2, 3, epochs=10)
    cluster.start("a", "b", "c")
    cluster.wait_steps(3)
    wait_for_spares(cluster, 1)
    before, rounds = cluster.ranks(), cluster.rounds()
    (spare,) = {"a", "b", "c"} - set(before.values())
    frozen, at = cluster.nodes[before[1]], time.monotonic()
    frozen.signal_all(signal.SIGSTOP)
    back(cluster, "node frozen", at, rounds)
    assert replaced(before, cluster.ranks()) == {before[1]: spare}
    frozen.signal_all(signal.SIGCONT)
    wait_for_spares(cluster, 1)
    assert "declared this node dead" in frozen.text()
    assert cluster.rounds() == rounds + 1  # its return made nobody restart
    lose(cluster, "its successor killed", spare)  # and it is good for a slot again
    assert cluster.ranks() == before
    assert cluster.codes(before.values(), 200) == dict.fromkeys(before.values(), 0)
    cluster.check_log(undisturbed(2, 10))


@pytest.mark.soak
def test_a_node_that_comes_back_in_time_keeps_its_slot_and_later_becomes_a_spare(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 3, epochs=200, grace=60)
    cluster.start("a", "b", "c")
    cluster.wait_steps(2)
    wait_for_spares(cluster, 1)
    before, rounds = cluster.ranks(), cluster.rounds()
    (spare,) = {"a", "b", "c"} - set(before.values())
    at = cluster.nodes[before[1]].kill()
    cluster.start(before[1])  # the same cache: the same node
    back(cluster, "agent killed, and started again at once", at, rounds)
    assert cluster.ranks() == before
    lost = cluster.nodes[before[0]]
    lost.agent.terminate()  # says goodbye: nobody waits for it, whatever the grace time
    rounds, at = cluster.rounds(), time.monotonic()
    back(cluster, "agent told to end", at, rounds)
    assert replaced(before, cluster.ranks()) == {before[0]: spare}
    cluster.start(before[0])
    wait_for_spares(cluster, 1)
    assert cluster.rounds() == rounds + 1


@pytest.mark.soak
def test_a_node_whose_workers_keep_failing_is_put_aside(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 3, epochs=200, node_failures=1)
    cluster.start("a", "b", "c")
    cluster.wait_steps(2)
    wait_for_spares(cluster, 1)
    before = cluster.ranks()
    crash_worker(cluster, before[1])
    table = cluster.table()
    assert len(table.quarantine) == 1 and "first to fail 1 times" in next(iter(table.quarantine.values()))
    gone = set(before.values()) - set(cluster.ranks().values())
    assert cluster.codes(gone) == {next(iter(gone)): exit_status.QUARANTINED}


@pytest.mark.soak
def test_the_budget_of_restarts_is_the_job_s(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 2, epochs=200, restarts=1)
    cluster.start("a", "b")
    cluster.wait_steps(2)
    crash_worker(cluster, "a")
    (cluster.folder / "crash.b").touch()
    assert cluster.codes() == {"a": exit_status.OUT_OF_RESTARTS, "b": exit_status.OUT_OF_RESTARTS}


@pytest.mark.soak
def test_an_agent_that_gives_up_ends_the_job(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, 2, epochs=200)
    cluster.start("a", restarts=0)
    cluster.wait_steps(2)
    cluster.start("b")
    wait_for_spares(cluster, 1)
    (cluster.folder / "crash.a").touch()
    assert cluster.codes() == {"a": 1, "b": exit_status.FAILED}
    assert "failed more often than --max-restarts allows" in cluster.nodes["b"].text()


@pytest.mark.soak
def test_a_notice_ends_all_agents_with_requeue(make_cluster: MakeCluster, undisturbed: Undisturbed) -> None:
    cluster = make_cluster(2, 3, epochs=EPOCHS)
    cluster.start("a", "b", "c", STEPWELL_NOTICE=str(cluster.folder / "notice"))
    cluster.wait_steps(3)
    wait_for_spares(cluster, 1)
    (cluster.folder / "notice").touch()
    assert cluster.codes() == dict.fromkeys("abc", exit_status.REQUEUE)
    last = max(note["step"] for note in cluster.notes() if "step" in note)
    (cluster.folder / "notice").unlink()
    again = make_cluster(2, 3, epochs=EPOCHS)
    again.env = {"LAUNCH_FOLDER": str(cluster.folder)}
    again.start("a", "b")
    assert again.codes() == {"a": 0, "b": 0}
    assert [note["begin"] for note in cluster.notes() if "begin" in note][-2:] == [last, last]  # nothing was lost
    cluster.check_log(undisturbed(2, EPOCHS))


@pytest.mark.soak
def test_a_node_with_another_number_of_workers_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 3, epochs=200, spare_timeout=30)
    cluster.start("a", "b")
    cluster.wait_steps(2)
    cluster.start("c", workers=2)
    wait_for_spares(cluster, 1)
    rounds = cluster.rounds()
    cluster.lose("a")
    assert cluster.codes(["c"]) == {"c": exit_status.QUARANTINED}
    assert "it starts 2 workers, the other nodes of the job 1" in cluster.nodes["c"].text()
    cluster.start("d")
    cluster.wait_back(time.monotonic(), rounds)


@pytest.mark.soak
def test_a_store_that_pauses_kills_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 3, epochs=200)
    cluster.start("a", "b", "c")
    cluster.wait_steps(2)
    wait_for_spares(cluster, 1)
    before = cluster.table()
    cluster.store.send_signal(signal.SIGSTOP)
    time.sleep(8)  # more than twice as long as a silent node would live
    cluster.store.send_signal(signal.SIGCONT)
    cluster.wait_steps(80, time.monotonic())  # 8 s more
    assert cluster.table().version == before.version and cluster.rounds() == 1


@pytest.mark.soak
def test_a_second_agent_in_one_cache_directory_is_told_so(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, 3, epochs=200)
    cluster.start("a")
    cluster.wait_steps(2)
    cluster.start("b", STEPWELL_CACHE=str(cluster.cache("a")))
    assert cluster.codes(["b"]) == {"b": exit_status.FAILED}
    assert "another agent uses" in cluster.nodes["b"].text()
    assert cluster.rounds() == 1


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_eight_nodes_and_four_spares_survive_four_losses_and_not_five(
    make_cluster: MakeCluster, undisturbed: Undisturbed
) -> None:
    names = [f"n{i}" for i in range(12)]
    cluster = make_cluster(8, 12, epochs=100, pace=0.2, spare_timeout=5)
    cluster.start(*names)
    cluster.wait_steps(2)
    wait_for_spares(cluster, 4)
    for rank in (3, 0, 7, 3):
        before = cluster.ranks()
        lose(cluster, f"node of rank {rank} killed", before[rank])
        after = cluster.ranks()
        assert replaced(before, after) == {before[rank]: after[rank]}
    assert cluster.rounds() == 5 and cluster.table().restarts == 4
    last = cluster.ranks()
    cluster.lose(last[5])
    left = [name for rank, name in last.items() if rank != 5]
    assert cluster.codes(left, 120) == dict.fromkeys(left, exit_status.OUT_OF_SPARES)
    expected = undisturbed(8, 100)
    for step, found in losses_in(cluster.folder).items():
        assert found == expected[step], step
