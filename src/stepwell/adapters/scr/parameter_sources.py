"""Where SCR's parameters stand, and in which words: SCR's own rules, of which scripts and files rely on every one.

    environment  >  user file (SCR_CONF_FILE, or .scrconf in the prefix)  >  config()  >  /etc/scr.conf

Owns:    the syntax of `config()` and of files, the order of precedence, and the expansion of $VARIABLES.
Not:     what a parameter means (parameters).
Holds:   reading is local and has no effect. A parameter that is set nowhere has no value here: its default is not told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError, StepwellError
from stepwell.events.run_events import logger

SYSTEM_FILE: Final = Path("/etc/scr.conf")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w*)\}|(\w+))", re.ASCII)


class ScrError(StepwellError, RuntimeError):
    """A call of the SCR interface was refused or failed. SCR's own binding raises RuntimeError too."""


def expand(text: str) -> str:
    """As SCR does it: $NAME and ${NAME} by the environment, nothing for a name that is not there."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1] or found[2] or "", ""), text)


def expand_surely(name: str, text: str) -> str:
    """The same, for a value that is used. Raises ConfigError for a name that is not there, where SCR would go on."""
    for found in _VARIABLE.finditer(text):
        if not os.environ.get(found[1] or found[2] or ""):
            raise ConfigError(f"{name}={text}: {found[0]} is not set in the environment", found=text)
    expanded = expand(text)
    if "${" in expanded:
        raise ConfigError(f"{name}={text}: not a variable after `$`; give ${{NAME}}", found=text)
    return expanded


@dataclass(frozen=True)
class Sentence:
    """What a text says: pairs of a key and its value, and last a key without one, if something is asked for."""

    pairs: tuple[tuple[str, str | None], ...]
    asked: str | None

    @classmethod
    def parse(cls, text: str) -> Sentence:
        """`KEY`, `KEY = VALUE`, `KEY=`, `CKPT=0 TYPE=XOR`, `CKPT=0 TYPE`; a value ends at a space. ConfigError."""
        pairs: list[tuple[str, str | None]] = []
        rest = text.strip(" \t")
        while rest:
            key, rest = _split(rest, " \t=")
            rest = rest.lstrip(" \t")
            if not rest and key:
                return cls(tuple(pairs), key)
            if not key or not rest.startswith("="):
                raise ConfigError(f"{text.strip()!r}: give KEY=VALUE, or several that start with one such as CKPT=0")
            value, rest = _split(rest[1:].lstrip(" \t"), " \t")
            rest = rest.lstrip(" \t")
            pairs.append((key, value or None))
        return cls(tuple(pairs), None)


def _split(text: str, ends: str) -> tuple[str, str]:
    at = next((place for place, letter in enumerate(text) if letter in ends), len(text))
    return text[:at], text[at:]


@dataclass
class ParameterSource:
    """One place where parameters stand: the values of each key, and with each what its line says beside it."""

    tree: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    def first(self, key: str) -> str | None:
        """The value that counts: of several lines of a file the first, as in SCR."""
        return next(iter(self.tree.get(key, {})), None)

    def say(self, pairs: tuple[tuple[str, str | None], ...]) -> None:
        """Set, unset (no value), or add a line of several items. Raises ConfigError."""
        (key, value), items = pairs[0], pairs[1:]
        if value is None:
            self.tree.pop(key, None)
        elif not items:
            self.tree[key] = {value: {}}
        else:
            empty = [name for name, item in items if item is None]
            if empty:
                raise ConfigError(f"{key}={value} {empty[0]}=: give it a value", found=empty[0])
            here = self.tree.setdefault(key, {}).setdefault(value, {})
            here.update({name: item for name, item in items if item is not None})

    @classmethod
    def of_file(cls, path: Path) -> ParameterSource:
        """A file of such lines; nothing if it is not there. Raises ConfigError."""
        found = cls()
        if path.is_file():
            try:
                text = path.read_text()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}: not a text file: {error}", path=str(path)) from None
            for number, line in enumerate(text.splitlines(), 1):
                try:
                    found._read(line)
                except ConfigError as error:
                    raise ConfigError(f"{path}, line {number}: {error}", path=str(path)) from None
        return found

    def _read(self, line: str) -> None:
        words = line.split()
        comment = next((at for at, word in enumerate(words) if word.startswith("#")), len(words))
        sentence = Sentence.parse(" ".join(words[:comment]))
        if sentence.asked is not None:
            raise ConfigError(f"{line.strip()!r}: give KEY=VALUE")
        if sentence.pairs:
            pairs = tuple((key.upper(), value) for key, value in sentence.pairs)
            (key, value), items = pairs[0], pairs[1:]
            if items or value is None:
                self.say(pairs)
            else:
                self.tree.setdefault(key, {}).setdefault(value, {})


class Config:
    """What `config()` was told, and the answers to what it is asked."""

    def __init__(self) -> None:
        self._said = ParameterSource()

    def tell(self, text: str | None, *, may_set: bool) -> str | None:
        """SCR's `config`: a query if no value follows the last key, else a setting. Raises ConfigError."""
        if not text:
            return None
        sentence = Sentence.parse(text)
        if sentence.asked is not None:
            return self._ask(sentence, text)
        if not sentence.pairs:
            raise ConfigError(f"config({text!r}) has no effect; give KEY, KEY=VALUE or KEY=")
        if not may_set:
            raise ScrError(f"config({text!r}): set parameters before init()")
        self._said.say(sentence.pairs)
        return None

    def forget(self) -> None:
        """What was told belongs to one job: `finalize` ends it."""
        self._said = ParameterSource()

    def _ask(self, sentence: Sentence, text: str) -> str | None:
        assert sentence.asked is not None
        if len(sentence.pairs) > 1:
            raise ConfigError(f"config({text!r}): ask for KEY, or for one item, as in 'CKPT=0 TYPE'")
        key = sentence.pairs[0][0] if sentence.pairs else sentence.asked
        if key in os.environ:
            return None if sentence.pairs else expand(os.environ[key])
        values = next((source.tree[key] for source in self.sources() if key in source.tree), {})
        if sentence.pairs:
            item = values.get(sentence.pairs[0][1] or "", {}).get(sentence.asked)
            return None if item is None else expand(item)
        if len(values) > 1:
            logger.warning("config(%r): %s has %d values; ask for an item of one of them", text, key, len(values))
            return None
        return next((expand(value) for value in values), None)

    def sources(self) -> list[ParameterSource]:
        """User file, what was told, system file; before all of them comes the environment."""
        return [ParameterSource.of_file(self.user_file()[0]), self._said, ParameterSource.of_file(SYSTEM_FILE)]

    def user_file(self) -> tuple[Path, bool]:
        """Where the user's file is, and whether SCR_CONF_FILE names it."""

        def early(name: str) -> str:
            return expand(os.environ.get(name) or self._said.first(name) or "")

        if named := early("SCR_CONF_FILE"):
            return Path(named), True
        return Path(early("SCR_PREFIX") or os.getcwd()) / ".scrconf", False

    def values(self) -> dict[str, str]:
        """What is set, by name, the first place that has it; not expanded. Names of the environment begin with SCR_."""
        found: dict[str, str] = {}
        for source in reversed(self.sources()):
            found.update({key: value for key in source.tree if (value := source.first(key)) is not None})
        return found | {key: value for key, value in os.environ.items() if key.startswith("SCR_") and value}

    def lines(self, key: str) -> Mapping[str, Mapping[str, str]]:
        """Lines that begin with this key, by its value: those of the first place that has any."""
        return next((source.tree[key] for source in self.sources() if key in source.tree), {})

    def keys(self) -> set[str]:
        """Everything that is set in a file or by `config()`."""
        return {key for source in self.sources() for key in source.tree}
