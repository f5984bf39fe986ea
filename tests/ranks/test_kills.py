"""Ranks, agents, or all of them are killed at random moments: it ends with the same bits, each sample came once."""

from __future__ import annotations

import os
import random
import secrets

import pytest

from stepwell.storage.store.lineage import read_history
from tests.crash.harness import report
from tests.ranks.conftest import MakeJob, Straight, soak
from tests.ranks.launch import Job
from tests.ranks.torment import VICTIMS, torment

SAMPLES, WORLD = 96, 4


def check(job: Job, reference: Job, epochs: int) -> None:
    assert job.ledger.problem(SAMPLES, epochs) is None
    assert job.difference(reference) is None
    assert all(step > 0 for step in list(job.ledger.resumed().values())[1:]), "every restart resumed"
    assert read_history(job.paths).newest == len(job.launches), "one lineage for all ranks of a launch"
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["carry", soak("sampler")])
def test_three_kills(loader: str, make_job: MakeJob, straight: Straight) -> None:
    arguments = ("--samples", SAMPLES, "--epochs", 8, "--loader", loader)
    job = make_job("job", "--sleep", 0.02, *arguments)
    victims = ["rank", "agent", "ranks"] if loader == "sampler" else ["everything", "rank", "agent"]
    torment(job, WORLD, victims, 9, len(loader))
    check(job, straight(WORLD, *arguments), 8)


@pytest.mark.soak
def test_accumulation_and_workers(make_job: MakeJob, straight: Straight) -> None:
    arguments = ("--samples", SAMPLES, "--epochs", 12, "--accumulate", 2, "--workers", 1)
    job = make_job("job", "--sleep", 0.02, *arguments)
    torment(job, 2, ["rank"], 9, 7)
    check(job, straight(2, *arguments), 12)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("round", range(2))
def test_twenty_kills(round: int, make_job: MakeJob, straight: Straight) -> None:
    drawn = int(os.environ.get("STEPWELL_SOAK_SEED") or secrets.randbits(20)) + round
    arguments = ("--samples", SAMPLES, "--epochs", 50)
    job = make_job("job", "--sleep", 0.02, *arguments)
    victims = random.Random(drawn).choices(VICTIMS, k=20)
    told = torment(job, WORLD, victims, 8, drawn)
    check(job, straight(WORLD, *arguments), 50)
    report(f"ranks, {len(victims)} kills: {'; '.join(told)}; STEPWELL_SOAK_SEED={drawn - round}")
