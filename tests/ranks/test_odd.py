"""What is odd about a run of two ranks: each scene ends with the state that an undisturbed run ends with."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import VoidError
from stepwell.storage.store import assemble, catalog
from tests.crash.harness import Process, wait_for
from tests.ranks.conftest import MakeJob, soak
from tests.ranks.launch import HERE, Job, Launch

WORLD = 2
KEYS = ("0.weight", "0.bias", "1.weight", "1.bias", "seen", "generator", "step")


class Odd(Job):
    script = HERE / "odd.py"

    def go(self, world: int = WORLD, each: Any = None, **wishes: Any) -> Launch:
        return self.launch(world, json.dumps(wishes), each=each)

    def reports(self, launch: Launch) -> list[dict[str, Any]]:
        paths = [Path(f"{self.where}.{launch.number}.{rank}") for rank in range(launch.world)]
        return [json.loads(path.read_text()) for path in paths]

    def finals(self, launch: Launch) -> list[dict[str, Any]]:
        return [{key: report[key] for key in KEYS} for report in self.reports(launch)]

    def end(self, **wishes: Any) -> list[dict[str, Any]]:
        launch = self.go(**wishes)
        launch.wait_well()
        return self.finals(launch)

    def kill_at(self, step: int, barrier: Path, *, committed: int = 0, freeze: bool = False, **wishes: Any) -> None:
        """All ranks are killed when they stand in this step; their agents live on, or, frozen first, write nothing more
        and are killed too.
        """
        launch = self.go(stop=f"{step}:{barrier}", **wishes)
        self.wait_at(barrier, launch)
        if committed:
            self.wait_committed(committed, launch)
        frozen = [process for rank in range(launch.world) for process in self.freeze(rank)] if freeze else []
        launch.kill()
        launch.wait()
        for process in frozen:
            process.kill()
            process.close()
        barrier.touch()

    def committed_steps(self) -> list[int]:
        return sorted({event["step"] for event in self.events("commit")})


@pytest.fixture
def make(make_job: MakeJob) -> Any:
    return lambda name="job", **env: make_job(name, kind=Odd, **env)


# -- what the ranks share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [3, soak(1)])
def test_what_was_equal_at_first_and_is_each_rank_s_own(every: int, make: Any, tmp_path: Path) -> None:
    """The checkpoint in which it shows is void, the ranks look again, the next one commits and brings each its own."""
    wishes = {"drift": 5, "every": every, "pause": 0.03}
    job = make()
    job.kill_at(20, tmp_path / "barrier", committed=13, steps=24, **wishes)
    assert job.events("sharing")[0]["shared"] > job.events("sharing")[-1]["shared"]
    void = [event for event in job.events("persist-failed") if "differ from those of rank" in event["error"]]
    assert void and all(event["step"] not in job.committed_steps() for event in void)
    again = job.go(steps=24, **wishes)
    again.wait_well()
    one, other = job.reports(again)
    assert one["resumed"] == other["resumed"] >= 13
    assert one["seen found"] == [one["resumed"]] * 2
    assert other["seen found"] == [one["resumed"] + other["resumed"] - 4] * 2
    assert job.finals(again) == make("straight").end(steps=24, **wishes)
    job.check_nothing_left()


def test_it_shows_in_the_last_save_only(make: Any) -> None:
    """Nothing comes after that: the ranks look again at once."""
    job = make()
    job.end(drift=5, never=True, steps=8)
    newest = job.newest()
    assert newest is not None and newest.id.step == 8
    leaves = [{leaf.name: leaf.private for leaf in record.leaves} for record in job.records(newest)]
    assert all(found["more/seen"] for found in leaves)
    assert any(not private for found in leaves for private in found.values())
    job.check_nothing_left()


def test_control_without_the_check_a_mix_would_be_stored(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of the void checkpoint fit together: nothing but the samples tells that they must not be used."""
    job = make()
    launch = job.go(drift=5, steps=6, each={0: {"STEPWELL_CRASH": "agent!void.written:0:1:stop"}}, pause=0.05)
    found: list[Path] = wait_for(lambda: [*job.where.glob("step-*/void.json.*.tmp")], "the leader is about to say so")
    (directory,) = {path.parent for path in found}
    entry = catalog.judge(job.paths, _id(directory), catalog.read_history(job.paths))
    with pytest.raises(VoidError, match="differ from those of rank 0"):
        assemble.gather(job.paths, entry.id, WORLD)
    monkeypatch.setattr(assemble, "check_copies", lambda records: None)
    assert len(assemble.gather(job.paths, entry.id, WORLD)) == WORLD
    launch.kill()


