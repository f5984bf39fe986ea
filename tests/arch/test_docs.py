"""What the pages claim is there: every promise names tests that exist, and the package says where it runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
SOURCE = ROOT / "src" / "stepwell"
PACKAGES = {path.parent.name for path in SOURCE.rglob("__init__.py")}
ABOUT_MODULES = [
    *PAGES,
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]


def named_tests(text: str) -> list[str]:
    return sorted(set(re.findall(r"`(tests/[^`]+)`", text)))


def missing(name: str) -> str | None:
    path, _, function = name.partition("::")
    if not (ROOT / path).exists():
        return f"{path} does not exist"
    if function and f"def {function}(" not in (ROOT / path).read_text():
        return f"{path} has no {function}"
    return None


def named_modules(text: str) -> list[str]:
    """Backticked paths whose first part is a package of ours: `agent/worker`, `ranks/line/`, `restore/from_*`.

    Entries of the layer table, as `torch?@restore/load`, name their parts.
    """
    found: set[str] = set()
    for entry in re.findall(r"`([^`\s]+)`", text):
        for name in entry.replace("?", "").split("@"):
            form = re.fullmatch(r"(?:src/stepwell/)?([a-z_0-9]+)/[a-z_0-9/*]*(?:\.py)?", name)
            if form and form[1] in PACKAGES:
                found.add(name.removeprefix("src/stepwell/").removesuffix(".py").rstrip("/"))
    return sorted(found)


def unknown_module(name: str) -> str | None:
    is_there = any(SOURCE.glob(f"{name}.py")) or any(path.is_dir() for path in SOURCE.glob(name))
    return None if is_there else f"src/stepwell/{name} does not exist"


@pytest.mark.parametrize("page", ABOUT_MODULES, ids=lambda page: page.stem)
def test_every_named_module_exists(page: Path) -> None:
    assert [problem for name in named_modules(page.read_text()) if (problem := unknown_module(name))] == []


def test_control_a_module_that_is_gone_is_seen() -> None:
    page = "`agent/worker`, `restore/from_*`, `ranks/line/`, `torch?@restore/load.py`, `store/files`, `agent/keeper.py`"
    named = named_modules(page)
    assert named == ["agent/keeper", "agent/worker", "ranks/line", "restore/from_*", "restore/load", "store/files"]
    assert [name for name in named if unknown_module(name)] == ["agent/keeper", "store/files"]
    assert named_modules("`tests/agent/test_x.py`, `step-1/manifest.json`, `benchmarks/many`") == []


FOREIGN = {"floods", "get_batch", "set_requires_gradient_sync"}
"""Names on the pages that are not ours: a test's word, nanoGPT's function, FSDP2's method."""


@cache
def words_of_the_code() -> frozenset[str]:
    files = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    here = Path(__file__)
    return frozenset(word for path in files if path != here for word in re.findall(r"\w+", path.read_text()))


@cache
def members() -> dict[str, set[str] | None]:
    """By class: its own and inherited names; None where a base is not ours."""
    classes = {node.name: node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.ClassDef)}  # fmt: skip

    def of(name: str) -> set[str] | None:
        node, found = classes[name], set[str]()
        for base in node.bases:
            inherited = of(base.id) if isinstance(base, ast.Name) and base.id in classes else None
            if inherited is None:
                return None
            found |= inherited
        for inner in ast.walk(node):
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(inner.name)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found.add(inner.target.id)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                found.add(inner.attr)
        return found

    return {name: of(name) for name in classes}


def unknown_names(text: str) -> list[str]:
    """Backticked names that stand nowhere in the code, and attributes that a class of ours does not have."""
    found = []
    for entry in re.findall(r"`([^`]+)`", text):
        form = re.fullmatch(r"(?:\w+\.)*?(?:(\w+)\.)?([A-Za-z_]\w+)(?:\(.*\))?", entry)
        if form is None or re.search(r"\.(toml|json|txt|md|bin)$", entry) or form[2] in FOREIGN:
            continue
        known = members().get(form[1] or "")
        if form[2] not in words_of_the_code() or (known is not None and form[2] not in known):
            found.append(entry)
    return sorted(set(found))


@pytest.mark.parametrize("page", [*ABOUT_MODULES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_every_named_class_and_method_exists(page: Path) -> None:
    assert unknown_names(page.read_text()) == []


def test_control_a_name_that_is_gone_is_seen() -> None:
    page = "`NoSuchThing`, `SaveHandle.wait()`, `SaveHandle.close()`, `pyproject.toml`, `get_batch`"
    assert unknown_names(page) == ["NoSuchThing", "SaveHandle.close()"]


def test_every_decision_is_listed_once_and_has_its_three_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- \[\d{3}\]\(([^)]+)\)", (folder / "README.md").read_text(), re.MULTILINE)
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert sorted(listed) == pages and len(pages) >= 68
    parts = ["## Context", "## Decision", "## Consequence"]
    assert [name for name in pages if not all(part in (folder / name).read_text() for part in parts)] == []


def test_the_map_lists_every_variable_of_the_environment() -> None:
    from stepwell.training.loop.options import VARIABLES

    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Environment")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(STEPWELL_\w+)`", "".join(rows))) == VARIABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_named_test_exists(page: Path) -> None:
    assert [problem for name in named_tests(page.read_text()) if (problem := missing(name))] == []


def test_every_framework_names_a_test_or_is_untested() -> None:
    text = (ROOT / "docs" / "ranks.md").read_text().partition("## What works under which framework")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 11
    assert [row for row in rows if "tests/" not in row and "untested" not in row] == []


def test_every_promise_names_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \| .*$", GUARANTEES, re.MULTILINE)
    promises = [line for line in GUARANTEES.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == len(promises) >= 13
    assert [line for line in promises if "tests/" not in line] == []


def test_control_a_wrong_name_is_seen() -> None:
    assert missing("tests/no_such_file.py") is not None
    assert missing("tests/arch/test_docs.py::test_no_such_test") is not None
    assert missing("tests/arch/test_docs.py::test_every_named_test_exists") is None


def test_readme_has_both_commands_and_leads_with_the_proof() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    assert readme.index("prove") < readme.index("Checkpointer(")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_are_told_at_import(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import stepwell"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"Linux only (memfd, pidfd, SCM_RIGHTS); this is {platform}" in result.stderr
