"""Nobody else gets between stepwell and its node's cache: not before it is made, and not after.

A second user of the machine tries. Each control turns the safety off (`STEPWELL_TRUST` takes a directory as it is), and
the attack gets through.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.adapters import scr
from stepwell.adapters.scr.prefix_index import LOCK, Prefix
from stepwell.errors import ConfigError
from stepwell.launch.conf import Conf
from stepwell.launch.health import why_refused
from stepwell.levels.assignments import open_cache, run_cache
from stepwell.storage.store import private_directory
from stepwell.storage.store.private_directory import TRUST, make_private
from tests.adapters.test_scr_states import end, no_waiting_for_the_disk, place
from tests.hostile.stranger import FRIENDS, STRANGER, VICTIM, as_user, machine, needs_root

__all__ = ["machine", "no_waiting_for_the_disk", "place"]
pytestmark = needs_root


def make(path: Path) -> str:
    """As the victim: what was said, or nothing."""
    found = as_user(VICTIM, lambda: make_private(path, advice="give another one"), groups=(FRIENDS,))
    return "" if found is None else str(found)


def replace(path: Path, *, groups: tuple[int, ...] = ()) -> Any:
    """As the stranger: another directory in the place of this one, with something in it."""

    def act() -> None:
        os.rename(path, path.with_name("was"))
        os.mkdir(path)
        (path / "model.pt").write_bytes(b"the stranger's")

    return as_user(STRANGER, act, groups=groups)


def planted(path: Path, mode: int = 0o777) -> Path:
    """A directory that the stranger made before."""
    assert as_user(STRANGER, lambda: (os.mkdir(path, mode), None)[1]) is None
    return path


# -- what the stranger made before ------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "stepwell-scr", "stepwell-scr/runs/1"])
def test_a_directory_that_a_stranger_made_is_refused_by_name(
    machine: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = planted(machine / "shm" / "alice")
    said = make(alice / below)
    assert said.startswith(f"ConfigError: {alice}") and f"belongs to user {STRANGER}" in said
    assert not below or not (alice / below).exists(), "nothing was made in it"
    monkeypatch.setenv(TRUST, str(alice))
    assert make(alice / below) == "", "control: taken as it is"
    if below:
        assert replace(alice / below.partition("/")[0]) is None, "control: and then swapped"


def test_a_link_of_a_stranger_is_refused(machine: Path) -> None:
    victims = machine / "victims"
    victims.mkdir(mode=0o700)
    os.chown(victims, VICTIM, VICTIM)
    as_user(STRANGER, lambda: os.symlink(victims, machine / "shm" / "alice"))
    said = make(machine / "shm" / "alice" / "cache")
    assert f"{machine}/shm/alice" in said and f"is a link that belongs to user {STRANGER}" in said
    assert list(victims.iterdir()) == []


def test_a_parent_that_others_may_write_to_without_the_sticky_bit_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shared project directory with the set-group-id bit: everybody in the group may rename what lies in it."""
    project = machine / "project"
    project.mkdir()
    os.chown(project, 0, FRIENDS)
    project.chmod(0o2775)
    said = make(project / "alice")
    assert said.startswith(f"ConfigError: {project}, on the way to {project}/alice,") and f"group {FRIENDS}" in said
    monkeypatch.setenv(TRUST, str(project))
    assert make(project / "alice") == ""
    assert replace(project / "alice", groups=(FRIENDS,)) is None, "control: one of the group swaps it"
    monkeypatch.delenv(TRUST)
    project.chmod(0o3775)
    assert make(project / "bob") == "", "with the sticky bit nobody else can"
    assert isinstance(replace(project / "bob", groups=(FRIENDS,)), PermissionError)


def test_a_directory_of_ours_that_others_may_write_to_is_refused(machine: Path) -> None:
    home = machine / "home"
    home.mkdir()
    os.chown(home, VICTIM, FRIENDS)
    for mode in (0o777, 0o1777, 0o775, 0o1775):
        home.chmod(mode)
        assert f"`chmod go-w {home}`" in make(home), oct(mode)
    home.chmod(0o755)
    assert make(home) == ""


