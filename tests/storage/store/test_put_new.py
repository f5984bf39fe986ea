"""Two writers of one name: the first one's bytes stay whole, whoever the second is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepwell.storage.store import files, no_follow


def test_a_writer_with_the_same_process_number_does_not_empty_what_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in containers of their own share a cache, and have the same process numbers."""
    path, link = tmp_path / "node.json", no_follow.link
    seen = []

    def link_and_wait(source: Path, target: Path) -> None:
        """Another process comes between the new name and the end of the old one."""
        monkeypatch.setattr(no_follow, "link", link)
        link(source, target)
        assert not files.put_new(path, b"another one's, which comes too late", point="node")
        seen.append(path.read_bytes())

    monkeypatch.setattr(no_follow, "link", link_and_wait)
    assert files.put_new(path, b"the first one's", point="node")
    assert seen == [b"the first one's"] == [path.read_bytes()]
    assert os.listdir(tmp_path) == ["node.json"]
