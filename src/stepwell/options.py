"""Options of the Checkpointer that catch mistakes early, each with the reason."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

from stepwell.errors import ConfigError
from stepwell.policy.auto import Auto
from stepwell.policy.every import Policy

if TYPE_CHECKING:
    from stepwell.codecs.layout import Deltas

Files = dict[str, "str | os.PathLike[str]"]
ON_UNSEEKABLE: Final = ("error", "replay")
STRATEGIES: Final = ("auto", "device", "overlap", "blocking")


def run_place(where: str | os.PathLike[str]) -> str:
    """The run's directory or address. `stepwell prove` redirects a script's runs with STEPWELL_WHERE."""
    text = os.environ.get("STEPWELL_WHERE") or os.fspath(where)
    return text if "://" in text else os.path.abspath(text)


def seconds_from(variable: str, default: float) -> float:
    """A duration from the environment."""
    try:
        return float(os.environ.get(variable, default))
    except ValueError:
        raise ConfigError(f"{variable}={os.environ[variable]!r} is no number of seconds") from None


def named_objects(named: dict[str, Any] | None, keywords: dict[str, Any]) -> dict[str, Any]:
    """What the user tracks, from `track=` and keywords together."""
    twice = sorted((named or {}).keys() & keywords.keys())
    if twice:
        raise ConfigError(f"{twice[0]!r} is given both as a keyword and in track=; drop one", name=twice[0])
    if not (named or keywords):
        raise ConfigError("nothing to save: pass model=..., optimizer=... or track={...}")
    return {**(named or {}), **keywords}


def choose_policy(policy: Policy | None, overhead: float | None) -> Policy:
    """The policy that was given, or the automatic one with the overhead that was given."""
    if policy is not None and overhead is not None:
        raise ConfigError("overhead= and policy= are both given; policy=Auto(overhead=...) says both", name="overhead")
    return policy or (Auto() if overhead is None else Auto(overhead=overhead))


def read_deltas(deltas: Any, *, place: str, memory: Policy | None, levels: Any, ranks: int) -> Deltas | None:
    """What goes into chains between checkpoints, if anything does; a chain cannot be everywhere yet."""
    if deltas is None:
        return None
    from stepwell.codecs.frames import check_installed
    from stepwell.codecs.layout import Deltas

    check_installed()
    refusals = {
        "a run in a bucket, where nothing can be appended": "://" in place,
        "memory=, whose snapshots it takes; Deltas(every=) says how often": memory is not None,
        "levels=": bool(levels),
        f"{ranks} ranks": ranks > 1,
    }
    for what, is_so in refusals.items():
        if is_so:
            raise ConfigError(f"deltas= does not go together with {what}", name="deltas")
    return Deltas.of(deltas)


def check_options(**options: Any) -> None:
    """Refuse an object that landed in an option of the same name, and values that make no sense."""
    for name, value in options.items():
        if value is not None and callable(getattr(value, "state_dict", None)) and name != "data":
            raise ConfigError(
                f"{name}= is an option of the Checkpointer, and got a {type(value).__qualname__}; "
                f"to track an object under that name use track={{{name!r}: ...}}",
                name=name,
            )
    snapshot, host_memory = options["snapshot"], options["host_memory"]
    for name in ("policy", "memory"):
        policy = options[name]
        if policy is not None and not callable(getattr(policy, "is_due", None)):
            raise ConfigError(
                f"{name}= is a {type(policy).__qualname__}; give Auto(...), Every(...) or Never()", name=name
            )
    grace, notice = options["grace"], options["notice"]
    if grace is not None and not (isinstance(grace, int | float) and grace > 0):
        raise ConfigError(f"grace={grace!r}: give seconds, above 0, or None to leave signals alone", name="grace")
    if notice is not None and not isinstance(notice, str | os.PathLike) and not callable(notice):
        raise ConfigError(f"notice={notice!r}: give a path, or a function that returns True or False", name="notice")
    if snapshot not in STRATEGIES:
        raise ConfigError(f"snapshot={snapshot!r}: give one of {', '.join(STRATEGIES)}", name="snapshot")
    if options["on_unseekable"] not in ON_UNSEEKABLE:
        given = options["on_unseekable"]
        raise ConfigError(f"on_unseekable={given!r}: give one of {', '.join(ON_UNSEEKABLE)}", name="on_unseekable")
    if host_memory is not None and (not isinstance(host_memory, int) or host_memory <= 0):
        raise ConfigError(f"host_memory={host_memory!r}: give a number of bytes", name="host_memory")


def check_files(files: Files | None) -> dict[str, str]:
    """Files to be stored with a checkpoint: plain names, and paths that can be read now."""
    found = {}
    for name, path in (files or {}).items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}", name) or ".." in name:
            raise ConfigError(f"files={{{name!r}: ...}}: give a plain file name of letters, digits, '.', '_' and '-'")
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise ConfigError(f"files={{{name!r}: {os.fspath(path)!r}}}: there is no such file to read", path=str(path))
        found[name] = os.path.realpath(path)
    return found