def _id(directory: Path) -> Any:
    found = catalog.CheckpointId.parse(directory.name)
    assert found is not None
    return found


@pytest.mark.soak
def test_a_tensor_that_one_rank_has_only_from_some_step_on(make: Any, tmp_path: Path) -> None:
    """The others do not change with it, so nobody would tell what they hold: rank 0 lets all look again."""
    job = make()
    job.kill_at(130, tmp_path / "barrier", committed=1, steps=132, extra=5, pause=0.03)
    later = [step for step in job.committed_steps() if step > 5]
    assert later, job.committed_steps()
    assert job.end(steps=132, extra=5) == make("straight").end(steps=132, extra=5, pause=0)
    job.check_nothing_left()


def test_frozen_leaves_are_written_once_by_each_rank(make: Any) -> None:
    job = make()
    job.end(frozen=True, steps=12, keep=4, pause=0.05)
    entries = job.good()
    assert len(entries) >= 2
    assert not job.events("snapshot-void")
    for entry in entries:
        leaves = [leaf for record in job.records(entry) for leaf in record.leaves]
        assert all(leaf.file == 1 for leaf in leaves if leaf.name.startswith("model/0."))
    for rank in range(WORLD):
        files = [entry.path / f"rank-{rank:05d}.frozen.safetensors" for entry in entries]
        assert len({os.stat(path).st_ino for path in files}) == 1, "linked, not written again"
    again = job.go(frozen=True, steps=15)
    again.wait_well()
    assert job.reports(again)[1]["resumed"] == 12
    assert job.finals(again) == make("straight").end(frozen=True, steps=15)


@pytest.mark.parametrize("mesh", ["stages", soak("copies")])
def test_the_same_names_on_two_meshes_and_copies_on_one(mesh: str, make: Any, tmp_path: Path) -> None:
    """Shards of one row are empty on half of the ranks. Of two stages none may be taken for a copy of the other."""
    wishes = {"steps": 12, "mesh": mesh, "world": 4}
    job = make()
    job.kill_at(8, tmp_path / "barrier", committed=6, **wishes)
    job.kill_agents()
    newest = job.committed_steps()[-1]  # 6, or what the agents wrote before they were killed
    again = job.go(**wishes)
    again.wait_well()
    assert newest >= 6 and [report["resumed"] for report in job.reports(again)] == [newest] * 4
    found = [report["found"]["0.weight"] for report in job.reports(again)]
    assert len(set(found)) == (4 if mesh == "stages" else 2)
    assert job.finals(again) == make("straight").end(**wishes)
    job.check_nothing_left()


# -- memory and disk --------------------------------------------------------------------------------------------------


def test_too_little_memory_for_a_copy(make: Any, tmp_path: Path) -> None:
    """Saves are streamed: they commit, and nobody takes them for failed."""
    job = make()
    job.kill_at(8, tmp_path / "barrier", committed=6, host_memory=1, steps=12)
    assert not job.events("persist-failed") and not job.events("snapshot-void"), job.events("persist-failed")
    assert job.end(host_memory=1, steps=12) == make("straight").end(steps=12)
    assert {event["strategy"] for event in job.events("snapshot")} == {"streamed"}
    job.check_nothing_left()


@pytest.mark.parametrize("streamed", [False, soak(True)])
def test_a_disk_that_is_full_for_a_while(streamed: bool, make: Any) -> None:
    """One rank cannot write one checkpoint, or say so at once: nobody waits for long, and nothing is left of it."""
    wishes = {"steps": 30, "pause": 0.05} | ({"host_memory": 1} if streamed else {})
    job = make()
    full = ",".join(f"{op}:ENOSPC:{nth}" for op in ("write", "fallocate") for nth in range(4, 9))
    launch = job.go(**wishes, each={1: {"STEPWELL_FAULT": f"agent!{full}"}})
    launch.wait_well(30)
    assert [event for event in job.events("persist-failed") if event.get("rank") == 1]
    assert job.finals(launch) == make("straight").end(steps=30)
    assert job.committed_steps()[-1] == 30
    job.check_nothing_left()


