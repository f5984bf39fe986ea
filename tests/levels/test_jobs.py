"""Real jobs whose nodes are killed, lost, swapped and brought back: the same bits as a run that nothing happened to."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from stepwell.storage.store.lineage import read_history
from tests.crash.harness import wait_for
from tests.levels.cluster import Cluster
from tests.ranks.conftest import MakeJob, Straight, soak

SAMPLES = 96
ARGUMENTS = ("--samples", SAMPLES, "--epochs", 6)
SLEEP = ("--sleep", 0.02)


def check(job: Cluster, reference: Cluster) -> None:
    assert job.ledger.problem(SAMPLES, 6) is None
    assert job.difference(reference) is None
    assert all(step > 0 for step in list(job.ledger.resumed().values())[1:]), "every restart resumed"
    job.check_nothing_left()


def sources(job: Cluster) -> list[str]:
    """Where each restart read from, in order."""
    return [event["source"] for event in job.events("restore") if event.get("rank", 0) == 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("abcd", "dcab"), soak("aabb", "abab"), soak("abcd", "bcda"), soak("aabc", "cbaa")]
)
def test_ranks_come_back_on_other_nodes(before: str, after: str, make_job: MakeJob, straight: Straight) -> None:
    job = make_job("job", *SLEEP, "--protect", "Pairs()", *ARGUMENTS, kind=Cluster)
    launch = job.start(before)
    job.wait_committed(9, launch)
    job.end_all(launch)
    step = job.newest_step()
    job.start(after).wait_well()
    assert job.ledger.resumed()[1] >= step and sources(job) == ["node"]
    check(job, straight(4, *ARGUMENTS))


@pytest.mark.soak
def test_another_number_of_ranks_on_the_same_nodes(make_job: MakeJob, straight: Straight) -> None:
    arguments = ("--samples", SAMPLES, "--epochs", 4, "--loader", "carry", "--keyed")
    job = make_job("job", *SLEEP, "--protect", "Pairs()", *arguments, kind=Cluster)
    launch = job.start("aabb")
    job.wait_committed(9, launch)
    job.end_all(launch)
    step = job.newest_step()
    launch = job.start("ab")
    job.wait_committed(step + 9, launch)
    job.end_all(launch)
    job.start("ba").wait_well()
    resumed = job.ledger.resumed()
    assert resumed[1] >= step and resumed[2] > resumed[1] and sources(job) == ["node", "node"]
    assert job.ledger.problem(SAMPLES, 4) is None
    reference = straight(1, *arguments, "--batch", 16)
    assert job.ledger.stream()[: 4 * SAMPLES] == reference.ledger.stream()[: 4 * SAMPLES]
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protect", "lost", "after"),
    [("ReedSolomon(4, 2)", "bc", "axyd"), soak("Xor(4)", "a", "xbcd"), soak("ReedSolomon(4, 2)", "ab", "cdxy")],
)
def test_nodes_are_lost_at_once(protect: str, lost: str, after: str, make_job: MakeJob, straight: Straight) -> None:
    """Rank 0's among them; then the same number of others, once what is left is protected again."""
    job = make_job("job", *SLEEP, "--protect", protect, *ARGUMENTS, kind=Cluster)
    launch = job.start("abcd")
    job.wait_committed(9, launch)
    job.end_all(launch)
    for node in lost:
        job.lose(node)
    step = job.newest_step()
    launch = job.start(after)
    job.wait_committed(step + 9, launch)
    job.end_all(launch)
    others = [node for node in after if node not in "xy"][: len(lost)]
    for node in others:
        job.lose(node)
    second = job.newest_step()
    job.start(after).wait_well()
    resumed = job.ledger.resumed()
    assert resumed[1] >= step and resumed[2] >= second and sources(job) == ["node", "node"]
    check(job, straight(4, *ARGUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize("how", [soak("lost"), soak("new")])
def test_without_any_cache_the_shared_place_has_it(how: str, make_job: MakeJob, straight: Straight) -> None:
    """And another run's cache in the same directories is not touched."""
    job = make_job("job", *SLEEP, "--protect", "Pairs()", "--flush", 2, *ARGUMENTS, kind=Cluster)
    launch = job.start("abcd")
    job.wait_while_alive(launch, lambda: job.flushed(), "something is in the shared place")
    job.end_all(launch)
    flushed = job.flushed()[-1]
    for node in "abcd" if how == "lost" else "":
        job.lose(node)
    nodes = "abcd" if how == "lost" else "wxyz"
    others = [job.folder / f"node.{node}" / "runs" / "fedcba9876543210" / "step-000000000300.l0001" for node in nodes]
    for other in others:
        other.mkdir(parents=True)
        (other / "rank-00000.json").write_bytes(b"of another run")
        (other / "rank-00000.safetensors.123.tmp").write_bytes(b"which is writing")
    job.start(nodes).wait_well()
    assert job.ledger.resumed()[1] == flushed and sources(job) == ["disk"]
    for other in others:
        assert sorted(path.name for path in other.iterdir()) == ["rank-00000.json", "rank-00000.safetensors.123.tmp"]
        shutil.rmtree(other)
    check(job, straight(4, *ARGUMENTS))


@pytest.mark.slow
def test_a_node_that_returns_with_another_history_is_not_believed(make_job: MakeJob, straight: Straight) -> None:
    """Two of a pair are lost, so the run goes back to the shared place; then they return, with later steps."""
    job = make_job("job", *SLEEP, "--protect", "Pairs()", "--flush", 3, *ARGUMENTS, kind=Cluster)
    launch = job.start("abcd")
    job.wait_while_alive(launch, lambda: job.flushed() and job.newest_step() >= job.flushed()[-1] + 6, "both")
    job.end_all(launch)
    for node in "abcd":
        (job.folder / f"node.{node}").rename(job.folder / f"away.{node}")
    before = job.newest_step()  # of the shared place
    launch = job.start("wxyz")
    job.wait_committed(before + 3, launch)
    job.end_all(launch)
    step = job.newest_step()
    for node in "abcd":
        (job.folder / f"away.{node}").rename(job.folder / f"node.{node}")
    job.lose("w")
    job.start("axyz").wait_well()
    resumed = job.ledger.resumed()
    assert resumed[1] == before and resumed[2] >= step
    assert sources(job) == ["disk", "node"]
    history = read_history(job.paths)
    left = [path.name for path in Path(str(job.cache("a").root)).glob("step-*")]
    assert all(".l0003" in name for name in left), (left, history)
    check(job, straight(4, *ARGUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize("protect", [soak("Pairs()"), soak("Xor(4)"), soak("ReedSolomon(4, 2)")])
def test_agents_are_killed_while_training_goes_on(protect: str, make_job: MakeJob, straight: Straight) -> None:
    job = make_job("job", *SLEEP, "--protect", protect, "--flush", 2, *ARGUMENTS, kind=Cluster)
    launch, draw = job.start("aabb" if protect == "Pairs()" else "abcd"), random.Random(5)
    for step in (5, 11, 17, 23):
        job.wait_step(step, launch)
        job.kill_agents_of(draw.randrange(4))
    launch.wait_well()
    wait_for(lambda: job.flushed()[-1] == 36, "the end is in the shared place")
    assert len(job.flushed()) >= 2
    check(job, straight(4, *ARGUMENTS))


@pytest.mark.soak
def test_a_job_that_is_killed_often_still_reaches_the_shared_place(make_job: MakeJob) -> None:
    """Every sixth checkpoint goes there, and no start lives to see six."""
    job = make_job("job", "--sleep", 0.05, "--protect", "Pairs()", "--flush", 6, *ARGUMENTS, kind=Cluster)
    for nodes in ("ab", "ba", "ab"):
        launch = job.start(nodes)
        job.wait_committed(job.newest_step() + 6, launch)
        job.end_all(launch)
    launch = job.start("ab")
    job.wait_while_alive(launch, lambda: job.flushed(), "something is in the shared place")
    made = {event["step"] for event in job.events("commit") if event["lineage"] == 4}
    assert len(made) < 6, "the count goes on from start to start"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rank", [soak(2), soak(0)])
def test_an_agent_that_stands_still_holds_up_no_training(rank: int, make_job: MakeJob, straight: Straight) -> None:
    """Checkpoints cannot be whole without it; then it goes on."""
    arguments = ("--samples", SAMPLES, "--epochs", 20)
    job = make_job("job", "--sleep", 0.03, "--protect", "Pairs()", "--flush", 99, *arguments, kind=Cluster)
    launch = job.start("abcd")
    job.wait_committed(6, launch)
    frozen = job.agents_of(rank)
    processes = [process for process in frozen if process.pid != launch.ranks[rank].pid]
    assert len(processes) == 1
    processes[0].signal(signal.SIGSTOP)
    reached = job.ledger.last_step(0)
    job.wait_step(reached + 45, launch)
    newest = job.newest_step()
    processes[0].signal(signal.SIGCONT)
    job.wait_while_alive(launch, lambda: job.newest_step() > newest, "there is a newer one")
    for process in frozen:
        process.close()
    launch.wait_well()
    assert job.ledger.problem(SAMPLES, 20) is None
    assert job.difference(straight(4, *arguments)) is None
    job.check_nothing_left()
