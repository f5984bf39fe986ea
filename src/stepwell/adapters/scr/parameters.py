"""SCR's parameters: what they mean here, and what is said of those that mean nothing.

Owns:    the names, their defaults, which are honoured, and which are named as ignored, each with the reason.
Not:     where a value comes from (sources); what follows from it (job and what it uses).
Holds:   a parameter or descriptor that is set is honoured, or named once with the reason; a value that means nothing is
         an error that names it.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.adapters.scr.parameter_sources import Config, expand_surely
from stepwell.errors import ConfigError
from stepwell.levels.level_spec import Partner, Protection, ReedSolomon, Single, Xor
from stepwell.storage.store.objects import is_address

HONOURED: Final[dict[str, str]] = {
    "SCR_ENABLE": "1",
    "SCR_DEBUG": "0",
    "SCR_PREFIX": "",
    "SCR_CONF_FILE": "",
    "SCR_CACHE_BASE": "/dev/shm",
    "SCR_USER_NAME": "",
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
    "SCR_DROP_AFTER_CURRENT": "0",
    "SCR_COPY_METADATA": "1",
}
"""Name -> default. SCR's own, but for CACHE_SIZE (1), CACHE_BYPASS (1) and FLUSH_ASYNC_BW (200 MiB/s)."""
_EVENTS: Final = "events always go to .stepwell-scr/events.jsonl"
_CHECKED: Final = "checksums are always on"
_DEADLINE: Final = "every collective call has a deadline: STEPWELL_GROUP_SECONDS"
_OF_THE_RUN: Final = "a cache belongs to the run in the prefix, not to a job"
_LAUNCHER: Final = "belongs to SCR's launcher scripts; use `torchrun --max-restarts`, or your scheduler"
_INTERPOSED: Final = "belongs to SCR's interposing library; call the functions of this interface"
IGNORED: Final[dict[str, str]] = {
    "SCR_AXL_MKDIR": "stepwell creates directories as needed",
    "SCR_CHECKPOINT_DIR_PATTERN": _INTERPOSED,
    "SCR_CHECKPOINT_PATTERN": _INTERPOSED,
    "SCR_CHECKPOINT_PATTERN_TOKEN": _INTERPOSED,
    "SCR_CLUSTER_NAME": _OF_THE_RUN,
    "SCR_CNTL_BASE": "the files in a cache describe themselves; there is no control directory",
    "SCR_CRC_ON_COPY": _CHECKED,
    "SCR_CRC_ON_DELETE": _CHECKED,
    "SCR_CRC_ON_FLUSH": _CHECKED,
    "SCR_EXCLUDE_NODES": _LAUNCHER,
    "SCR_FETCH_BYPASS": "files are verified while they are copied into the cache",
    "SCR_FETCH_TYPE": "every rank reads its own part",
    "SCR_FETCH_WIDTH": "every rank reads its own part",
    "SCR_FILE_BUF_SIZE": "blocks are 1 MiB",
    "SCR_FLUSH_ASYNC_PERCENT": "use SCR_FLUSH_ASYNC_BW",
    "SCR_FLUSH_ASYNC_USLEEP": "use SCR_FLUSH_ASYNC_BW",
    "SCR_FLUSH_POSTSTAGE": "finalize(), the next start or `stepwell flush` copies what is left",
    "SCR_FLUSH_TYPE": "a thread of this process copies the files",
    "SCR_FLUSH_WIDTH": "every rank copies its own part",
    "SCR_HALT_EXIT": "the library never ends your program; call should_exit()",
    "SCR_JOB_ID": _OF_THE_RUN,
    "SCR_JOB_NAME": _OF_THE_RUN,
    "SCR_MIN_NODES": _LAUNCHER,
    "SCR_MPI_BUF_SIZE": "files are not sent over MPI",
    "SCR_NODELIST": _LAUNCHER,
    "SCR_NODE_TESTS": _LAUNCHER,
    "SCR_NODE_TESTS_FILE": _LAUNCHER,
    "SCR_PREFIX_PURGE": "nothing is removed at a start; use `stepwell index --delete`",
    "SCR_RUNS": _LAUNCHER,
    "SCR_WATCHDOG": _DEADLINE,
    "SCR_WATCHDOG_TIMEOUT": _DEADLINE,
    "SCR_WATCHDOG_TIMEOUT_PFS": _DEADLINE,
}
"""Name -> why it has no effect. Said once where it is set. So is everything that begins with SCR_LOG_ or SCR_DB_."""
DESCRIPTORS: Final = ("CKPT", "GROUPS", "STORE", "CACHEDIR", "CNTLDIR")
LEAST_KEPT: Final = 2
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?", re.IGNORECASE)
_TYPES: Final = ("SINGLE", "PARTNER", "XOR", "RS", "FILE")
_OF_CKPT: Final = ("ENABLED", "INTERVAL", "SET_FAILURES", "SET_SIZE", "TYPE")


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
    is_dropping_later: bool
    is_keeping_modes: bool
    debug: int
    values: Mapping[str, str]
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