@pytest.mark.parametrize("rank", [1, soak(0)])
def test_a_copy_that_fails_before_the_agent_hears_of_it(rank: int, make: Any) -> None:
    """The rank says itself that it has no part: nobody waits for one."""
    wishes = {"steps": 12, "pause": 0.05}
    job = make()
    launch = job.go(**wishes, each={rank: {"RANKS_FAIL_COPY": "2"}})
    launch.wait_well(30)
    (void,) = job.events("snapshot-void")
    assert "no memory for a digest" in void["seen_by"]
    assert void["step"] not in job.committed_steps() and job.committed_steps()[-1] == 12
    assert job.finals(launch) == make("straight").end(**wishes)
    job.check_nothing_left()


@pytest.mark.parametrize("rank", [soak(1), soak(0)])
def test_an_agent_that_dies_again_and_again_holds_no_rank_up(rank: int, make: Any, tmp_path: Path) -> None:
    """Training goes on everywhere. Nobody waits for parts that never come, at a save or at the end."""
    job, barrier = make(), tmp_path / "barrier"
    crash = {"STEPWELL_CRASH": f"agent!persist.begin:{rank}:1"}  # no mark: every agent of this rank dies there
    launch = job.go(steps=20, pause=0.02, stop=f"15:{barrier}", each={rank: crash})
    wait_for(lambda: job.events("agents-fail"), "one of them is given up")
    barrier.touch()
    assert launch.wait(60) == [3] * launch.world, "the last save failed on all ranks, and they say so"
    assert {report["error"][0] for report in job.reports(launch)} <= {"PersistError", "AgentError"}
    assert job.finals(launch) == make("straight").end(steps=20, pause=0.02)
    assert not job.committed_steps()


def test_a_part_of_which_nothing_comes_takes_no_room(make: Any, tmp_path: Path) -> None:
    """A rank whose disk stays full: what the other one wrote for each try is removed, though nothing newer commits."""
    job = make()
    job.go(
        steps=60,
        pause=0.02,
        stop=f"50:{tmp_path / 'barrier'}",
        each={1: {"STEPWELL_FAULT": "agent!fallocate:ENOSPC:3+"}},
    )
    wait_for(lambda: len(_voids(job)) > 4, "some are void")
    launch = job.launches[-1]
    job.wait_at(tmp_path / "barrier", launch)
    newest = job.newest_step()

    def kept() -> list[Path]:
        return [
            path for path in job.where.glob("step-*/rank-00000.safetensors") if int(path.parent.name[5:17]) > newest
        ]

    wait_for(lambda: len(kept()) <= 1, "what came to nothing is gone")
    launch.kill()


def _voids(job: Job) -> list[Path]:
    return [*job.where.glob("step-*/void.json")]


@pytest.mark.parametrize("victim", ["ranks", soak("everything")])
def test_snapshots_in_memory_between_checkpoints(victim: str, make: Any, tmp_path: Path) -> None:
    job = make()
    job.kill_at(18, tmp_path / "barrier", committed=10, freeze=victim == "everything", steps=24, every=10, memory=1)
    again = job.go(steps=24, every=10, memory=1)
    again.wait_well()
    resumed = job.reports(again)[0]["resumed"]
    assert resumed == 10 if victim == "everything" else resumed >= 17, resumed
    assert job.finals(again) == make("straight").end(steps=24, every=10)
    job.check_nothing_left()


def test_ranks_that_were_killed_a_step_apart(make: Any, tmp_path: Path) -> None:
    """What they have in common is older than what one of them has: that one is restored, from memory."""
    job = make()
    crash = {1: {"STEPWELL_CRASH": "trainer!copy.middle:1:14"}}
    launch = job.go(steps=24, every=100, memory=1, pause=0.05, each=crash)
    assert launch.wait()[1] == -signal.SIGKILL
    again = job.go(steps=24, every=100, memory=1)
    again.wait_well()
    resumed = job.reports(again)[0]["resumed"]
    assert resumed >= 10 and resumed in job.committed_steps(), "the agents of all ranks write what all went on from"
    assert {event["source"] for event in job.events("restore")} == {"memory"}
    assert job.finals(again) == make("straight").end(steps=24)
    job.check_nothing_left()


