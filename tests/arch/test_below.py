"""Below a run or a cache, nobody names a file past `no_follow`: a link there would lead elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "stepwell"
ROOMS = ("storage", "levels", "handover", "agent", "restore", "adapters/scr")
MODULES = ("training/loop/schedule", "events/journal", "events/event_file")
BY_OS = frozenset(
    {
        "open",
        "unlink",
        "remove",
        "rename",
        "replace",
        "link",
        "symlink",
        "mkdir",
        "makedirs",
        "rmdir",
        "removedirs",
        "scandir",
        "listdir",
        "walk",
        "chmod",
        "chown",
        "truncate",
        "utime",
        "stat",
        "lstat",
        "access",
    }
)
BY_PATH = frozenset(
    {
        "unlink",
        "mkdir",
        "rmdir",
        "touch",
        "rename",
        "replace",
        "read_bytes",
        "write_bytes",
        "read_text",
        "write_text",
        "iterdir",
        "glob",
        "rglob",
        "symlink_to",
        "hardlink_to",
        "chmod",
        "exists",
        "is_file",
        "is_dir",
        "is_symlink",
        "stat",
        "lstat",
    }
)
OURS = frozenset({"files", "no_follow", "objects", "os", "shutil", "commit", "self", "dataclasses"})
"""What has functions of these names, and is looked at itself or speaks of no path."""

ALLOWED: dict[str, str] = {
    "handover/agent_address.py: os.stat": "/proc",
    "handover/memory.py: .read_text": "/proc and /sys",
    "adapters/scr/application_files.py: os.utime": "an open file",
    "adapters/scr/application_files.py: os.lstat": "the program's file: what is there is compared, not opened",
    "adapters/scr/application_files.py: os.access": "the program's own file",
    "adapters/scr/application_files.py: shutil.copyfileobj": "open files",
    "adapters/scr/prefix_index.py: os.open": "its lock lies in the run's own directory, and is opened without links",
    "adapters/scr/prefix_index.py: os.stat": "the run's own directory",
    "adapters/scr/all_caches.py: .mkdir": "the run's own directory",
    "adapters/scr/parameters.py: .is_file": "a conf file that the user named",
    "adapters/scr/salvage.py: .glob": "directories that the user named",
    "adapters/scr/parameter_sources.py: .is_file": "a conf file that the user named",
    "adapters/scr/parameter_sources.py: .read_text": "a conf file that the user named",
    "agent/process.py: os.utime": "progress lies in the run's own directory; links are not followed",
    "handover/spawn.py: .exists": "/proc",
    "agent/files/upload.py: .stat": "a file that the user attached",
    "storage/chain/segment.py: os.listdir": "a descriptor",
    "events/event_file.py: os.open": "event files lie in the run's own directory, and are opened without links",
    "events/event_file.py: os.rename": "the same",
    "events/event_file.py: os.lstat": "the same",
    "events/event_file.py: .unlink": "the same",
    "levels/peers/request.py: os.open": "part by part, each below the one before",
    "levels/cache_retention.py: .exists": "/proc",
    "levels/peers/server.py: os.open": "the run's own directory in the cache",
    "storage/store/mirror.py: .read_bytes": "the desk is this user's alone",
    "storage/store/mirror.py: os.utime": "the same",
    "storage/store/files.py: os.listdir": "a descriptor",
    "storage/store/files.py: os.scandir": "a descriptor",
    "storage/store/files.py: .stat": "an entry of a descriptor, without links",
    "storage/store/learned.py: os.open": "history.json lies in the run's own directory, and is opened without links",
    "storage/store/lineage.py: .is_dir": "the run's own directory, which may be reached over links",
    "storage/store/node_id.py: os.makedirs": "the node's cache",
    "storage/store/paths.py: .is_dir": "the run's own directory",
    "storage/store/paths.py: os.listdir": "the run's own directory",
    "storage/store/paths.py: os.stat": "the run's own directory",
    "storage/store/progress.py: os.open": "progress lies in the run's own directory, and is opened without links",
    "storage/store/progress.py: os.stat": "/proc",
}
"""File and call -> why it needs no descriptor. One that is not there any more has to go."""


def calls(source: str) -> set[str]:
    """Calls of the kernel by a path, but for those that give a descriptor of a directory."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if any(word.arg in ("dir_fd", "src_dir_fd") for word in node.keywords):
            continue
        if owner == "shutil" or (owner == "os" and node.func.attr in BY_OS):
            found.add(f"{owner}.{node.func.attr}")
        elif node.func.attr in BY_PATH and owner not in OURS and not _is_of_text(node):
            found.add(f".{node.func.attr}")
    return found


def _is_of_text(node: ast.Call) -> bool:
    """`text.replace(a, b)` is no call of the kernel, nor is `dataclasses.replace(item, field=...)`."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "replace" and len(node.args) > 1


def modules() -> list[Path]:
    """But for the two that are the way to give no path."""
    found = [path for room in ROOMS for path in sorted((SOURCE / room).glob("**/*.py"))]
    found += [SOURCE / f"{name}.py" for name in MODULES]
    return [path for path in found if path.stem not in ("no_follow", "private_directory")]


def test_nobody_names_a_file_below_a_run_past_below() -> None:
    found = {f"{path.relative_to(SOURCE).as_posix()}: {call}" for path in modules() for call in calls(path.read_text())}
    assert sorted(found - set(ALLOWED)) == [], "use storage/store/no_follow or files, or say here why not"
    assert sorted(set(ALLOWED) - found) == [], "not there any more"


@pytest.mark.parametrize(
    "line", ["os.unlink(path)", "shutil.rmtree(path)", "path.unlink()", "(root / name).mkdir()", "os.open(path, 0)"]
)
def test_control_such_a_call_is_seen(line: str) -> None:
    assert calls(line)


def test_control_a_call_with_a_descriptor_is_none() -> None:
    assert not calls("os.unlink(name, dir_fd=fd)") and not calls("files.remove(path)")
