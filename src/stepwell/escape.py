"""What a person is shown: nothing in it steers the terminal, forges a line of a log, or tells a secret.

Owns:    the one rule for text that comes from files, other processes or addresses. Errors pass through it when they are
         made, log lines when they are logged (`events`), output of commands when it is printed (`tools/cli/output`).
"""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"
_INDENT: Final = "  "
_USER: Final = re.compile(r"(?<=://)(?:[^\s/@]*|[^\s/@:]+:[^\s@]*)@")
"""A name and password in front of the host. A password may hold a slash, as keys of S3 do."""
_QUERY: Final = re.compile(r"(://[^\s?#\"'<>]*)[?#][^\s\"'<>)\]]+")
"""What follows the path of an address: signatures and tokens travel there."""


def printable(text: str) -> str:
    """One line, in which everything that is not a visible character is written as an escape, line ends too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """One or more lines, each printable, without secrets. Those after the first begin with blanks, so that none of them
    can pass for a line of its own.
    """
    text = without_secrets(text)
    if text.isprintable():
        return text
    first, *others = (printable(line) for line in text.replace("\t", " ").split("\n"))
    lines = (line if not line or line.startswith(_INDENT) else f"{_INDENT}{line}" for line in others)
    return "\n".join((first, *lines))


def without_secrets(text: str) -> str:
    """Addresses in it lose user names, passwords and queries."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))
