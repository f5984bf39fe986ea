"""Somebody who may write to a run swaps its directories for links while stepwell works: nothing elsewhere is touched.

A second user makes the swap, at the moment between looking and acting. Each attack has a control, in which links are
followed as they were before: there it gets through.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stepwell.adapters.scr.application_files import clear_work, publish, withdraw
from stepwell.agent.files.writer import Writer
from stepwell.agent.target.shared_target import Persister
from stepwell.errors import DamagedError
from stepwell.events import journal
from stepwell.restore.byte_sources import FileSource
from stepwell.storage.chain import chain_files
from stepwell.storage.format.record import FileEntry, Record
from stepwell.storage.store import catalog, commit, files, retention
from stepwell.storage.store.lineage import create_next
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli.commands import clean as cleaning
from stepwell.tools.cli.liveness import Life
from stepwell.types import CheckpointId, Keep, Owner
from tests.hostile.forge import net, original, values
from tests.hostile.stranger import STRANGER, as_user, machine, needs_root, swap
from tests.restore.build import RunBuilder, restore

__all__ = ["machine"]
pytestmark = needs_root
DEAD = Life(False, "nobody", None, (), None, True)
FOLLOWED = pytest.mark.parametrize("is_followed", [False, True], ids=["", "control"])
FIRST, SECOND = CheckpointId(1, 0, 1), CheckpointId(2, 0, 1)


@contextlib.contextmanager
def links(*, are_followed: bool) -> Iterator[None]:
    """The control: names are what they were before, and lead wherever a link leads."""
    if not are_followed:
        yield
        return
    with mock.patch.object(os, "O_NOFOLLOW", 0):
        yield


@pytest.fixture
def paths(machine: Path) -> RunPaths:
    """A run with two checkpoints in a directory that a group shares: here everybody may write to it."""
    root = Path(shutil.copytree(original(), machine / "run"))
    for path in (root, *root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return RunPaths(root)


@pytest.fixture
def precious(machine: Path) -> Path:
    """The victim's own files, where nobody else may look; names as in a checkpoint, so that they would be taken."""
    folder = machine / "precious"
    folder.mkdir(mode=0o700)
    for name in ("manifest.json", "rank-00000.json", "rank-00000.safetensors", "thesis.txt", "0001.json.1.4194999.tmp"):
        (folder / name).write_bytes(b"precious")
    return folder


def untouched(folder: Path) -> bool:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return len(found) == 5 and set(found.values()) == {b"precious"}


def swap_as_stranger(directory: Any, target: Path) -> None:
    assert as_user(STRANGER, lambda: swap(directory, target)) is None


