"""The picture is drawn from a run's event file, also of a short or odd run; without matplotlib the reason is told."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.tools.prove.proof import Kill
from stepwell.tools.report.timeline import why_no_picture, write_timeline
from tests.tools.report.test_story import LINES

KILLS = [
    Kill(1, 102.1, 3, "trainer", resumed=2, source="memory"),
    Kill(2, 110.15, 4, "trainer and agent", resumed=4, source="disk"),
]


def write_events(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(
    ("lines", "kills"),
    [
        (LINES, KILLS),
        (LINES, []),
        ([line for line in LINES if line["kind"] != "log"], KILLS),
        (LINES[:2], []),
        ([], []),
    ],
    ids=["whole", "no kills", "nothing logged", "only a start", "empty"],
)
def test_a_picture(lines: list[dict[str, Any]], kills: list[Kill], tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    write_timeline(write_events(tmp_path / "events.jsonl", lines), picture, kills=kills)
    width, height = size_of(picture)
    assert width > 1200 and height > 700


def test_kills_are_in_the_picture(tmp_path: Path) -> None:
    events = write_events(tmp_path / "events.jsonl", LINES)
    write_timeline(events, tmp_path / "with.png", kills=KILLS)
    write_timeline(events, tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_without_matplotlib_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_picture() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert why_no_picture() == "matplotlib is not installed; pip install 'stepwell[plot]'"


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = "import sys, stepwell.tools.cli.commands.prove_command; "
    code += "print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
