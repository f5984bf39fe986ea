"""What a commit costs does not grow with what was before: restarts, and checkpoints that are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stepwell.errors import FencedError, StorageError
from stepwell.storage.store import commit
from stepwell.storage.store.catalog import scan
from stepwell.storage.store.lineage import create_next, newest_number, read_history
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep
from tests.crash.harness import report
from tests.storage.store.growing import Committer, counted

ALL = Keep(every=1)


def committer(where: Path, *, restarts: int = 1, kept: int = 0) -> Committer:
    made = Committer(RunPaths(where), where.with_suffix(".events"), keep=ALL, restarts=restarts)
    made.fill(kept)
    return made


def test_a_commit_costs_the_same_after_many_restarts(tmp_path: Path) -> None:
    few, many = committer(tmp_path / "few", restarts=2), committer(tmp_path / "many", restarts=300)
    assert many.cost() == few.cost()


def test_a_commit_costs_the_same_beside_many_kept_checkpoints(tmp_path: Path) -> None:
    few, many = committer(tmp_path / "few", kept=5), committer(tmp_path / "many", kept=200)
    assert many.cost() == few.cost()
    assert len([entry for entry in scan(many.paths) if entry.is_good]) == 204, "all of them are kept"


@pytest.mark.soak
def test_ten_thousand_restarts_and_a_thousand_kept_checkpoints(tmp_path: Path) -> None:
    few = committer(tmp_path / "few", restarts=2, kept=5).cost()
    many = committer(tmp_path / "many", restarts=10_000, kept=1_000).cost()
    report(f"a commit after 1 restart, 5 kept: {dict(few)}; after 10,000, 1,000 kept: {dict(many)}")
    assert many == few


def test_a_history_is_read_as_far_back_as_is_asked(tmp_path: Path) -> None:
    """A restart after 300 others reads the last of them."""
    made = committer(tmp_path / "run", restarts=300)
    with counted(made.paths.root) as found:
        assert read_history(made.paths).is_live(CheckpointId(298, 0, 299))
    assert found["open"] <= 3


# -- what is known never hides what is new, or gone -------------------------------------------------------------------


def test_a_lineage_that_anybody_adds_is_seen_by_the_next_look(tmp_path: Path) -> None:
    made = committer(tmp_path / "run")
    made.commit()
    paths, id = made.persister.paths, CheckpointId(made.step + 1, 0, 1)
    commit.check_fence(paths, id)
    for number in (2, 3):  # by other processes, which go on from before
        assert create_next(RunPaths(tmp_path / "run"), parent=1, step=0).number == number
    with pytest.raises(FencedError) as caught:
        commit.check_fence(paths, id)
    assert caught.value.fields["newest"] == 3
    assert not made.persister.prune(1, Keep()) or len(scan(made.paths)) == 1


def test_a_run_that_is_away_is_no_run_without_lineages(tmp_path: Path) -> None:
    made = committer(tmp_path / "run", restarts=3)
    made.commit()
    paths, id = made.persister.paths, CheckpointId(9, 0, 3)
    os.rename(tmp_path / "run", tmp_path / "away")
    with pytest.raises(StorageError):
        commit.check_fence(paths, id)
    os.mkdir(tmp_path / "run")
    with pytest.raises(StorageError):
        commit.check_fence(paths, id)
    os.rmdir(tmp_path / "run")
    os.rename(tmp_path / "away", tmp_path / "run")
    commit.check_fence(paths, id)
    assert newest_number(paths) == 3


def test_the_newest_good_ones_are_looked_at_each_time(tmp_path: Path) -> None:
    """Somebody else removes or damages them: older ones have to stay in their place."""
    made = Committer(RunPaths(tmp_path / "run"), tmp_path / "events", keep=Keep(last=4))
    for _ in range(4):
        made.commit()
    ids = [entry.id for entry in scan(made.paths)]
    made.paths.manifest(ids[0]).write_bytes(b"damaged")
    shutil.rmtree(made.paths.checkpoint(ids[1]))
    made.commit()
    found = scan(made.persister.paths)
    assert [entry.id for entry in found if entry.is_good] == [found[0].id, *ids[2:]], "three good ones: none may go"


def test_what_is_gone_is_not_remembered(tmp_path: Path) -> None:
    made = committer(tmp_path / "run", kept=6)
    made.commit()
    shutil.rmtree(made.paths.checkpoint(CheckpointId(3, 0, 1)))
    assert [entry.id.step for entry in scan(made.persister.paths)] == [8, 7, 6, 5, 4, 2]
