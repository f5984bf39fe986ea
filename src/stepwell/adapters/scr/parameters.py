"""SCR's parameters: where a value comes from, and what it means here.

    environment  >  user file (SCR_CONF_FILE, or .scrconf in the prefix)  >  config()  >  /etc/scr.conf  >  default

Owns:    the names, their defaults, precedence and parsing; which are honoured, and which are said to be ignored.
Not:     what follows from them (job and what it uses).
Holds:   reading is local and has no effect; a value that means nothing is an error that names it.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError, StepwellError
from stepwell.levels.spec import Partner, Protection, ReedSolomon, Single, Xor

SYSTEM_FILE: Final = Path("/etc/scr.conf")
HONOURED: Final[dict[str, str]] = {
    "SCR_PREFIX": "",
    "SCR_CONF_FILE": "",
    "SCR_CACHE_BASE": "/dev/shm",
    "SCR_CACHE_SIZE": "2",
    "SCR_CACHE_BYPASS": "0",
    "SCR_CACHE_PURGE": "0",
    "SCR_COPY_TYPE": "XOR",
    "SCR_GROUP": "NODE",
    "SCR_SET_SIZE": "8",
    "SCR_SET_FAILURES": "2",
    "SCR_FLUSH": "10",
    "SCR_FLUSH_ASYNC": "0",
    "SCR_FLUSH_ASYNC_BW": "0",
    "SCR_FLUSH_ON_RESTART": "0",
    "SCR_FETCH": "1",
    "SCR_DISTRIBUTE": "1",
    "SCR_GLOBAL_RESTART": "0",
    "SCR_CHECKPOINT_INTERVAL": "0",
    "SCR_CHECKPOINT_SECONDS": "0",
    "SCR_CHECKPOINT_OVERHEAD": "0.0",
    "SCR_HALT_SECONDS": "0",
    "SCR_END_TIME": "0",
    "SCR_PREFIX_SIZE": "0",
    "SCR_CURRENT": "",
}
"""Name -> default. SCR's own, but for CACHE_SIZE (1), CACHE_BYPASS (1) and FLUSH_ASYNC_BW (200 MiB/s)."""
IGNORED: Final[dict[str, str]] = {
    "SCR_CNTL_BASE": "what lies in a cache describes itself; there is no control directory",
    "SCR_CRC_ON_COPY": "checksums are always on",
    "SCR_CRC_ON_DELETE": "checksums are always on",
    "SCR_CRC_ON_FLUSH": "checksums are always on",
    "SCR_FETCH_BYPASS": "files are verified on their way into the cache",
    "SCR_FETCH_WIDTH": "every rank reads its own part",
    "SCR_FILE_BUF_SIZE": "blocks are of 1 MiB",
    "SCR_FLUSH_ASYNC_PERCENT": "use SCR_FLUSH_ASYNC_BW",
    "SCR_FLUSH_ASYNC_USLEEP": "use SCR_FLUSH_ASYNC_BW",
    "SCR_FLUSH_TYPE": "a thread of this process carries the files",
    "SCR_FLUSH_WIDTH": "every rank carries its own part",
    "SCR_HALT_EXIT": "the library never ends your program; ask should_exit()",
    "SCR_LOG_DB_ENABLE": "events go to .stepwell-scr/events.jsonl",
    "SCR_LOG_ENABLE": "events always go to .stepwell-scr/events.jsonl",
    "SCR_LOG_SYSLOG_ENABLE": "events go to .stepwell-scr/events.jsonl",
    "SCR_LOG_TXT_ENABLE": "events go to .stepwell-scr/events.jsonl",
    "SCR_MPI_BUF_SIZE": "files do not travel by MPI",
    "SCR_PREFIX_PURGE": "nothing is removed at a start; `stepwell index --delete`",
    "SCR_WATCHDOG": "every collective call has a deadline: STEPWELL_GROUP_SECONDS",
    "SCR_WATCHDOG_TIMEOUT": "every collective call has a deadline: STEPWELL_GROUP_SECONDS",
    "SCR_WATCHDOG_TIMEOUT_PFS": "every collective call has a deadline: STEPWELL_GROUP_SECONDS",
}
"""Name -> why it has no effect. Said once where it is set."""
ELSEWHERE: Final = ("SCR_RUNS", "SCR_MIN_NODES", "SCR_EXCLUDE_NODES")
"""Of SCR's launcher scripts: they do not concern the library."""
LEAST_KEPT: Final = 2
_MANY: Final = ("CKPT", "GROUPS", "STORE")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?", re.IGNORECASE)
_TYPES: Final = ("SINGLE", "PARTNER", "XOR", "RS", "FILE")


class ScrError(StepwellError, RuntimeError):
    """A call of the SCR interface was refused or failed. SCR's own binding raises RuntimeError too."""


