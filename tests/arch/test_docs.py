"""What the pages claim is there: every promise names tests that exist, and the package says where it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))


def named_tests(text: str) -> list[str]:
    return sorted(set(re.findall(r"`(tests/[^`]+)`", text)))


def missing(name: str) -> str | None:
    path, _, function = name.partition("::")
    if not (ROOT / path).exists():
        return f"{path} does not exist"
    if function and f"def {function}(" not in (ROOT / path).read_text():
        return f"{path} has no {function}"
    return None


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
