"""What a commit and a restart ask of a shared file system, by the number of ranks: `docs/ranks.md` has the table."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from stepwell.agent.target.shared_target import MANY_RANKS, Persister
from stepwell.events.journal import EventLog
from stepwell.storage.store.paths import RunPaths
from tests.storage.store.ranks import Job

PAGE = (Path(__file__).parents[3] / "docs" / "ranks.md").read_text()
SIZES = (2, 8, 24)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    root = tmp_path_factory.mktemp("jobs")
    return {size: Job(root / f"run{size}", root / f"events{size}", size) for size in SIZES}


@pytest.fixture(scope="module")
def costs(jobs: dict[int, Job]) -> dict[int, dict[str, Counter[str]]]:
    return {size: job.cost() for size, job in jobs.items()}


def total(found: Counter[str]) -> int:
    """Opens (which the way into a directory is counted as too), lists and looks."""
    return sum(found.values())


def test_what_a_rank_asks_for_does_not_depend_on_the_others(costs: dict[int, dict[str, Counter[str]]]) -> None:
    for what in ("rank 1 writes", "rank 1 looks too early", "rank 1 looks"):
        assert len({total(costs[size][what]) for size in SIZES}) == 1, what
    assert all(total(costs[24][f"rank {rank} writes"]) == total(costs[24]["rank 1 writes"]) for rank in range(2, 24))
    for what in ("rank 1 writes", "rank 1 looks too early", "rank 1 looks"):
        assert not costs[24][what]["os.listdir"] - costs[24][what]["list_names"], "of lineages alone"


def test_what_the_leader_asks_for_grows_with_the_ranks_alone(jobs: dict[int, Job], tmp_path: Path) -> None:
    """A constant and so many for each rank. Control: many leaves change nothing."""
    costs = {size: Job(tmp_path / f"run{size}", tmp_path / "log", size).cost() for size in SIZES}
    found = {size: total(cost["rank 0 commits"]) for size, cost in costs.items()}
    each = (found[24] - found[8]) // 16
    assert [found[size] for size in SIZES] == [found[2] + each * (size - 2) for size in SIZES]
    many = Job(tmp_path / "many", tmp_path / "log", 8, leaves=300).cost()["rank 0 commits"]
    assert total(many) == found[8]


def test_a_restart_reads_two_documents_on_each_rank(jobs: dict[int, Job], costs: object) -> None:
    found = {size: total(jobs[size].restart(1)) for size in SIZES}
    assert len(set(found.values())) == 1


def test_the_page_has_these_numbers(jobs: dict[int, Job], costs: dict[int, dict[str, Counter[str]]]) -> None:
    """The table of docs/ranks.md, a row of which is `| what | a + b N |`."""
    rows = dict(re.findall(r"^\| ([a-z][^|]*?) \| (\d+(?: \+ \d+ N)?) \|", PAGE, re.M))
    writes, early, late = (costs[8][what] for what in ("rank 1 writes", "rank 1 looks too early", "rank 1 looks"))
    leader = {size: total(costs[size]["rank 0 commits"]) for size in SIZES}
    each = (leader[24] - leader[8]) // 16
    assert rows["a rank writes its part, apart from the shard's bytes"] == str(total(writes))
    assert rows["a rank looks, and it is not decided"] == str(total(early))
    assert rows["a rank looks, and it is committed"] == str(total(late))
    assert rows["rank 0 commits"] == f"{leader[8] - 8 * each} + {each} N"
    assert rows["a rank finds its part at a restart"] == str(total(jobs[8].restart(1)))


@pytest.mark.parametrize(("ranks", "most"), [(2, 50), (MANY_RANKS, 50), (1_024, 6), (10_240, 5)])
def test_how_often_a_rank_looks(ranks: int, most: int, tmp_path: Path) -> None:
    """Within five seconds until the commit. With many ranks each looks less often, so that all together stay even."""
    persister = Persister(RunPaths(tmp_path), EventLog(tmp_path / "log", who="test"), lineage=1)
    now, looks = 0.0, 0
    while now < 5.0:
        pause = persister.pause(ranks, now)
        assert pause <= max(0.5, ranks / 1_000)
        now, looks = now + pause, looks + 1
    assert 1 <= looks <= most
    if ranks > MANY_RANKS:
        assert ranks / persister.pause(ranks, 0.0) <= 2_000, "looks a second, all ranks together"


def test_control_up_to_there_it_looks_as_soon_as_ever(tmp_path: Path) -> None:
    persister = Persister(RunPaths(tmp_path), EventLog(tmp_path / "log", who="test"), lineage=1)
    assert persister.pause(32, 0.0) == persister.pause(2, 0.0) == 0.005