@dataclass
class Source:
    """One place where parameters stand: single ones, and lines of several items (`CKPT=0 TYPE=XOR`)."""

    values: dict[str, str] = field(default_factory=dict)
    lines: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Take what a line says; comments and empty lines say nothing."""
        line = text.split("#", 1)[0].strip()
        if not line:
            return
        items = [item.partition("=") for item in line.split()]
        if not all(mark and key for key, mark, _ in items):
            raise ConfigError(f"{text.strip()!r}: give KEY=VALUE, or several of them that begin with CKPT= or GROUPS=")
        key, _, value = items[0]
        if len(items) > 1 and key in _MANY:
            self.lines.setdefault((key, value), {}).update({name: found for name, _, found in items[1:]})
        elif len(items) > 1:
            raise ConfigError(f"{text.strip()!r}: several items only after {', '.join(f'{name}=' for name in _MANY)}")
        elif value:
            self.values[key] = value
        else:
            self.values.pop(key, None)

    @classmethod
    def of_file(cls, path: Path) -> Source:
        """A file of such lines; nothing if it is not there. Raises ConfigError."""
        found = cls()
        if path.is_file():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                try:
                    found.read(line)
                except ConfigError as error:
                    raise ConfigError(f"{path}, line {number}: {error}", path=str(path)) from None
        return found


@dataclass(frozen=True)
class Scheme:
    """One redundancy descriptor: which checkpoints it is for, and what protects them."""

    interval: int
    protect: Protection


@dataclass(frozen=True)
class Settings:
    """What all parameters come to. `keep` is never below 2, whatever SCR_CACHE_SIZE says."""

    prefix: Path
    cache: Path
    keep: int
    is_bypass: bool
    is_purging: bool
    schemes: tuple[Scheme, ...]
    domain: str | None
    flush: int
    is_async: bool
    bytes_per_second: float
    is_flushing_on_restart: bool
    is_fetching: bool
    is_distributing: bool
    is_global: bool
    interval: int
    seconds: float
    overhead: float
    halt_seconds: float
    end_time: float
    prefix_size: int
    current: str
    ignored: dict[str, str]

    def scheme(self, number: int) -> Protection:
        """What protects the n-th checkpoint: the descriptor with the largest interval that divides n."""
        fitting = [scheme for scheme in self.schemes if number % scheme.interval == 0]
        return max(fitting, key=lambda scheme: scheme.interval).protect if fitting else Single()

    def shared_facts(self) -> dict[str, object]:
        """What has to be the same on all ranks; the cache may be another directory on every node."""
        return {
            "SCR_PREFIX": str(self.prefix),
            "SCR_CACHE_SIZE": self.keep,
            "SCR_CACHE_BYPASS": self.is_bypass,
            "SCR_COPY_TYPE": [repr(scheme) for scheme in self.schemes],
            "SCR_FLUSH": self.flush,
            "SCR_FLUSH_ASYNC": self.is_async,
            "SCR_FETCH": self.is_fetching,
            "SCR_GLOBAL_RESTART": self.is_global,
        }


class Config:
    """What `config()` was told, and the answers to what it is asked."""

    def __init__(self) -> None:
        self._said = Source()

    def tell(self, text: str, *, may_set: bool) -> str | None:
        """SCR's `config`: a query without `=`, else a setting. Raises ConfigError."""
        words = text.split()
        if not words:
            raise ConfigError("config('') asks for nothing; give KEY, KEY=VALUE or KEY=")
        if "=" not in words[-1]:
            return self._ask(words)
        if not may_set:
            raise ScrError(f"config({text!r}): parameters are set before init(); call it earlier")
        self._said.read(text)
        return None

    def _ask(self, words: list[str]) -> str | None:
        sources = self._sources()
        if len(words) == 1:
            return _find(words[0], sources)
        key, mark, value = words[0].partition("=")
        if not mark or len(words) != 2:
            raise ConfigError(f"config({' '.join(words)!r}): ask for KEY, or for one item as in 'CKPT=0 TYPE'")
        found = (source.lines.get((key, value), {}).get(words[1]) for source in sources)
        return next((item for item in found if item is not None), None)

    def _sources(self) -> list[Source]:
        """In the order of precedence, the default last."""
        environment = Source({key: value for key, value in os.environ.items() if key.startswith("SCR_") and value})
        first = [environment, self._said]
        named = _find("SCR_CONF_FILE", first)
        prefix = _find("SCR_PREFIX", first) or os.getcwd()
        user = Source.of_file(Path(named) if named else Path(prefix) / ".scrconf")
        return [environment, user, self._said, Source.of_file(SYSTEM_FILE), Source(HONOURED)]

    def settle(self) -> Settings:
        """What all of it comes to, now. Raises ConfigError."""
        sources = self._sources()
        get = _Reader(sources)
        lines: dict[tuple[str, str], Mapping[str, str]] = {}
        for source in reversed(sources):
            lines.update(source.lines)
        keep = get.whole("SCR_CACHE_SIZE")
        prefix = Path(os.path.abspath(get.text("SCR_PREFIX") or os.getcwd()))
        set_by_user = {key for source in sources[:-1] for key in source.values}
        return Settings(
            prefix=prefix,
            cache=Path(os.path.abspath(get.text("SCR_CACHE_BASE"))) / _user() / "stepwell-scr",
            keep=max(LEAST_KEPT, keep),
            is_bypass=get.flag("SCR_CACHE_BYPASS"),
            is_purging=get.flag("SCR_CACHE_PURGE"),
            schemes=_schemes(get, lines),
            domain=_domain(get.text("SCR_GROUP"), lines),
            flush=get.whole("SCR_FLUSH"),
            is_async=get.flag("SCR_FLUSH_ASYNC"),
            bytes_per_second=get.size("SCR_FLUSH_ASYNC_BW"),
            is_flushing_on_restart=get.flag("SCR_FLUSH_ON_RESTART"),
            is_fetching=get.flag("SCR_FETCH"),
            is_distributing=get.flag("SCR_DISTRIBUTE"),
            is_global=get.flag("SCR_GLOBAL_RESTART"),
            interval=get.whole("SCR_CHECKPOINT_INTERVAL"),
            seconds=get.number("SCR_CHECKPOINT_SECONDS"),
            overhead=get.number("SCR_CHECKPOINT_OVERHEAD"),
            halt_seconds=get.number("SCR_HALT_SECONDS"),
            end_time=get.number("SCR_END_TIME") or float(os.environ.get("SLURM_JOB_END_TIME") or 0),
            prefix_size=get.whole("SCR_PREFIX_SIZE"),
            current=get.text("SCR_CURRENT"),
            ignored=_ignored(set_by_user, keep),
        )


