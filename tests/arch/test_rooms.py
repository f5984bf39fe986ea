"""Every package names its modules, and one name means one thing. The allow-lists may only shrink."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from stepwell.handover.protocol import KINDS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "stepwell"
MOST_LOOSE, MOST_ROOMS = 6, 11
MOST_LINES, MOST_PARAMETERS = 300, 8

LONG: dict[str, int] = {
    "adapters/checkfreq/iterator.py": 397,
    "adapters/checkfreq/manager.py": 359,
    "adapters/dcp.py": 356,
    "adapters/scr/all_caches.py": 393,
    "adapters/scr/application_files.py": 314,
    "adapters/scr/job.py": 331,
    "adapters/scr/parameters.py": 334,
    "agent/process.py": 370,
    "agent/target/node_target.py": 398,
    "agent/target/shared_target.py": 333,
    "agent/worker.py": 372,
    "checkpointer.py": 368,
    "events/run_events.py": 400,
    "handover/client.py": 398,
    "launch/rendezvous.py": 314,
    "levels/peers/server.py": 361,
    "ranks/line/line_hub.py": 321,
    "restore/from_nodes.py": 351,
    "restore/load.py": 326,
    "storage/chain/replay.py": 314,
    "storage/codecs/device/kernels.py": 346,
    "storage/codecs/parts.py": 317,
    "storage/format/record.py": 310,
    "storage/store/files.py": 396,
    "storage/store/objects.py": 331,
    "training/data/batches.py": 311,
    "training/loop/iteration.py": 395,
    "training/loop/save.py": 315,
    "training/loop/schedule.py": 335,
    "training/snapshot/coded.py": 378,
    "training/snapshot/device_copy.py": 352,
    "training/snapshot/slots.py": 333,
    "training/snapshot/snapshotter.py": 347,
    "training/state/flatten.py": 350,
}
"""Files with more lines than `MOST_LINES`, and how many they may have."""

CLASSES: dict[str, str] = {
    "Arena": "the memory, and the event that it is ready: an event's class is its kind in the file",
}
"""Names of classes that mean more than one thing, and why."""

PARAMETERS: dict[str, str] = {
    "adapters/checkfreq/iterator::__init__": "public: CheckFreq's own signature",
    "adapters/checkfreq/manager::__init__": "public: CheckFreq's own signature, and our options",
    "adapters/dali::__init__": "public: the options of a reader",
    "checkpointer::__init__": "public: the options",
    "storage/codecs/device/kernels::compare": "a kernel takes pointers and sizes",
    "storage/codecs/device/kernels::count": "a kernel takes pointers and sizes",
    "storage/codecs/device/kernels::encode": "a kernel takes pointers and sizes",
    "storage/codecs/device/kernels::settle": "a kernel takes pointers and sizes",
    "tools/cli/scr/dataset_index::index": "click passes each option",
    "tools/cli/scr/halt::halt": "click passes each option",
}
"""Functions with more parameters than `MOST_PARAMETERS`, and why."""


def packages() -> list[Path]:
    return sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)


def modules() -> dict[str, ast.Module]:
    """By path below the source, without `.py`."""
    return {
        path.relative_to(SOURCE).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }


def doors(package: Path) -> set[str]:
    """Modules and packages in it."""
    files = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    return files | {path.parent.name for path in package.glob("*/__init__.py")}


def unnamed(package: Path) -> set[str]:
    """Modules that the docstring of the package does not name at the beginning of a line."""
    tree = ast.parse((package / "__init__.py").read_text())
    docstring = ast.get_docstring(tree, clean=False) or ""
    rows = re.findall(r"^ *((?:\w+, )*\w+)  ", docstring, re.MULTILINE)
    return doors(package) - {name for row in rows for name in row.split(", ")}


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_package_names_each_of_its_modules(package: Path) -> None:
    assert unnamed(package) == set()


def test_few_files_lie_in_the_root() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_LOOSE
    assert len(list(SOURCE.glob("*/__init__.py"))) <= MOST_ROOMS


def test_a_module_name_means_one_module() -> None:
    found = defaultdict(list)
    for path in modules():
        if not path.endswith(("__init__", "__main__")) and not path.startswith("adapters/names/"):
            found[path.rpartition("/")[2]].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_a_class_name_means_one_class() -> None:
    found = defaultdict(list)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in CLASSES} == {}
    assert sorted(CLASSES.keys() - twice.keys()) == [], "means one thing now"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = function.args
    return len([one for one in [*names.posonlyargs, *names.args, *names.kwonlyargs] if one.arg not in ("self", "cls")])


def test_a_function_has_few_parameters() -> None:
    found = {
        f"{path}::{node.name}"
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and parameters(node) > MOST_PARAMETERS
    }
    assert sorted(found - PARAMETERS.keys()) == []
    assert sorted(PARAMETERS.keys() - found) == [], "has few now"


def late_bindings(tree: ast.Module) -> list[str]:
    """Attributes of other objects that a constructor assigns."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "__post_init__"):
            for node in ast.walk(function):
                is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_set and ast.unparse(node.value) != "self":
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_constructor_assigns_another_objects_attribute() -> None:
    found = {path: found for path, tree in modules().items() if (found := late_bindings(tree))}
    assert found == {}


def test_control_a_late_binding_is_seen() -> None:
    source = "class A:\n    def __init__(self, other):\n        self.other = other\n        other.on_end = self.end\n"
    assert late_bindings(ast.parse(source)) == ["4: other.on_end"]


def test_a_file_is_short() -> None:
    lines = {path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    long = {path: count for path, count in lines.items() if count > MOST_LINES}
    assert {path: count for path, count in long.items() if count > LONG.get(path, 0)} == {}
    assert sorted(LONG.keys() - long.keys()) == [], "is short now"


def messages_by_hand(tree: ast.Module) -> list[int]:
    """Lines with a dictionary that looks like a message of trainer or agent: these are made in handover/protocol."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "type"
        if isinstance(value, ast.Constant) and value.value in KINDS
    ]


def test_messages_are_only_in_the_protocol() -> None:
    """The ranks have one of their own, over the line between them."""
    found = {path: messages_by_hand(tree) for path, tree in modules().items() if not path.startswith("ranks/")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_control_a_message_made_by_hand_is_seen() -> None:
    assert messages_by_hand(ast.parse('x = {"type": "x"}\nsend({"type": "make_room", "n": 1})')) == [2]


def test_control_a_module_that_is_not_named_is_seen(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""A room.\n\n    one, two   first and second\n    three      third\n"""\n')
    for name in ("one", "two", "three", "four"):
        (tmp_path / f"{name}.py").write_text("")
    assert unnamed(tmp_path) == {"four"}