# -- saves, the end, leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [soak({"every": 3}), {"seconds": 0.05}])
def test_saves_that_are_asked_for_among_those_of_the_policy(policy: dict[str, Any], make: Any) -> None:
    job = make()
    launch = job.go(steps=12, save=[3, 4, 5, 9], named=4, keep=10, **policy)
    launch.wait_well()
    one, other = (report["saved"] for report in job.reports(launch))
    assert one == other and len(set(one)) == 4
    names = {entry.id.step: entry.manifest.name for entry in job.good() if entry.manifest is not None}
    assert names[4] == "kept"
    assert job.finals(launch) == make("straight").end(steps=12)
    job.check_nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_close_at_different_times(rank: int, make: Any) -> None:
    job = make()
    job.end(steps=4, never=True, late=f"{rank}:1.5")
    assert job.newest_step() == 4
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGUSR1, [1]), (signal.SIGTERM, [0, 1]), soak(signal.SIGUSR1, [0]), soak(signal.SIGTERM, [1])],
)
def test_told_to_leave(number: int, ranks: list[int], make: Any) -> None:
    """One rank is told, or all: they leave after the same step, with one checkpoint of it."""
    job = make()
    launch = job.go(steps=2000, never=True, grace=20, pause=0.01)
    job.wait_while_alive(launch, lambda: len(job.events("arena")) == WORLD, "the run is under way")
    for rank in ranks:
        process = Process(launch.ranks[rank].pid)
        process.signal(number)
        process.close()
    assert launch.wait(30) == [75, 75], launch.logs()
    one, other = (report["step"] for report in job.reports(launch))
    assert one == other == job.newest_step() > 0
    assert all(event["durable"] for event in job.events("left")), job.events("left")
    job.check_nothing_left()


# -- the way back -----------------------------------------------------------------------------------------------------


def test_a_named_step_and_single_objects(make: Any) -> None:
    job = make()
    job.end(steps=12, keep=4)
    branch = job.go(steps=6, keep=4, restore={"step": 6})
    branch.wait_well()
    assert [report["resumed"] for report in job.reports(branch)] == [6, 6]
    six = job.reports(branch)[0]["found"]
    only = job.go(steps=2, restore={"only": "model", "step": 6})
    only.wait_well()
    for report in job.reports(only):
        assert report["restored"] and report["resumed"] == 0 and report["found"] == six
    assert job.newest_step() == 2, "another history"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_it_does_not_fit(rank: int, make: Any) -> None:
    job = make()
    job.end(steps=6)
    for strict in (True, False):
        launch = job.go(steps=6, unlike=rank, restore={"strict": strict})
        assert launch.wait(30) == ([3, 3] if strict else [0, 0]) or not strict, launch.logs()
        if strict:
            reports = job.reports(launch)
            assert [report["error"][0] for report in reports] == ["StateError", "StateError"]
            assert reports[1 - rank]["error"][1].startswith(f"rank {rank}: ")
    job.wait_gone()


def test_a_rank_whose_data_is_refused(make: Any) -> None:
    job = make()
    launch = job.go(steps=6, fail=1)
    launch.wait(30)
    reports = job.reports(launch)
    assert "rank 1: " in reports[0]["error"][1], reports


def test_two_launches_at_once(make: Any, tmp_path: Path) -> None:
    """The later one has the run; the one before cannot commit any more, goes on, and says so."""
    job = make()
    barrier = tmp_path / "barrier"
    first = job.go(steps=20, stop=f"8:{barrier}")
    job.wait_at(barrier, first)
    job.wait_committed(6, first)
    second = job.go(steps=20)
    second.wait_well()
    before = [str(entry.id) for entry in catalog.scan(job.paths) if entry.is_live]
    barrier.touch()
    first.wait(60)
    assert [str(entry.id) for entry in catalog.scan(job.paths) if entry.is_live] == before
    assert job.events("fenced")
    assert job.finals(second) == make("straight").end(steps=20)
    job.wait_gone()