def settle(config: Config) -> Settings:
    """What all of it comes to, now. Raises ConfigError."""
    values = config.values()
    get = _Reader({**HONOURED, **values})
    if not get.flag("SCR_ENABLE"):
        raise ConfigError("SCR_ENABLE=0 turns checkpoints off for this job; init() fails as in SCR")
    keep, groups = get.whole("SCR_CACHE_SIZE"), config.lines("GROUPS")
    cache = get.path("SCR_CACHE_BASE")
    user = _plain(get.text("SCR_USER_NAME")) or _user()
    return Settings(
        prefix=get.path("SCR_PREFIX"),
        cache=cache / user / "stepwell-scr",
        keep=max(LEAST_KEPT, keep),
        is_bypass=get.flag("SCR_CACHE_BYPASS"),
        is_purging=get.flag("SCR_CACHE_PURGE"),
        schemes=_schemes(get, config.lines("CKPT")),
        domain=_domain(get.text("SCR_GROUP"), groups),
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
        is_dropping_later=get.flag("SCR_DROP_AFTER_CURRENT"),
        is_keeping_modes=get.flag("SCR_COPY_METADATA"),
        debug=get.whole("SCR_DEBUG"),
        values={name: get.text(name) for name in HONOURED},
        ignored=_ignored(config, values, keep) | _ignored_lines(config, get, cache),
    )


def _ignored(config: Config, values: Mapping[str, str], keep: int) -> dict[str, str]:
    out = {}
    for name in sorted({*values, *config.keys()} - set(HONOURED) - set(DESCRIPTORS)):
        if name.startswith(("SCR_LOG_", "SCR_DB_")):
            out[name] = _EVENTS
        else:
            out[name] = IGNORED.get(name, "not a parameter of this interface")
    path, is_named = config.user_file()
    if is_named and not path.is_file():
        out["SCR_CONF_FILE"] = f"{path} is not a file; no parameters were read from it"
    if keep < LEAST_KEPT:
        out["SCR_CACHE_SIZE"] = f"stepwell keeps {LEAST_KEPT}: with {keep}, a crash during an output would leave none"
    return out


def _ignored_lines(config: Config, get: _Reader, cache: Path) -> dict[str, str]:
    """Descriptors, or what they say, that have no effect."""
    out = {f"{key}=": "no such list is needed" for key in ("CACHEDIR", "CNTLDIR") if config.lines(key)}
    for place, items in config.lines("STORE").items():
        words = " ".join(f"{name}={item}" for name, item in items.items())
        if Path(expand_surely("STORE", place)) != cache or items:
            out[f"STORE={place}{f' {words}' if words else ''}"] = (
                f"a node has one cache, {cache} (SCR_CACHE_BASE), for SCR_CACHE_SIZE datasets"
            )
    lines = config.lines("CKPT")
    if lines and get.text("SCR_COPY_TYPE").upper() != "FILE":
        out["CKPT="] = "checkpoint descriptors have an effect with SCR_COPY_TYPE=FILE only"
        return out
    for number, items in lines.items():
        for name in sorted(set(items) - set(_OF_CKPT)):
            if name == "STORE" and Path(expand_surely("STORE", items[name])) == cache:
                continue
            if name == "GROUP" and items[name] == get.text("SCR_GROUP"):
                continue
            out[f"CKPT={number} {name}={items[name]}"] = "applies to all checkpoints alike: set the SCR_ parameter"
    return out


class _Reader:
    """Typed values. Each raises ConfigError with the parameter's name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        return expand_surely(name, self._values.get(name, ""))

    def path(self, name: str) -> Path:
        """A directory of this machine; the working directory where nothing is said."""
        text = self.text(name)
        if is_address(text):
            raise ConfigError(
                f"{name}={text}: give a directory; the SCR interface does not support buckets", found=text
            )
        return Path(os.path.abspath(text or os.getcwd()))

    def number(self, name: str) -> float:
        text = self.text(name) or "0"
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={text}: give a number, 0 or more", found=text)
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
            raise ConfigError(f"{name}={text}: give bytes, such as 1048576 or 200MB", found=text)
        return float(found[1]) * 1024.0 ** " kmgtp".index(found[2].lower() or " ")


def _schemes(get: _Reader, lines: Mapping[str, Mapping[str, str]]) -> tuple[Scheme, ...]:
    size, failures = get.whole("SCR_SET_SIZE"), get.whole("SCR_SET_FAILURES")
    kind = get.text("SCR_COPY_TYPE").upper()
    if kind != "FILE":
        return (Scheme(1, _protection("SCR_COPY_TYPE", kind, size, failures)),)
    found = []
    for number, items in sorted(lines.items()):
        given = {"ENABLED": "1", "TYPE": "XOR", "SET_SIZE": str(size), "SET_FAILURES": str(failures), **items}
        own = _Reader(given)
        if own.flag("ENABLED"):
            name = f"CKPT={number} TYPE"
            protect = _protection(name, own.text("TYPE").upper(), own.whole("SET_SIZE"), own.whole("SET_FAILURES"))
            found.append(Scheme(max(1, own.whole("INTERVAL")), protect))
    if not found:
        raise ConfigError("SCR_COPY_TYPE=FILE: give descriptors, such as config('CKPT=0 INTERVAL=1 TYPE=XOR')")
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


def _domain(group: str, lines: Mapping[str, Mapping[str, str]]) -> str | None:
    """What this host fails together with: its line of `GROUPS=host POWER=psu1 SWITCH=3`; None: only with itself."""
    if group.upper() in ("", "NODE"):
        return None
    items = lines.get(socket.gethostname(), {})
    if group not in items:
        raise ConfigError(f"SCR_GROUP={group}: there is no line 'GROUPS={socket.gethostname()} {group}=...'")
    return f"{group}={items[group]}"


def _user() -> str:
    try:
        return _plain(getpass.getuser()) or "user"
    except (KeyError, OSError):  # no name for this number: a container
        return str(os.getuid())


def _plain(name: str) -> str:
    """As the name of a directory."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")
