"""Printing: a table for a person, one JSON document for a script.

Owns:    column widths, what gives way on a narrow terminal, colour, and the `--json` option.
Holds:   a table is cut to the width of a terminal and never where it is piped; JSON is plain ASCII on one document.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from stepwell.escape import printable, shown, without_secrets

F = TypeVar("F", bound=Callable[..., Any])

_GAP = "  "
_LEAST = 4


@dataclass(frozen=True)
class Column:
    """One column. `gives_way`: left out first on a narrow terminal (higher first); 0 stays, shortened if it must be."""

    title: str
    right: bool = False
    gives_way: int = 0


def json_option(command: F) -> F:
    """The option every command has."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")(command)


def print_json(document: Any) -> None:
    """One document on stdout. Infinite and undefined numbers are texts, because JSON has none."""
    click.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def width() -> int | None:
    """Columns of the terminal; None where stdout is none, and nothing is to be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their titles."""
    for line in format_table(columns, rows, width()):
        click.echo(line)


def format_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int | None) -> list[str]:
    """Lines of a table no wider than `limit`: columns give way first, then the widest are shortened."""
    rows = [[printable(cell) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    widths = [max(len(column.title), *(len(row[i]) for row in rows), 0) for i, column in enumerate(columns)]

    def excess() -> int:
        return 0 if limit is None else sum(widths[i] for i in shown) + len(_GAP) * (len(shown) - 1) - limit

    for i in sorted(shown, key=lambda i: -columns[i].gives_way):
        if excess() <= 0 or not columns[i].gives_way:
            break
        shown.remove(i)
    while excess() > 0:
        widest = max(shown, key=lambda i: widths[i])
        if widths[widest] <= _LEAST:
            break
        widths[widest] = max(_LEAST, widths[widest] - excess())

    def line(cells: Sequence[str]) -> str:
        parts = [
            shorten(cells[i], widths[i]).rjust(widths[i])
            if columns[i].right
            else shorten(cells[i], widths[i]).ljust(widths[i])
            for i in shown
        ]
        return _GAP.join(parts).rstrip()

    titles = line([column.title for column in columns])
    return [click.style(titles, bold=True), *(line(row) for row in rows)]


def shorten(text: str, limit: int) -> str:
    """Cut from the middle: the end of a name tells as much as its start."""
    if len(text) <= limit:
        return text
    if limit <= 3:
        return text[:limit]
    head = (limit - 2) // 2
    return f"{text[:head]}..{text[len(text) - (limit - 2 - head) :]}"


def say(text: str = "", *, is_aside: bool = False) -> None:
    """A line, on stderr if it is only an aside. Commands print through this module alone."""
    click.echo(shown(text), err=is_aside)


def print_titled(title: str, text: str, colour: str) -> None:
    """A line that begins with a coloured word."""
    click.echo(f"{click.style(printable(title), fg=colour, bold=True)}: {shown(text)}")


def print_wrapped(text: str, *, indent: str = "") -> None:
    """A sentence, wrapped to the terminal, every line but the first indented."""
    text, limit = printable(without_secrets(text)), width()
    if limit is None:
        click.echo(text)
    else:
        click.echo(textwrap.fill(text, max(20, limit), subsequent_indent=indent, break_on_hyphens=False))
