"""Real jobs on hosts that vanish, come back and lose their cables: the same bits as a run that nothing happened to."""

from __future__ import annotations

import os
import random

import pytest

from stepwell.storage.store.lineage import read_lineages
from tests.crash.harness import report, wait_for
from tests.hosts.conftest import MakeHosts
from tests.hosts.job import HostJob
from tests.ranks.conftest import Straight

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

SAMPLES, EPOCHS = 96, 6
ARGUMENTS = ("--samples", SAMPLES, "--epochs", EPOCHS)
FOUR = ("h0", "h1", "h2", "h3")
EVENTS = int(os.environ.get("STEPWELL_HOSTS_EVENTS", "13"))
"""For each protection: 52 in all, or as many as are asked for; 52 take about ten minutes each."""
LONG = ("--samples", SAMPLES, "--epochs", 24 * -(-EVENTS // 13))


def check(job: HostJob, straight: Straight, arguments: tuple[object, ...] = ARGUMENTS) -> None:
    epochs = int(str(arguments[3]))
    assert job.ledger.problem(SAMPLES, epochs) is None
    assert job.difference(straight(4, *arguments)) is None
    lineages, damaged = read_lineages(job.paths)
    assert not damaged and all(lineage.parent == number - 1 for number, lineage in lineages.items()), "two histories"


@pytest.mark.timeout(120 * EVENTS)
@pytest.mark.parametrize("protect", ["Pairs()", "Partner()", "Xor(4)", "ReedSolomon(4, 2)"])
def test_hosts_vanish_return_and_lose_their_cables(protect: str, make_hosts: MakeHosts, straight: Straight) -> None:
    """At random moments; what was committed is never lost, and each sample is trained on once."""
    job = make_hosts(6, "--sleep", 0.05, "--protect", protect, "--flush", 4, *LONG)
    chance, on, told = random.Random(protect), list(FOUR), []
    launch = job.start(on)
    for _ in range(EVENTS):
        job.wait_committed(job.newest_step() + chance.randint(1, 4), launch)
        assert not launch.has_ended(chance.uniform(0, 0.2)), launch.logs()
        event, victim = chance.choice(("cable", "lost", "lost", "returns", "power")), chance.choice(on)
        told.append(f"{event} {victim}")
        if event == "cable":
            job.cut(victim, chance.uniform(0.2, 3))
            continue
        step = job.newest_step()
        if event == "power":  # of all hosts: nothing is left in memory
            for name in on:
                job.vanish(name, disk=False)
        else:
            job.vanish(victim, disk=event == "returns")
        job.end_all(launch)
        for host in job.lab.hosts.values():
            if not host.pid:
                host.boot()
        if event == "lost":  # a spare takes its place; it becomes one, with what its disk still holds
            job.lab.hosts[victim].vanish(lambda: None)
            job.lab.hosts[victim].boot()
            spare = next(name for name in job.lab.hosts if name not in (*on, "head"))
            on[on.index(victim)] = spare
        if chance.random() < 0.5:
            chance.shuffle(on)
        launch = job.start(on)
        number = launch.number
        job.wait_while_alive(launch, lambda number=number: number in job.ledger.resumed(), "all ranks resumed")
        assert job.ledger.resumed()[number] >= step, f"{told}: {step} was committed"
    launch.wait_well(120)
    report(f"hosts, {protect}: {', '.join(told)}; resumed at {list(job.ledger.resumed().values())}")
    check(job, straight, LONG)


@pytest.mark.parametrize("seconds", [5, 15])
def test_a_cable_is_cut_for_a_while(seconds: float, make_hosts: MakeHosts, straight: Straight) -> None:
    job = make_hosts(4, "--sleep", 0.05, "--protect", "Pairs()", *ARGUMENTS)
    launch = job.start(FOUR)
    job.wait_committed(6, launch)
    job.cut("h2", seconds)
    launch.wait_well(120)
    check(job, straight)


@pytest.mark.parametrize("seconds", [40, 120])
def test_a_cable_is_cut_for_long(seconds: float, make_hosts: MakeHosts, straight: Straight) -> None:
    """The line between the ranks does not come back: the run ends with the reason, and another start goes on."""
    job = make_hosts(4, "--sleep", 0.05, "--protect", "Pairs()", *ARGUMENTS)
    launch = job.start(FOUR)
    job.wait_committed(6, launch)
    step = job.newest_step()
    job.cut("h2", seconds)
    assert set(launch.wait(120)) == {0, 1}
    assert "rank 2, on h2, is gone" in launch.ranks[0].log()
    job.kill_agents()
    job.start(FOUR).wait_well(120)
    assert job.ledger.resumed()[1] >= step
    check(job, straight)


def test_a_slow_cable(make_hosts: MakeHosts, straight: Straight) -> None:
    job = make_hosts(4, "--sleep", 0.05, "--protect", "Pairs()", *ARGUMENTS)
    job.lab.hosts["h1"].slow(2)
    job.start(FOUR).wait_well(180)
    check(job, straight)
    report(f"hosts, bytes sent: {job.sent()}")


def test_a_disk_that_is_full(make_hosts: MakeHosts, straight: Straight) -> None:
    """Its parts go to the shared place, and no checkpoint is lost."""
    job = make_hosts(4, "--sleep", 0.05, "--protect", "Pairs()", *ARGUMENTS)
    launch = job.start(FOUR)
    job.wait_committed(6, launch)
    job.lab.hosts["h3"].fill_disk()
    job.wait_committed(job.newest_step() + 9, launch)
    job.end_all(launch)
    step = job.newest_step()
    launch = job.start(FOUR)
    launch.wait_well()
    assert job.ledger.resumed()[1] >= step
    check(job, straight)


def test_clocks_hours_apart(make_hosts: MakeHosts, straight: Straight) -> None:
    job = make_hosts(4, "--protect", "Pairs()", *ARGUMENTS, clocks=True)
    launch = job.start(FOUR)
    job.wait_committed(6, launch)
    job.end_all(launch)
    job.start(("h3", "h2", "h1", "h0")).wait_well()
    check(job, straight)


def test_a_host_that_vanishes_is_named(make_hosts: MakeHosts) -> None:
    """The ranks that are left hang in a collective of torch's; stepwell says whom they wait for."""
    job = make_hosts(4, "--sleep", 0.05, "--protect", "Pairs()", *ARGUMENTS)
    launch = job.start(FOUR)
    job.wait_committed(6, launch)
    job.vanish("h1")
    wait_for(lambda: "rank 1, on h1, is gone" in launch.ranks[0].log(), "it is named", 120)
