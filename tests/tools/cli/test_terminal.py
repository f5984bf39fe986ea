"""At a real terminal (a pty): narrow ones, and the progress bar."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from stepwell.events.progress_bar import PATIENCE_SECONDS
from stepwell.tools.cli.output import Column, format_table, shorten
from tests.tools.cli.commands import good

SLOW = (
    "import sys, time\n"
    "from stepwell.restore import byte_sources as read\n"
    "true = read.FileSource.read\n"
    "def slow(self, *given):\n"
    "    time.sleep({pause})\n"  # the disk of this test: it makes reading take as long as the test says
    "    return true(self, *given)\n"
    "read.FileSource.read = slow\n"
    "from stepwell.tools.cli.main import main\n"
    "main(sys.argv[1:])\n"
)


def at_terminal(columns: int, *command: object) -> str:
    """Run a command whose stdout and stderr are a terminal of this width; what it showed."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [str(part) for part in command], stdin=follower, stdout=follower, stderr=follower, env={**env, "TERM": "xterm"}
    )
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 65536):
            shown += piece
    except OSError:  # EIO: the other end is closed
        pass
    finally:
        os.close(leader)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [32, 40, 60, 80])
@pytest.mark.parametrize("command", ["ls", "show", "why", "verify"])
def test_no_line_is_wider_than_the_terminal(command: str, columns: int, made_run: Path) -> None:
    shown = at_terminal(columns, sys.executable, "-m", "stepwell.tools.cli.main", command, made_run)
    lines = [line.replace("\033[1m", "").replace("\033[0m", "") for line in shown.splitlines()]
    assert max(map(len, lines)) <= columns, shown
    assert len(lines) > 6


def test_a_narrow_terminal_still_tells_what_matters(made_run: Path) -> None:
    shown = at_terminal(40, sys.executable, "-m", "stepwell.tools.cli.main", "ls", made_run)
    assert "suspect" in shown and "abandoned" in shown
    assert "step-00" not in shown  # the column that gives way first


def test_a_pipe_is_never_cut(made_run: Path) -> None:
    assert max(map(len, good("show", made_run).out.splitlines())) > 80


def test_a_long_reading_has_a_bar_at_a_terminal(made_run: Path) -> None:
    slow = SLOW.format(pause=PATIENCE_SECONDS / 8)
    shown = at_terminal(80, sys.executable, "-c", slow, "verify", made_run)
    assert "verifying" in shown
    assert "7 checkpoints intact" in shown


def test_a_short_one_has_none(made_run: Path) -> None:
    assert "verifying" not in at_terminal(80, sys.executable, "-c", SLOW.format(pause=0), "verify", made_run)


def test_a_long_one_without_a_terminal_is_silent(made_run: Path) -> None:
    slow = SLOW.format(pause=PATIENCE_SECONDS / 8)
    done = subprocess.run([sys.executable, "-c", slow, "verify", made_run], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\033" not in done.stdout


def test_columns_give_way_before_cells_are_cut() -> None:
    columns = (Column("name", gives_way=1), Column("size", right=True), Column("text"))
    rows = [["a" * 20, "1 kB", "one two three four"]]
    assert format_table(columns, rows, None)[1] == f"{'a' * 20}  1 kB  one two three four"
    assert format_table(columns, rows, 30)[1] == "1 kB  one two three four"
    assert format_table(columns, rows, 20)[1] == "1 kB  one tw..e four"


def test_an_empty_table_has_its_titles() -> None:
    assert len(format_table((Column("a"), Column("b")), [], 10)) == 1


def test_shortening_keeps_both_ends() -> None:
    assert shorten("model.layers.17.weight", 12) == "model..eight"
    assert shorten("short", 12) == "short"
    assert [len(shorten("abcdefgh", n)) for n in range(1, 9)] == list(range(1, 9))
