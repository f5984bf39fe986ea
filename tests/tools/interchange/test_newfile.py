"""A file that is there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.tools.interchange.new_file import new_file


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_file(out, force=False) as temporary:
        temporary.write_text("whole")
        assert not out.exists()
    assert out.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [out]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError), new_file(tmp_path / "out", force=False) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="was created meanwhile"), new_file(out, force=False) as temporary:
        temporary.write_text("ours")
        out.write_text("theirs")
    assert out.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [out]


def test_where_there_are_no_links_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with new_file(tmp_path / "out", force=False) as temporary:
        temporary.write_text("whole")
    assert (tmp_path / "out").read_text() == "whole"


def test_force_replaces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    with new_file(out, force=True) as temporary:
        temporary.write_text("new")
    assert out.read_text() == "new"
