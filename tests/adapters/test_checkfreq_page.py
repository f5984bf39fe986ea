"""docs/checkfreq.md says all of it: every argument, every defect, and tests that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from stepwell.adapters.checkfreq import CFIterator, CFManager
from tests.arch.test_docs import missing

PAGE = (Path(__file__).parents[2] / "docs" / "checkfreq.md").read_text()


def test_the_page_names_tests_that_exist_and_all_29_defects() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (`.*`) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 30))
    names = [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    names = [name.replace("D::", "tests/adapters/test_checkfreq_defects.py::") for name in names]
    assert [problem for name in names if (problem := missing(name))] == []


def test_the_page_has_every_argument() -> None:
    for call in (CFManager, CFIterator, CFManager.save, CFManager.save_cpu):
        for name in inspect.signature(call).parameters:
            assert name in ("self", "chk_dir", "chk", "mode", "dataloader", "cf_manager") or f"{name}=" in PAGE, name
