"""Where stepwell works below a run or a cache, nobody names a file past `below`: a link there would lead elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "stepwell"
ROOMS = ("store", "levels", "agent", "codecs", "restore", "adapters/scr")
MODULES = ("caches", "chains", "candidates", "search", "reopen", "behind", "alike", "pace", "journal", "eventfile")
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
OURS = frozenset({"files", "below", "objects", "os", "shutil", "commit", "self", "dataclasses"})
"""What has functions of these names, and is looked at itself or speaks of no path."""

ALLOWED: dict[str, str] = {
    "adapters/scr/files.py: os.utime": "an open file",
    "adapters/scr/files.py: os.lstat": "the program's file: what is there is compared, not opened",
    "adapters/scr/files.py: os.access": "the program's own file",
    "adapters/scr/files.py: shutil.copyfileobj": "open files",
    "adapters/scr/index.py: os.open": "its lock lies in the run's own directory, and is opened without links",
    "adapters/scr/index.py: os.stat": "the run's own directory",
    "adapters/scr/nodes.py: .mkdir": "the run's own directory",
    "adapters/scr/parameters.py: .is_file": "a conf file that the user named",
    "adapters/scr/salvage.py: .glob": "directories that the user named",
    "adapters/scr/sources.py: .is_file": "a conf file that the user named",
    "adapters/scr/sources.py: .read_text": "a conf file that the user named",
    "agent/process.py: os.utime": "progress lies in the run's own directory; links are not followed",
    "agent/start.py: .exists": "/proc",
    "agent/upload.py: .stat": "a file that the user attached",
    "codecs/segment.py: os.listdir": "a descriptor",
    "eventfile.py: os.open": "event files lie in the run's own directory, and are opened without links",
    "eventfile.py: os.rename": "the same",
    "eventfile.py: os.lstat": "the same",
    "eventfile.py: .unlink": "the same",
    "levels/request.py: os.open": "part by part, each below the one before",
    "levels/room.py: .exists": "/proc",
    "levels/serve.py: os.open": "the run's own directory in the cache",
    "store/desk.py: .read_bytes": "the desk is this user's alone",
    "store/desk.py: os.utime": "the same",
    "store/files.py: os.listdir": "a descriptor",
    "store/files.py: os.scandir": "a descriptor",
    "store/files.py: .stat": "an entry of a descriptor, without links",
    "store/history.py: os.open": "history.json lies in the run's own directory, and is opened without links",
    "store/lineage.py: .is_dir": "the run's own directory, which may be reached over links",
    "store/node.py: os.makedirs": "the node's cache",
    "store/paths.py: .is_dir": "the run's own directory",
    "store/paths.py: os.listdir": "the run's own directory",
    "store/paths.py: os.stat": "the run's own directory",
    "store/progress.py: os.open": "progress lies in the run's own directory, and is opened without links",
    "store/progress.py: os.stat": "/proc",
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
    return [path for room in ROOMS for path in sorted((SOURCE / room).glob("**/*.py"))] + [
        SOURCE / f"{name}.py" for name in MODULES
    ]


def test_nobody_names_a_file_below_a_run_past_below() -> None:
    found = {f"{path.relative_to(SOURCE).as_posix()}: {call}" for path in modules() for call in calls(path.read_text())}
    assert sorted(found - set(ALLOWED)) == [], "use stepwell.below or store.files, or say here why not"
    assert sorted(set(ALLOWED) - found) == [], "not there any more"


@pytest.mark.parametrize(
    "line", ["os.unlink(path)", "shutil.rmtree(path)", "path.unlink()", "(root / name).mkdir()", "os.open(path, 0)"]
)
def test_control_such_a_call_is_seen(line: str) -> None:
    assert calls(line)


def test_control_a_call_with_a_descriptor_is_none() -> None:
    assert not calls("os.unlink(name, dir_fd=fd)") and not calls("files.remove(path)")