def at_point(name: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Between two lines: once, where this crash point is passed."""
    done: list[str] = []

    def point(passed: str) -> None:
        if passed == name and not done:
            done.append(passed)
            act()

    return point


# -- removing ---------------------------------------------------------------------------------------------------------


@FOLLOWED
def test_clean_removes_nothing_elsewhere(paths: RunPaths, precious: Path, is_followed: bool) -> None:
    directory = paths.checkpoint(SECOND)
    (directory / "manifest.json").unlink()  # type: ignore[union-attr]
    (precious / "manifest.json").rename(precious / "notes.txt")  # else it would count as committed meanwhile

    def look(_: RunPaths) -> Life:
        swap_as_stranger(directory, precious)  # after what is left over was listed
        return DEAD

    with mock.patch.object(cleaning, "look_for_life", look), links(are_followed=is_followed):
        result = cleaning.clean_run(paths)
    assert untouched(precious) is not is_followed
    assert is_followed or result.failed or not result.removed


@FOLLOWED
def test_a_directory_that_is_swapped_while_it_is_emptied(paths: RunPaths, precious: Path, is_followed: bool) -> None:
    """As above, a moment later: its names were listed, and are removed one after the other."""
    directory, listed = paths.checkpoint(SECOND), files.list_names
    (directory / "manifest.json").unlink()  # type: ignore[union-attr]
    (precious / "manifest.json").rename(precious / "notes.txt")
    swapped: list[Any] = []

    def list_names(path: Any, **more: Any) -> list[str]:
        names = listed(path, **more)
        if path == directory and names and not swapped:
            swapped.append(swap_as_stranger(path, precious))
        return names

    entry = next(entry for entry in catalog.scan(paths) if entry.id == SECOND)
    with (
        mock.patch.object(files, "list_names", list_names),
        links(are_followed=is_followed),
        contextlib.suppress(OSError, DamagedError),
    ):
        retention.remove_directory(entry.path)
    assert swapped and untouched(precious) is not is_followed


@pytest.mark.parametrize("is_followed", [False, True], ids=["", "control"])
def test_clean_stays_in_the_directory_that_it_listed(paths: RunPaths, machine: Path, is_followed: bool) -> None:
    """Who may write beside a run puts a link to another run of the victim's in the place of the whole of it."""
    (paths.checkpoint(SECOND) / "manifest.json").unlink()  # type: ignore[union-attr]
    machine.chmod(0o777)
    other = Path(shutil.copytree(paths.root, machine / "other"))  # type: ignore[arg-type]

    def look(_: RunPaths) -> Life:
        swap_as_stranger(paths.root, other)
        return DEAD

    safety = mock.patch.object(cleaning, "held", contextlib.nullcontext) if is_followed else contextlib.nullcontext()
    with mock.patch.object(cleaning, "look_for_life", look), safety:
        result = cleaning.clean_run(paths)
    assert (other / SECOND.directory).exists() is not is_followed
    assert [item.path.name for item in result.removed] == [SECOND.directory]


@FOLLOWED
def test_clean_removes_no_temporary_file_elsewhere(paths: RunPaths, precious: Path, is_followed: bool) -> None:
    (paths.lineages / "0001.json.1.4194999.tmp").write_bytes(b"left")  # type: ignore[union-attr]

    def look(_: RunPaths) -> Life:
        swap_as_stranger(paths.lineages, precious)
        return DEAD

    with mock.patch.object(cleaning, "look_for_life", look), links(are_followed=is_followed):
        cleaning.clean_run(paths)
    assert untouched(precious) is not is_followed


@FOLLOWED
def test_prune_removes_nothing_elsewhere(paths: RunPaths, precious: Path, is_followed: bool) -> None:
    """`stepwell prune`, the agent and the SCR interface remove a checkpoint by this one function."""
    entry = next(entry for entry in catalog.scan(paths) if entry.id == FIRST)
    point = at_point("prune.begin", lambda: swap_as_stranger(entry.path, precious))
    with (
        mock.patch.object(retention, "crash_point", point),
        links(are_followed=is_followed),
        contextlib.suppress(OSError, DamagedError),
    ):
        retention.remove_checkpoint(entry.id, entry.path)
    assert untouched(precious) is not is_followed


@FOLLOWED
def test_the_agents_own_pruning_removes_nothing_elsewhere(
    paths: RunPaths, precious: Path, tmp_path: Path, is_followed: bool
) -> None:
    build = RunBuilder(paths.root)  # type: ignore[arg-type]
    for step in (3, 4):
        build.write({"values": values(step), "model": net(step).state_dict()}, step)
    log = journal.EventLog(tmp_path / "events", who="test")
    persister = Persister(paths, log, lineage=build.lineage)
    point = at_point("prune.begin", lambda: swap_as_stranger(paths.checkpoint(SECOND), precious))
    with mock.patch.object(retention, "crash_point", point), links(are_followed=is_followed):
        is_clean = persister.prune(build.lineage, Keep(last=2))
    log.close()
    assert untouched(precious) is not is_followed
    assert not is_clean, "what cannot be removed is told, and tried again"


@FOLLOWED
def test_a_chain_is_not_removed_elsewhere(paths: RunPaths, precious: Path, is_followed: bool) -> None:
    chain = chain_files.chain_path(paths, FIRST)
    chain.mkdir(parents=True)
    for path in (chain, chain.parent):
        path.chmod(0o777)
    (chain / "chain.json").write_bytes(b"")
    point = at_point("chain.prune", lambda: swap_as_stranger(chain, precious))
    with (
        mock.patch.object(chain_files, "crash_point", point),
        links(are_followed=is_followed),
        contextlib.suppress(OSError, DamagedError),
    ):
        chain_files.remove_chain(paths.root, FIRST)
    assert untouched(precious) is not is_followed


@FOLLOWED
def test_work_of_the_scr_interface_is_not_removed_elsewhere(machine: Path, precious: Path, is_followed: bool) -> None:
    """With SCR_CACHE_BYPASS=1 it lies in the prefix, which a group may share."""
    home = machine / "home"
    (home / "work").mkdir(parents=True)
    home.chmod(0o777)
    (precious / "rank-00000").mkdir()
    for path in list(precious.iterdir()):
        if path.is_file():
            path.rename(precious / "rank-00000" / path.name)
    swap_as_stranger(home / "work", precious)
    with links(are_followed=is_followed):
        clear_work(home, "work/rank-00000")
    folder = precious / "rank-00000"
    assert (folder.exists() and untouched(folder)) is not is_followed


# -- writing ----------------------------------------------------------------------------------------------------------


def written(what: str, paths: RunPaths, swapped: Callable[[], None]) -> None:
    """An agent opens a checkpoint; then a directory is swapped; then it goes on."""
    id = CheckpointId(3, 0, 1)
    directory = commit.open_checkpoint(paths, id, Owner())
    assert isinstance(directory, Path)
    directory.chmod(0o777)
    swapped()
    if what == "shard":
        Writer().write(directory / "rank-00000.safetensors.tmp", memoryview(bytearray(4096)), 4096)
        commit.publish_file(
            directory / "rank-00000.safetensors.tmp", directory / "rank-00000.safetensors", is_same=True
        )
    elif what == "record":
        files.put(directory / "rank-00000.json", b"{}", point="record")
    elif what == "frozen":
        commit.share_file(paths.checkpoint(FIRST) / "rank-00000.safetensors", directory / "rank-00000.safetensors")
    elif what == "manifest":
        files.remove(directory / "manifest.json")
        files.put_new(directory / "manifest.json", b"{}", point="manifest")
    else:
        create_next(paths, parent=1, step=2)


@FOLLOWED
@pytest.mark.parametrize("what", ["shard", "record", "frozen", "manifest", "lineage"])
def test_nothing_is_written_elsewhere(paths: RunPaths, precious: Path, what: str, is_followed: bool) -> None:
    place = paths.lineages if what == "lineage" else paths.checkpoint(CheckpointId(3, 0, 1))
    with links(are_followed=is_followed), contextlib.suppress(OSError, DamagedError):
        written(what, paths, lambda: swap_as_stranger(place, precious))
    assert untouched(precious) is not is_followed


@FOLLOWED
def test_a_temporary_name_that_is_a_link_to_another_file_empties_nothing(
    paths: RunPaths, precious: Path, is_followed: bool
) -> None:
    """A hard link: strangers can make one to what is not theirs where `fs.protected_hardlinks` is 0."""
    directory = paths.checkpoint(SECOND)
    assert isinstance(directory, Path)
    os.link(precious / "thesis.txt", directory / "rank-00000.safetensors.tmp")
    temporary = directory / "rank-00000.safetensors.tmp"
    if is_followed:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # as it was opened before
    else:
        Writer().write(temporary, memoryview(bytearray(4096)), 4096)
    assert untouched(precious) is not is_followed


@pytest.mark.parametrize("change", ["hard link", "of another user"])
def test_a_spare_that_somebody_swapped_is_not_overwritten(paths: RunPaths, precious: Path, change: str) -> None:
    directory = paths.checkpoint(SECOND)
    assert isinstance(directory, Path)
    temporary = directory / "rank-00000.safetensors.tmp"
    if change == "hard link":
        os.link(precious / "thesis.txt", temporary)
    else:
        as_user(STRANGER, lambda: temporary.write_bytes(b"mine"))
    Writer().write(temporary, memoryview(bytearray(4096)), 4096, reuse=True)
    assert untouched(precious)
    assert temporary.stat().st_uid == os.geteuid() and temporary.stat().st_nlink == 1, "a file of its own"


# -- reading ----------------------------------------------------------------------------------------------------------


@FOLLOWED
def test_nothing_elsewhere_is_read(paths: RunPaths, precious: Path, is_followed: bool) -> None:
    directory = paths.checkpoint(SECOND)
    swap_as_stranger(directory, precious)
    found = []
    with links(are_followed=is_followed):
        for read in (
            lambda: files.get(directory / "thesis.txt"),
            lambda: files.facts(directory / "thesis.txt"),
            lambda: files.list_names(directory) or None,
            lambda: files.list_facts(directory) or None,
            lambda: FileSource(directory / "thesis.txt").close() or True,  # type: ignore[arg-type,func-returns-value]
        ):
            with contextlib.suppress(OSError, DamagedError):
                found.append(read())
    assert [item for item in found if item is not None] == [] or is_followed
    assert not is_followed or len([item for item in found if item is not None]) == 5


def test_a_restore_takes_the_older_checkpoint(paths: RunPaths, machine: Path) -> None:
    """The link even leads to a good copy: what lies elsewhere is not part of the run."""
    copy = machine / "copy"
    shutil.copytree(paths.checkpoint(SECOND), copy)  # type: ignore[arg-type]
    swap_as_stranger(paths.checkpoint(SECOND), copy)
    reopened = restore(paths.root, {"values": {}, "model": net(0)})  # type: ignore[arg-type]
    assert reopened.restored is not None and reopened.restored.step == 1


def test_a_run_may_be_reached_over_links(paths: RunPaths, machine: Path) -> None:
    """The run's own directory is the user's to name; one that has the name of a directory of a run too."""
    for name in ("link", "lineage", "chains", "step-000000000001.l0001"):
        os.symlink(paths.root, machine / name)
        found = RunPaths.at(machine / name)
        assert [entry.id for entry in catalog.scan(found) if entry.is_good] == [SECOND, FIRST], name
        assert files.exists(found.run)


# -- the program's own paths in a prefix ------------------------------------------------------------------------------


def record(paths: RunPaths) -> Record:
    name = "rank-00000.safetensors"
    nbytes = (paths.checkpoint(FIRST) / name).stat().st_size  # type: ignore[union-attr]
    tree = {"format": "stepwell.scr/1", "name": "c", "flags": 1, "number": 1, "paths": {name: "out/thesis.txt"}}
    return Record("0" * 16, FIRST, Owner(), 0.0, (FileEntry(name, "opaque", nbytes, 4096, ()),), (), tree)


def test_a_strangers_link_in_the_prefix_is_not_followed(paths: RunPaths, precious: Path, machine: Path) -> None:
    prefix = machine / "prefix"
    prefix.mkdir()
    prefix.chmod(0o777)
    as_user(STRANGER, lambda: os.symlink(precious, prefix / "out"))
    with pytest.raises(PermissionError, match="a link of another user"):
        publish(prefix, paths, [record(paths)])
    assert untouched(precious)
    os.lchown(prefix / "out", 0, 0)
    assert publish(prefix, paths, [record(paths)]) == 1, "one's own is: many programs have such a place for output"
    assert (precious / "thesis.txt").samefile(paths.checkpoint(FIRST) / "rank-00000.safetensors")  # type: ignore[arg-type]
    withdraw(prefix, paths, [record(paths)])
    assert not (precious / "thesis.txt").exists()