def _ignored(names: set[str], keep: int) -> dict[str, str]:
    out = {name: IGNORED[name] for name in sorted(names) if name in IGNORED}
    unknown = {name for name in names if name.startswith("SCR_")} - set(HONOURED) - set(IGNORED) - set(ELSEWHERE)
    out |= dict.fromkeys(sorted(unknown), "no parameter of this interface")
    if keep < LEAST_KEPT:
        out["SCR_CACHE_SIZE"] = f"{LEAST_KEPT} are kept: with {keep} a crash during an output would leave none"
    return out


def _find(name: str, sources: list[Source]) -> str | None:
    return next((source.values[name] for source in sources if source.values.get(name)), None)


class _Reader:
    """Typed values. Each raises ConfigError with the parameter's name."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def text(self, name: str) -> str:
        return _find(name, self._sources) or ""

    def number(self, name: str) -> float:
        text = self.text(name) or "0"
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={text}: give a number that is not negative", found=text)
        return value

    def whole(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise ConfigError(f"{name}={self.text(name)}: give a whole number", found=self.text(name))
        return int(value)

    def flag(self, name: str) -> bool:
        return self.whole(name) != 0

    def size(self, name: str) -> float:
        text = self.text(name) or "0"
        found = _SIZE.fullmatch(text)
        if found is None:
            raise ConfigError(f"{name}={text}: give bytes, as 1048576 or 200MB", found=text)
        return float(found[1]) * 1024.0 ** " kmgtp".index(found[2].lower() or " ")


def _schemes(get: _Reader, lines: Mapping[tuple[str, str], Mapping[str, str]]) -> tuple[Scheme, ...]:
    size, failures = get.whole("SCR_SET_SIZE"), get.whole("SCR_SET_FAILURES")
    kind = get.text("SCR_COPY_TYPE").upper()
    if kind != "FILE":
        return (Scheme(1, _protection("SCR_COPY_TYPE", kind, size, failures)),)
    found = []
    for (key, value), items in sorted(lines.items()):
        if key == "CKPT":
            own = _Reader([Source(dict(items)), Source({"SET_SIZE": str(size), "SET_FAILURES": str(failures)})])
            kind = (own.text("TYPE") or "XOR").upper()
            protect = _protection(f"CKPT={value} TYPE", kind, own.whole("SET_SIZE"), own.whole("SET_FAILURES"))
            found.append(Scheme(max(1, own.whole("INTERVAL")), protect))
    if not found:
        raise ConfigError("SCR_COPY_TYPE=FILE: give descriptors, as config('CKPT=0 INTERVAL=1 TYPE=XOR')")
    return tuple(found)


def _protection(name: str, kind: str, size: int, failures: int) -> Protection:
    if kind == "SINGLE":
        return Single()
    if kind == "PARTNER":
        return Partner()
    if kind == "XOR":
        return Xor(size)
    if kind == "RS":
        return ReedSolomon(size, failures)
    raise ConfigError(f"{name}={kind}: give one of {', '.join(_TYPES)}", found=kind)


def _domain(group: str, lines: Mapping[tuple[str, str], Mapping[str, str]]) -> str | None:
    """What this host fails together with: its line of `GROUPS=host POWER=psu1 SWITCH=3`; None: only with itself."""
    if group.upper() in ("", "NODE"):
        return None
    items = lines.get(("GROUPS", socket.gethostname()), {})
    if group not in items:
        raise ConfigError(f"SCR_GROUP={group}: there is no line 'GROUPS={socket.gethostname()} {group}=...'")
    return f"{group}={items[group]}"


def _user() -> str:
    try:
        return re.sub(r"[^A-Za-z0-9._-]", "_", getpass.getuser()) or "user"
    except (KeyError, OSError):  # no name for this number: a container
        return str(os.getuid())
