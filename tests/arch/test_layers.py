"""The tree keeps the rules of docs/architecture.md; and each rule, broken on purpose, is seen to be broken."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.layers import FOR_TYPES, Table, TableError, check, children, read_table

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "stepwell"

PAGE = """
# A page
| package | may import from stepwell | third party |
|---|---|---|
| `__init__` | `errors`, `checkpointer` | none |
| `errors`, `events` | `errors` | none |
| `store` (put, get) | `errors`, `events` | `xxhash`, `boto?` |
| `agent` | `errors`, `store?` | none |
| `restore` | `errors`, `store@restore/load` | `torch@restore/load`, `numpy?@restore/load` |
| `checkpointer` | `restore`, `store` | `torch` |
| `tools/interchange` | `errors` | `torch?` |

- **Threads and processes:** `agent/spawn.py`, and
  `stepwell.store.copier`, nowhere else.

The end, with `errors` in backticks.
"""

GOOD = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .checkpointer import Checkpointer\n",
    "errors.py": "import os\n",
    "events.py": "from .errors import Broken\nfrom stepwell import errors\n",
    "store/__init__.py": "from .posix import put\nfrom stepwell.store.copier import copy\n",
    "store/posix.py": "import xxhash\nfrom ..errors import Broken\nfrom . import copier\n",
    "store/copier.py": "import threading\ndef copy():\n    import boto.s3\n",
    "agent/__init__.py": "",
    "agent/spawn.py": "import subprocess\ndef go():\n    from stepwell.store.posix import put\n",
    "restore/__init__.py": "",
    "restore/load.py": "import torch\nfrom stepwell.store import put\ndef read():\n    import numpy\n",
    "checkpointer.py": "import torch as t\nfrom stepwell.restore import load\nimport stepwell.store.posix\n",
    "tools/interchange/__init__.py": "",
    "tools/interchange/files.py": "def write(x):\n    import torch\n    torch.save(x, 'f')\n",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, body in {**GOOD, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # A body that brings its own first line keeps it; all others get a docstring.
        file.write_text(body.removeprefix("BARE:") if body.startswith("BARE:") else f'"""About it."""\n{body}')
    return root


@pytest.fixture(scope="module")
def table() -> Table:
    return read_table(PAGE)


@pytest.fixture(scope="module")
def real_table() -> Table:
    return read_table((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


# Controls: what each rule must see


def test_a_good_tree_has_no_violation(tmp_path: Path, table: Table) -> None:
    assert check(plant(tmp_path, {}), table) == []


BROKEN = {
    "no row": ({"stray.py": ""}, "stray.py:1: belongs to no row"),
    "layer": ({"store/up.py": "import stepwell.restore.load\n"}, "store/up.py:2: imports stepwell.restore.load"),
    "layer, from": ({"errors.py": "from stepwell.events import E\n"}, "errors.py:2: imports stepwell.events"),
    "layer, from the root": ({"errors.py": "from stepwell import events\n"}, "errors.py:2: imports stepwell.events"),
    "layer, relative": ({"store/up.py": "from ..restore import load\n"}, "imports stepwell.restore.load"),
    "layer, relative to a package": ({"store/__init__.py": "from ..agent import x\n"}, "imports stepwell.agent"),
    "layer, in a function": ({"errors.py": "def f():\n    from .store import put\n"}, "imports stepwell.store"),
    "layer, by name": (
        {"errors.py": "import importlib\ndef f():\n    importlib.import_module('stepwell.store')\n"},
        "errors.py:4: imports stepwell.store",
    ),
    "layer, for types": (
        {"errors.py": "import typing\nif typing.TYPE_CHECKING:\n    from .store import put\n"},
        "imports stepwell.store (under TYPE_CHECKING)",
    ),
    "layer, not lazily": ({"agent/spawn.py": "import subprocess\nfrom stepwell.store import put\n"}, "(at import)"),
    "layer, in another module": ({"restore/plan.py": "from stepwell.store import put\n"}, "restore/plan.py:2"),
    "public names": ({"store/up.py": "from stepwell import Checkpointer\n"}, "store/up.py:2: imports stepwell ("),
    "no such module": ({"events.py": "import stepwell.ghost\n"}, "stepwell.ghost, which is not in the tree"),
    "third party": ({"errors.py": "import numpy.linalg\n"}, "errors.py:2: imports third-party numpy"),
    "third party, in a function": ({"errors.py": "def f():\n    import numpy\n"}, "imports third-party numpy"),
    "third party, by name": ({"errors.py": "x = __import__('numpy')\n"}, "errors.py:2: imports third-party numpy"),
    "third party, not lazily": ({"store/s3.py": "import boto\n"}, "imports third-party boto (at import)"),
    "third party, in a class body": ({"store/s3.py": "class A:\n    import boto\n"}, "boto (at import)"),
    "third party, in another module": ({"restore/plan.py": "import torch\n"}, "restore/plan.py:2"),
    "third party, module but not lazily": (
        {"restore/load.py": "import numpy\nfrom stepwell.store import put\n"},
        "imports third-party numpy (at import)",
    ),
    "cycle": ({"store/a.py": "from . import b\n", "store/b.py": "from .a import x\n"}, "import cycle: "),
    "cycle through a package": ({"store/posix.py": "from stepwell.store import put\n"}, "import cycle: "),
    "cycle through a package's __init__": (
        {"restore/__init__.py": "import stepwell.checkpointer\n", "checkpointer.py": "import stepwell.restore.load\n"},
        "import cycle: ",
    ),
    "docstring": ({"errors.py": "BARE:import os\n"}, "errors.py:1: no module docstring"),
    "length": ({"errors.py": "x = 1\n" * 400}, "errors.py: 401 lines, at most 400"),
    "ASCII": ({"errors.py": "# caf\u00e9\n"}, "errors.py:2: not ASCII"),
    "threads": ({"store/posix.py": "from concurrent.futures import Future\n"}, "store/posix.py:2: uses concurrent"),
    "threads, in a function": ({"errors.py": "def f():\n    import threading\n"}, "errors.py:3: uses threading"),
    "processes": ({"errors.py": "import os\nos.fork()\n"}, "errors.py:3: uses os.fork"),
    "processes, from": ({"errors.py": "from os import posix_spawn\n"}, "errors.py:2: uses os.posix_spawn"),
    "threads, stale": ({"agent/spawn.py": ""}, "lists agent/spawn, which starts none"),
    "pickle": ({"errors.py": "def f():\n    import pickle\n"}, "errors.py:3: imports pickle"),
    "pickle, from": ({"errors.py": "from marshal import loads\n"}, "errors.py:2: imports marshal"),
    "pickle, by numpy": ({"errors.py": "def f(np):\n    np.load('f', allow_pickle=True)\n"}, "allow_pickle"),
    "torch.load": ({"restore/load.py": "import torch\ntorch.load('f')\n"}, "restore/load.py:3: torch.load"),
    "torch.load, in interchange": (
        {"tools/interchange/files.py": "def f():\n    import torch\n    torch.load('f')\n"},
        "tools/interchange/files.py:4: torch.load",
    ),
    "torch.load, renamed": ({"checkpointer.py": "import torch as t\nread = t.load\n"}, "checkpointer.py:3: torch.load"),
    "torch.load, from": ({"checkpointer.py": "from torch import load as r\n"}, "checkpointer.py:2: torch.load"),
    "torch.save": ({"checkpointer.py": "import torch\ntorch.save(1, 'f')\n"}, "checkpointer.py:3: torch.save"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_reported(case: str, tmp_path: Path, table: Table) -> None:
    files, expected = BROKEN[case]
    found = check(plant(tmp_path, files), table)
    assert any(expected in line for line in found), found


def test_an_empty_tree_is_reported(tmp_path: Path, table: Table) -> None:
    assert check(tmp_path / "nowhere", table) != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("may import from stepwell", "imports"),
        ("| `xxhash`, `boto?` |", "| xxhash, lazily boto |"),
        ("| `xxhash`, `boto?` |", "| `boto!` |"),
        ("| `xxhash`, `boto?` |", "|"),
        ("`errors`, `store?`", "`errors`, `stor?`"),
        ("| `agent` |", "| `store` |"),
        ("Threads and processes:", "Threads:"),
    ],
)
def test_a_page_that_cannot_be_checked_is_refused(old: str, new: str) -> None:
    assert old in PAGE
    with pytest.raises(TableError):
        read_table(PAGE.replace(old, new))


# The real tree


def test_the_tree_keeps_the_rules(real_table: Table) -> None:
    assert check(PACKAGE, real_table) == []


def run_fresh(code: str) -> str:
    """Run `code` in an interpreter of its own, as the agent does (-I), and return what it printed."""
    return subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def heavy_after(statement: str) -> str:
    return run_fresh(f"import sys\n{statement}\nprint(sorted({{'torch', 'numpy'}} & sys.modules.keys()))")


@pytest.mark.parametrize("name", ["stepwell", "stepwell.tools.cli.main", "stepwell.agent.process"])
def test_import_loads_neither_torch_nor_numpy(name: str) -> None:
    assert heavy_after(f"import {name}") == "[]"


def test_control_a_loaded_numpy_is_seen() -> None:
    assert heavy_after("import numpy") == "['numpy']"


def names_for_types() -> set[str]:
    """What `stepwell/__init__` imports under TYPE_CHECKING: the names a type checker sees."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [
        node for top in tree.body for node, when in children(top, "") if when == FOR_TYPES and isinstance(top, ast.If)
    ]
    return {alias.asname or alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_all_is_sorted_and_is_what_there_is() -> None:
    import stepwell

    exported = list(stepwell.__all__)
    assert exported == sorted(set(exported))
    assert [name for name in exported if not hasattr(stepwell, name)] == []
    # In a fresh interpreter, because other tests import submodules, which then are attributes of the package.
    # What typing or another library lends to the module is not ours and does not count.
    bound = run_fresh(
        "import stepwell, types\n"
        "print(*(name for name, value in vars(stepwell).items() if not name.startswith('_')\n"
        "    and name != 'TYPE_CHECKING' and not isinstance(value, types.ModuleType)\n"
        "    and (getattr(value, '__module__', None) or 'stepwell').split('.')[0] == 'stepwell'\n"
        "    and type(value).__module__ != '__future__'))"
    ).split()
    assert {name for name in exported if not name.startswith("_")} == set(bound) | names_for_types()
