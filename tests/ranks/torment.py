"""Kills ranks, agents or all of them, again and again, at random moments, and starts the job again each time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.ranks.launch import Job, Launch

VICTIMS = ("rank", "agent", "ranks", "everything")
"""A rank: the others have to notice by themselves. Its agent: training goes on. All ranks, with or without agents."""


def torment(job: Job, world: int, victims: Sequence[str], gap: int, seed: int) -> list[str]:
    """One kill for each victim, each at most `gap` steps and a random moment after the commit before it.

    The ranks wait before their last epoch until the kills are done: on a busy machine an agent's successor may come so
    late that training would be over. A kill there needs no newer commit, since none comes.
    Runs to the end and checks that every restart resumed from what was committed, or from newer memory. What was done.
    """
    chance, told, committed = random.Random(seed), [], {}
    release = job.folder / "release"
    launch = job.launch(world, "--hold", release)
    for victim in victims:
        wait_for_kill(job, launch, job.newest_step() + chance.randint(1, gap), release)
        assert not launch.has_ended(chance.uniform(0, 0.1)), f"a rank ended unasked\n{launch.logs()}"
        rank = chance.randrange(world)
        told.append(f"{victim} {rank}" if victim in ("rank", "agent") else victim)
        if victim == "agent":
            job.kill_agents_of(rank)
            continue
        kill(job, launch, victim, rank)
        step = job.check_newest()
        assert step > 0, "nothing was committed before the kill"
        launch = job.launch(world, "--hold", release)
        committed[launch.number] = step
    release.touch()
    launch.wait_well()
    resumed = job.ledger.resumed()
    for number, step in committed.items():
        assert resumed[number] >= step, f"launch {number} resumed from step {resumed[number]}, {step} was committed"
    told.append(f"resumed from the steps {[resumed[number] for number in sorted(resumed)][1:]}")
    return told


def wait_for_kill(job: Job, launch: Launch, step: int, release: Path) -> None:
    """Until this step, or a later one, is committed; or some step is, and the ranks wait for the last kill."""

    def is_due() -> bool:
        is_held = Path(f"{release}.{launch.number}").exists()  # first: what was committed before counts
        return job.newest_step() >= (1 if is_held else step)

    job.wait_while_alive(launch, is_due, f"step {step} is committed")


def kill(job: Job, launch: Launch, victim: str, rank: int) -> None:
    """End a launch by the death of one rank, of all ranks, or of all ranks and agents."""
    launch.kill([rank] if victim == "rank" else None)
    statuses = launch.wait()
    assert 0 not in statuses, f"a rank ended well although another one was killed: {statuses}\n{launch.logs()}"
    if victim == "everything":
        job.kill_agents()
