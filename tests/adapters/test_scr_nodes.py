"""Programs of SCR's flow on four nodes, which are killed, lost and damaged: their own files come back, byte by byte."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stepwell.tools.cli.main import main
from tests.adapters.scr_job import ScrJob, flip
from tests.adapters.scr_program import content
from tests.crash.harness import Server, report
from tests.ranks.conftest import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def job(server: Server, tmp_path: Path) -> Iterator[ScrJob]:
    made = ScrJob(server, tmp_path / "job", SCR_FLUSH="2")
    yield made
    made.end_everything()


def run_and_kill(job: ScrJob, *arguments: object, nodes: str = "abcd", **env: str) -> dict[str, Any]:
    """Three checkpoints, the second of them in the prefix; then all ranks are killed."""
    launch = job.start(nodes, "--stay", "--steps", 3, *arguments, **env)
    found = job.same(launch)
    launch.kill()
    launch.end_store()
    return found


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGUSR1)])
def test_a_signal_to_any_rank_makes_one_more_checkpoint_and_ends_the_job(job: ScrJob, rank: int, number: int) -> None:
    env = {"SCR_CHECKPOINT_INTERVAL": "100000000"}
    launch = job.start("ab", "--steps", 100000000, **env)
    started = [job.folder / f"seen.{launch.number}.{one}" for one in range(2)]
    job.wait_while_alive(launch, lambda: all(place.exists() for place in started), "both are in their loops")
    launch.ranks[rank].signal(number)
    launch.wait_well()
    found = job.same(launch)
    ((step, is_whole),) = found["made"]
    assert is_whole
    again = job.start("ab", "--steps", step, **env)
    again.wait_well()
    assert job.same(again) == {"seen": [[step, True]], "made": []}, "the next job goes on, and is not told to leave"


def restart(job: ScrJob, nodes: str, *arguments: object, **env: str) -> dict[str, Any]:
    launch = job.start(nodes, *arguments, **env)
    launch.wait_well()
    return job.same(launch)


@pytest.mark.parametrize(
    ("scheme", "lost", "expected"),
    [("SINGLE", "b", 2), ("PARTNER", "b", 3), ("XOR", "b", 3), ("RS", "bd", 3)],
)
def test_nodes_are_lost(job: ScrJob, scheme: str, lost: str, expected: int) -> None:
    env = {"SCR_COPY_TYPE": scheme}
    assert run_and_kill(job, **env) == {"seen": [], "made": [[step, True] for step in range(1, 4)]}
    job.lose(*lost)
    spare = "".join("x" if name in lost[:1] else "y" if name in lost else name for name in "abcd")
    assert restart(job, spare, "--steps", 4, **env)["seen"] == [[expected, True]]
    assert "ckpt.4" in job.in_prefix()  # finalize carries the newest
    for rank in range(4):
        assert (job.prefix.root / "ckpt.4" / "data" / f"{rank}.bin").is_file()


@pytest.mark.parametrize(("scheme", "expected"), [soak("SINGLE", 2), ("PARTNER", 3), soak("XOR", 3)])
def test_a_flipped_bit_is_repaired_or_refused(job: ScrJob, scheme: str, expected: int) -> None:
    env = {"SCR_COPY_TYPE": scheme}
    run_and_kill(job, **env)
    own = [path for path in job.cached_files("c") if path.name.startswith("rank-00002.")]
    flip(next(path for path in own if path.stat().st_size > 1000))
    assert restart(job, "abcd", "--steps", 3, **env)["seen"] == [[expected, True]]
    assert "repaired" in job.event_kinds()


@pytest.mark.soak
def test_a_flipped_bit_and_a_lost_node_are_two_losses(job: ScrJob) -> None:
    """RS(4, 2): a damaged survivor counts as lost, and the rest is enough."""
    env = {"SCR_COPY_TYPE": "RS"}
    run_and_kill(job, **env)
    own = [path for path in job.cached_files("c") if path.name.startswith("rank-00002.")]
    flip(next(path for path in own if path.stat().st_size > 1000))
    job.lose("a")
    assert restart(job, "abcd", "--steps", 3, **env)["seen"] == [[3, True]]


@pytest.mark.parametrize("how", ["--refuse", soak("--unwritten")])
def test_one_rank_discards_an_output_for_all(job: ScrJob, how: str) -> None:
    found = run_and_kill(job, how, "3:2")
    assert found["made"] == [[1, True], [2, True], [3, False]]
    assert "output-discarded" in job.event_kinds()
    assert restart(job, "abcd", "--steps", 2)["seen"] == [[2, True]]


@pytest.mark.soak
def test_a_refused_restart_offers_the_next_older_one_for_good(job: ScrJob) -> None:
    run_and_kill(job)
    assert restart(job, "abcd", "--misread", "3:1", "--steps", 2)["seen"] == [[3, False], [2, True]]
    assert restart(job, "abcd", "--steps", 2)["seen"] == [[2, True]]


POINTS = {
    "the files of a rank, no record": "record.written:2:3",
    "the record of a rank": "record.linked:2:3",
    "the word of rank 0 that all hold it": "manifest.linked:0:3",
}


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if "no record" in name else [pytest.mark.soak]) for name, point in POINTS.items()],
)
def test_killed_in_the_middle_of_an_output(job: ScrJob, point: str) -> None:
    """The 3rd: it is there for all ranks, or for none."""
    launch = job.start("abcd", "--steps", 3, STEPWELL_CRASH=point, SCR_FLUSH="0", SCR_COPY_TYPE="PARTNER")
    job.wait_any_end(launch)
    launch.kill()
    launch.end_store()
    seen = restart(job, "abcd", "--steps", 4, SCR_FLUSH="0", SCR_COPY_TYPE="PARTNER")["seen"]
    assert seen in ([[2, True]], [[3, True]])
    if point.startswith("record.written"):
        assert seen == [[2, True]]


@pytest.mark.parametrize(
    ("point", "is_async"),
    [
        pytest.param("shard.renamed:1:2", "1", id="a part half carried, by the thread"),
        pytest.param("records.gathered:0:1", "1", id="all but the manifest", marks=pytest.mark.soak),
        pytest.param("shard.renamed:1:2", "0", id="a part half carried", marks=pytest.mark.soak),
        pytest.param("manifest.linked:0:3", "0", id="all but the names of the program", marks=pytest.mark.soak),
    ],
)
def test_killed_in_the_middle_of_a_flush(job: ScrJob, point: str, is_async: str) -> None:
    env = {"SCR_COPY_TYPE": "SINGLE", "SCR_FLUSH_ASYNC": is_async}
    launch = job.start("abcd", "--steps", 2, "--stay", STEPWELL_CRASH=point, **env)
    job.wait_any_end(launch)
    launch.kill()
    launch.end_store()
    assert not (job.prefix.root / "ckpt.2").exists(), "names appear when all of it is there"
    # Beginning is enough: nothing is written any more, and what was broken off is ended.
    assert restart(job, "abcd", "--steps", 2, **env)["seen"] == [[2, True]]
    assert job.in_prefix() == ["ckpt.2"]
    assert (job.prefix.root / "ckpt.2" / "rank 0" / "model.pt").is_file()
    job.lose("a", "b", "c", "d")
    assert restart(job, "wxyz", "--steps", 2, **env)["seen"] == [[2, True]], "and it is whole"


@pytest.mark.soak
def test_all_that_is_missing_is_the_manifest_and_the_caches_are_gone(job: ScrJob) -> None:
    env = {"SCR_COPY_TYPE": "SINGLE", "SCR_FLUSH_ASYNC": "1"}
    launch = job.start("abcd", "--steps", 2, "--stay", STEPWELL_CRASH="records.gathered:0:1", **env)
    job.wait_any_end(launch)
    launch.kill()
    launch.end_store()
    job.lose("a", "b", "c", "d")
    assert job.in_prefix() == []
    assert restart(job, "wxyz", "--steps", 2, **env)["seen"] == [[2, True]]


@pytest.mark.parametrize("world", [soak(2), soak(5)])
def test_another_number_of_ranks_goes_on_where_the_program_asks_for_it(job: ScrJob, world: int) -> None:
    env = {"SCR_COPY_TYPE": "PARTNER"}
    run_and_kill(job, "--steps", 2, **env)
    nodes = "abcde" if world == 5 else "ac"  # a and c hold the parts of d and b too
    assert restart(job, nodes, "--steps", 0, **env)["seen"] == [], "not unasked"
    found = restart(job, nodes, "--steps", 0, "--old-world", 4, SCR_GLOBAL_RESTART="1", **env)
    assert found["seen"] == [[2, True]]


@pytest.mark.soak
def test_the_same_names_in_every_checkpoint(job: ScrJob) -> None:
    """What the program calls its newest is replaced whole, and the one before keeps its bytes."""
    env = {"SCR_FLUSH": "1", "SCR_COPY_TYPE": "SINGLE"}
    run_and_kill(job, "--same-name", "--steps", 3, **env)
    job.lose("a", "b", "c", "d")
    newest = job.prefix.paths.checkpoint(job.prefix.datasets()[0].id)
    flip(next(path for path in sorted(newest.glob("rank-00001.*.file")) if path.stat().st_size > 1000))
    assert restart(job, "abcd", "--same-name", "--steps", 2, **env)["seen"] == [[2, True]]


@pytest.mark.soak
def test_ranks_in_another_order(job: ScrJob) -> None:
    env = {"SCR_COPY_TYPE": "XOR", "SCR_FLUSH": "0"}
    run_and_kill(job, "--steps", 2, **env)
    job.lose("d")
    assert restart(job, "cxab", "--steps", 3, **env)["seen"] == [[2, True]]
    assert job.in_prefix() == []


@pytest.mark.soak
def test_a_prefix_that_fails_is_no_end(job: ScrJob) -> None:
    """The first tries of all ranks to carry a file fail; they are made again."""
    env = {"SCR_COPY_TYPE": "SINGLE", "SCR_FLUSH": "1"}
    launch = job.start("abcd", "--steps", 2, STEPWELL_FAULT="fallocate:EIO:1,fallocate:ENOSPC:2", **env)
    launch.wait_well()
    assert job.same(launch)["made"] == [[1, True], [2, True]]
    assert job.in_prefix() == ["ckpt.1", "ckpt.2"]
    assert "flush-failed" in job.event_kinds()


@pytest.mark.soak
def test_scavenge_rebuilds_what_a_lost_node_had(job: ScrJob) -> None:
    run_and_kill(job, "--steps", 2, SCR_COPY_TYPE="XOR", SCR_FLUSH="0")
    job.lose("b")
    caches = [str(job.node(name)) for name in "acd"]
    flipped = next(path for path in job.cached_files("a") if path.stat().st_size > 1000)
    found = CliRunner().invoke(main, ["scavenge", str(job.prefix.root), *caches])
    assert found.exit_code == 0, found.output
    assert job.in_prefix() == ["ckpt.2"]
    for rank in range(4):
        assert (job.prefix.root / "ckpt.2" / "data" / f"{rank}.bin").read_bytes() == content(2, rank)
    # Control: with one more loss than the set survives, nothing is made up.
    found = CliRunner().invoke(main, ["index", str(job.prefix.root), "--delete", "ckpt.2"])
    assert found.exit_code == 0, found.output
    flip(flipped)
    found = CliRunner().invoke(main, ["scavenge", str(job.prefix.root), *caches])
    assert "ckpt.2: parts are missing" in found.output
    assert "copied  ckpt.1" in found.output


@pytest.mark.soak
def test_several_ranks_on_a_node(job: ScrJob) -> None:
    env = {"SCR_COPY_TYPE": "XOR", "SCR_FLUSH": "0"}
    run_and_kill(job, nodes="aabb", **env)
    job.lose("b")
    assert restart(job, "aaxx", "--steps", 4, **env)["seen"] == [[3, True]]


@pytest.mark.soak
def test_a_rank_that_is_gone_ends_the_others_with_its_number(job: ScrJob) -> None:
    launch = job.start("abcd", "--steps", 3, STEPWELL_CRASH="record.written:2:2", STEPWELL_GROUP_SECONDS="5")
    statuses = launch.wait()
    assert statuses[2] == -9 and all(status > 0 for status in (statuses[0], statuses[1], statuses[3]))
    assert "ScrError" in launch.ranks[0].log() and "rank 2 did not take part" in launch.ranks[0].log()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["PARTNER", "XOR", "RS"])
def test_kills_at_any_moment_and_lost_nodes(job: ScrJob, scheme: str) -> None:
    """What `complete_output` called whole on any rank is never lost, and what is read is what was written."""
    seed = int(os.environ.get("STEPWELL_SOAK_SEED") or random.randrange(1 << 30))
    dice, nodes, best, lost = random.Random(seed), list("abcd"), 0, 0
    rounds = 10
    for number in range(rounds):
        env = {"SCR_COPY_TYPE": scheme, "SCR_FLUSH": "3", "SCR_FLUSH_ASYNC": "1"}
        launch = job.start(nodes, "--steps", 100000, **env)
        places = [job.folder / f"seen.{launch.number}.{rank}" for rank in range(4)]
        job.wait_while_alive_or_ended(launch, places)
        began = {int(place.read_text()) for place in places}
        assert len(began) == 1 and min(began) >= best, (seed, number, began, best)
        time.sleep(dice.uniform(0.0, 2.0))  # the moment of the kill
        launch.kill()
        launch.end_store()
        done = [int(place.read_text()) for place in job.folder.glob("done.?")]
        best = max([best, *began, *done])
        if dice.random() < 0.6:
            where = dice.randrange(4)
            job.lose(nodes[where])
            nodes[where] = f"{nodes[where][0]}{number}"
            lost += 1
    found = CliRunner().invoke(main, ["verify", str(job.paths.root)])
    assert found.exit_code == 0 or "no checkpoint" in found.output, (seed, found.output)
    report(f"scr, {scheme}: {rounds} kills, {lost} lost nodes, {best} checkpoints, seed {seed}")


@pytest.mark.soak
@pytest.mark.parametrize("is_async", ["0", "1"])
def test_a_prefix_that_never_takes_anything_leaves_all_to_the_next_start(job: ScrJob, is_async: str) -> None:
    env = {"SCR_COPY_TYPE": "SINGLE", "SCR_FLUSH": "1", "SCR_FLUSH_ASYNC": is_async}
    launch = job.start("abcd", "--steps", 2, STEPWELL_FAULT="fallocate:EIO:1+", STEPWELL_CLOSE_SECONDS="1", **env)
    launch.wait_well()
    assert job.same(launch)["made"] == [[1, True], [2, True]]
    assert job.in_prefix() == []
    assert restart(job, "abcd", "--steps", 2, **env)["seen"] == [[2, True]]
    assert job.in_prefix() == ["ckpt.1", "ckpt.2"]


@pytest.mark.soak
def test_ranks_that_do_not_agree_are_told_and_go_on(job: ScrJob) -> None:
    launch = job.start("abcd", "--steps", 4, "--rename", "2:3", "--share", 3, SCR_FLUSH="0")
    launch.wait_well()
    (first, second, third, fourth) = job.same(launch)["made"]
    assert (first, third, fourth) == ([1, True], [3, False], [4, True])
    assert "rank 3 began 'other.2'" in second[1]
    assert any("several ranks wrote it" in str(event) for event in job.rank_events(0))