def test_who_runs_as_root_uses_no_directory_of_another_user(machine: Path) -> None:
    alice = planted(machine / "shm" / "alice", 0o755)
    with pytest.raises(ConfigError, match=f"{alice}, on the way to .* belongs to user {STRANGER}"):
        make_private(alice / "cache", advice="give another one")


def test_what_is_made_is_for_its_owner_alone(machine: Path) -> None:
    cache = machine / "shm" / "alice" / "cache" / "runs" / "1"
    assert make(cache) == ""
    for path in (cache, *list(cache.parents)[:3]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700 and path.stat().st_uid == VICTIM, path
    assert isinstance(replace(machine / "shm" / "alice"), PermissionError)
    assert isinstance(as_user(STRANGER, lambda: os.listdir(cache)), PermissionError)


def test_trust_is_given_in_whole_paths(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST, "cache")
    with pytest.raises(ConfigError, match="STEPWELL_TRUST: 'cache' is not an absolute path"):
        make_private(machine / "shm" / "alice", advice="")


# -- what stays right -------------------------------------------------------------------------------------------------


def linked(machine: Path, owner: int) -> Path:
    (machine / "disk").mkdir()
    os.chown(machine / "disk", VICTIM, VICTIM)
    os.symlink(machine / "disk", machine / "shm" / "link")
    os.lchown(machine / "shm" / "link", owner, owner)
    return machine / "shm" / "link" / "cache"


def earlier(machine: Path) -> Path:
    """As the version before this one made them, with the usual umask."""
    path = machine / "shm" / "alice" / "runs" / "1"
    as_user(VICTIM, lambda: os.makedirs(path, 0o755))
    for made in (path, path.parent, path.parent.parent):
        made.chmod(0o755)
    return path


ACCEPTED: dict[str, Callable[[Path], Path]] = {
    "in a sticky directory": lambda machine: machine / "shm" / "alice",
    "over a link of root's": lambda machine: linked(machine, 0),
    "over a link of one's own": lambda machine: linked(machine, VICTIM),
    "made by an earlier version": earlier,
    "over .. in a link": lambda machine: (os.symlink("../shm", machine / "shm" / "up"), machine / "shm" / "up" / "a")[
        1
    ],
    "with a dot": lambda machine: machine / "shm" / "." / "alice",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_usual_set_ups_are_accepted(machine: Path, name: str) -> None:
    assert make(ACCEPTED[name](machine)) == ""


def test_a_group_of_ones_own_is_nobody_else(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group, and a umask that lets it write."""
    home = machine / "home"
    home.mkdir()
    os.chown(home, VICTIM, VICTIM)
    home.chmod(0o775)
    assert f"group {VICTIM}" in make(home), "a group without a name may have anybody in it"
    alice = type("User", (), {"pw_name": "alice", "pw_gid": VICTIM})
    for name, members, is_right in (("alice", [], True), ("alice", ["alice"], True), ("alice", ["eve"], False)):
        group = type("Group", (), {"gr_name": name, "gr_mem": members})
        monkeypatch.setattr(private_directory.pwd, "getpwuid", lambda uid: alice)
        monkeypatch.setattr(private_directory.grp, "getgrgid", lambda gid, group=group: group)
        assert (make(home) == "") is is_right, members


def test_what_is_no_directory_is_an_error_of_the_system(machine: Path) -> None:
    (machine / "shm" / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="shm/file"):
        make_private(machine / "shm" / "file" / "cache", advice="")
    os.symlink("circle", machine / "shm" / "circle")
    with pytest.raises(OSError, match="circle"):
        make_private(machine / "shm" / "circle", advice="")


# -- who asks for it --------------------------------------------------------------------------------------------------


def test_a_checkpointer_with_levels_refuses_a_strangers_cache(machine: Path, run_dir: Path) -> None:
    cache = planted(machine / "shm" / "cache")
    ckpt = stepwell.Checkpointer(run_dir, levels=[stepwell.Node(cache)], model=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=rf"{cache}, on the way to .* belongs to user {STRANGER}.*give Node\(\)"):
        ckpt.restore()
    ckpt.close()
    assert list(cache.iterdir()) == []


def test_a_cache_that_a_stranger_made_anew_takes_nothing(machine: Path) -> None:
    """Somebody cleaned up the disk in the middle of a run; each checkpoint looks again."""
    paths = run_cache(machine / "shm" / "cache", "0123456789abcdef")
    open_cache(paths)
    os.rename(machine / "shm" / "cache", machine / "gone")
    planted(machine / "shm" / "cache")
    with pytest.raises(ConfigError, match="belongs to user"):
        open_cache(paths)


def test_the_gate_of_a_hot_restart_refuses_a_strangers_cache(machine: Path) -> None:
    cache = planted(machine / "shm" / "cache")
    reason = why_refused(cache, Conf())
    assert reason is not None and f"{cache} belongs to user {STRANGER}" in reason and "STEPWELL_CACHE" in reason
    for fine in (machine / "shm" / "mine", machine / "shm"):
        assert why_refused(fine, Conf()) is None


# -- SCR: the file between route_file() and the program's own open ----------------------------------------------------


def base(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCR_CACHE_BASE", str(machine / "shm"))
    monkeypatch.setenv("SCR_USER_NAME", "alice")
    monkeypatch.setenv("SCR_FLUSH", "0")
    return machine / "shm" / "alice"


def route() -> Path:
    """An output, and the restart from it up to the name that the program opens."""
    scr.init()
    scr.start_output("c", scr.FLAG_CHECKPOINT)
    Path(scr.route_file("c/model.pt")).write_bytes(b"ours")
    assert scr.complete_output(True)
    assert scr.have_restart() == "c" and scr.start_restart() == "c"
    return Path(scr.route_file("c/model.pt"))


def test_scr_refuses_a_cache_that_a_stranger_made(machine: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = planted(base(machine, monkeypatch))
    with pytest.raises(RuntimeError, match=rf"{alice}, on the way to .* belongs to user {STRANGER}.*SCR_CACHE_BASE"):
        scr.init()
    assert list(alice.iterdir()) == []


def test_the_file_that_scr_names_cannot_be_swapped(machine: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = base(machine, monkeypatch)
    named = route()
    for path in (alice, alice / "stepwell-scr", named.parent, named):
        assert isinstance(replace(path), PermissionError), path
    assert named.read_bytes() == b"ours"
    end()


def test_control_in_a_strangers_directory_the_program_loads_what_the_stranger_put_there(
    machine: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = planted(base(machine, monkeypatch))
    monkeypatch.setenv(TRUST, str(alice))
    named = route()

    def act() -> None:
        os.rename(alice / "stepwell-scr", alice / "was")
        os.makedirs(named.parent)
        named.write_bytes(b"the stranger's")

    assert as_user(STRANGER, act) is None
    assert named.read_bytes() == b"the stranger's", "and torch.load would run what it says"
    end()


def test_a_reader_of_the_prefix_cannot_hold_its_lock(machine: Path) -> None:
    """A lock is had by whoever may open the file: that is only for those who may write to the index."""
    prefix = Prefix(machine / "prefix")
    prefix.folder.mkdir(parents=True)
    lock = prefix.folder / LOCK
    lock.touch(0o644)  # as an earlier version left it

    def hold() -> None:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    assert as_user(STRANGER, hold) is None, "control: as it was"
    prefix.change_index(lambda index: index)
    assert isinstance(as_user(STRANGER, hold), PermissionError)
    os.chown(prefix.folder, 0, FRIENDS)
    prefix.folder.chmod(0o2775)
    prefix.change_index(lambda index: index)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o660, "where a group works together, its members take it in turns"
