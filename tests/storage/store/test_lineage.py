"""Which history is true: forks, damaged links, identity of the run."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.errors import ConfigError, DamagedError, FencedError
from stepwell.storage.format.manifest import Lineage
from stepwell.storage.store import files
from stepwell.storage.store.commit import check_fence
from stepwell.storage.store.lineage import (
    History,
    create_next,
    newest_number,
    open_run,
    read_history,
    read_lineages,
    read_run,
)
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId


def lineage(number: int, parent: int, step: int) -> Lineage:
    return Lineage(number=number, parent=parent, step=step, created=0.0, host="h")


def history(*links: tuple[int, int, int]) -> History:
    return History(max(n for n, _, _ in links), {n: lineage(n, p, s) for n, p, s in links}.__getitem__)


def live(found: History, steps: range = range(0, 60, 10)) -> dict[int, list[int]]:
    """Live steps by lineage."""
    return {
        number: [step for step in steps if found.is_live(CheckpointId(step, 0, number))]
        for number in range(1, found.newest + 2)
    }


def test_restarts_in_a_row_keep_everything_up_to_where_each_went_on() -> None:
    found = live(history((1, 0, 0), (2, 1, 30), (3, 2, 40)))
    assert found == {1: [0, 10, 20, 30], 2: [0, 10, 20, 30, 40], 3: [0, 10, 20, 30, 40, 50], 4: []}


def test_a_fork_abandons_what_came_after_it() -> None:
    found = live(history((1, 0, 0), (2, 1, 50), (3, 1, 20)))
    assert found[1] == [0, 10, 20] and found[2] == [] and found[3] == [0, 10, 20, 30, 40, 50]


def test_a_fork_of_an_abandoned_branch_brings_that_one_back() -> None:
    found = live(history((1, 0, 0), (2, 1, 20), (3, 1, 40)))
    assert found[1] == [0, 10, 20, 30, 40] and found[2] == []


def test_a_path_only_goes_back_in_time() -> None:
    """Lineage 3 went on from step 10 of lineage 2, which had begun at step 30 of lineage 1: restored from memory."""
    found = live(history((1, 0, 0), (2, 1, 30), (3, 2, 10)))
    assert found[1] == [0, 10] and found[2] == [0, 10]


def test_a_fresh_start_leaves_everything_behind() -> None:
    found = live(history((1, 0, 0), (2, 0, 0)))
    assert found[1] == [] and found[2] == [0, 10, 20, 30, 40, 50]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_checkpoint_is_live_exactly_if_the_newest_lineage_was_built_on_it(data: st.DataObject) -> None:
    """Against the definition: walk the story of the run forward, remembering what each lineage stands on."""
    stands_on: dict[int, set[tuple[int, int]]] = {0: set()}
    links = []
    for number in range(1, data.draw(st.integers(1, 6)) + 1):
        parent = data.draw(st.integers(0, number - 1))
        step = data.draw(st.integers(0, 50)) if parent else 0
        links.append((number, parent, step))
        stands_on[number] = {(old, s) for old, s in stands_on[parent] if s <= step}
        stands_on[number] |= {(parent, s) for s in range(step + 1)} if parent else set()
    found = history(*links)
    newest = links[-1][0]
    for number in range(1, newest):
        for step in range(0, 51, 5):
            assert found.is_live(CheckpointId(step, 0, number)) is ((number, step) in stands_on[newest])
    assert found.is_live(CheckpointId(10**9, 0, newest))


def test_behind_a_damaged_link_nothing_is_live_and_the_file_is_named(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    open_run(paths, seed=1)
    for parent, step in ((0, 0), (1, 10), (2, 20)):
        create_next(paths, parent=parent, step=step)
    assert read_history(paths).is_live(CheckpointId(10, 0, 1))
    data = paths.lineage(2).read_bytes()
    paths.lineage(2).write_bytes(data.replace(b'"step":10', b'"step":99'))
    found = read_history(paths)
    assert not found.is_live(CheckpointId(10, 0, 1))
    assert "0002.json: checksum" in (found.why_not_live(CheckpointId(10, 0, 1)) or "")
    assert found.is_live(CheckpointId(20, 0, 2)) and found.is_live(CheckpointId(99, 0, 3))
    assert "abandoned" in (found.why_not_live(CheckpointId(21, 0, 2)) or "")
    assert found.why_not_live(CheckpointId(20, 0, 2)) is None
    paths.lineage(2).unlink()
    assert "lineage 2 is missing" in (read_history(paths).why_not_live(CheckpointId(10, 0, 1)) or "")


def test_lineages_are_numbered_without_gaps_and_never_reused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert newest_number(paths) == 0
    numbers = [create_next(paths, parent=0, step=0).number for _ in range(3)]
    paths.lineage(4).write_bytes(b"garbage: still taken")
    assert numbers == [1, 2, 3]
    assert create_next(paths, parent=3, step=1).number == 5
    found, damage = read_lineages(paths)
    assert sorted(found) == [1, 2, 3, 5] and list(damage) == [4]


def test_two_that_start_at_once_get_two_lineages(tmp_path: Path) -> None:
    """The second one looks for the newest number before the first has linked its own."""
    paths = RunPaths(tmp_path)
    real = files.put_new
    taken = []

    def first_comes_between(path: Path, data: bytes, *, point: str) -> bool:
        if not taken:
            taken.append(real(path, b"the first one's", point=point))
        return real(path, data, point=point)

    with mock.patch.object(files, "put_new", first_comes_between):
        assert create_next(paths, parent=0, step=0).number == 2
    assert paths.lineage(1).read_bytes() == b"the first one's"


def test_the_fence(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    create_next(paths, parent=0, step=0)
    check_fence(paths, CheckpointId(50, 0, 1))
    create_next(paths, parent=1, step=20)
    check_fence(paths, CheckpointId(20, 0, 1))  # the successor built on it: it may still be committed
    with pytest.raises(FencedError) as caught:
        check_fence(paths, CheckpointId(21, 0, 1))
    assert caught.value.fields == {"lineage": 1, "newest": 2}


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_identity_and_seed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "a" / "b" / "run")
    first = open_run(paths, seed=None)
    assert open_run(paths, seed=5) == first == read_run(paths)
    assert open_run(RunPaths(tmp_path / "other"), seed=5).seed == 5
    assert open_run(RunPaths(tmp_path / "third"), seed=None).seed != first.seed


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, True, "7"], ids=str)
def test_a_seed_that_could_not_be_read_back_is_refused_before_anything_exists(tmp_path: Path, seed: object) -> None:
    with pytest.raises(ConfigError, match="seed="):
        open_run(RunPaths(tmp_path / "run"), seed=seed)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_every_directory_on_the_way_is_synced(tmp_path: Path) -> None:
    """A checkpoint in a directory whose own name was never synced is lost with a power cut."""
    with mock.patch.object(files, "sync_directory", wraps=files.sync_directory) as sync:
        open_run(RunPaths(tmp_path / "a" / "run"), seed=1)
    assert [call.args[0] for call in sync.call_args_list] == [tmp_path, tmp_path / "a", tmp_path / "a" / "run"]


def test_a_run_whose_identity_is_lost_is_not_given_another_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    open_run(paths, seed=1)
    create_next(paths, parent=0, step=0)
    paths.run.unlink()
    with pytest.raises(DamagedError, match=r"run\.json: missing, but .* holds lineage"):
        open_run(paths, seed=1)
    assert not paths.run.exists()


def test_a_file_in_the_place_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    for root in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises((ConfigError, DamagedError), match="directory"):
            open_run(RunPaths(root), seed=1)


def test_a_directory_with_other_things_in_it_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    os.mkdir(tmp_path / "logs")
    assert open_run(RunPaths(tmp_path), seed=3).seed == 3
