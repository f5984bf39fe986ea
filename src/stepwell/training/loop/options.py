"""Options of the Checkpointer that catch mistakes early, each with the reason."""

from __future__ import annotations

import difflib
import os
import re
from typing import TYPE_CHECKING, Any, Final

from stepwell.errors import ConfigError
from stepwell.events.loop_events import NoSuchVariable, Redirected
from stepwell.training.policy.auto import Auto
from stepwell.training.policy.every import Every, Policy
from stepwell.types import Keep

if TYPE_CHECKING:
    from stepwell.storage.codecs.assignment import Deltas

Files = dict[str, "str | os.PathLike[str]"]
ON_UNSEEKABLE: Final = ("error", "replay")
_NAMES: Final = (
    *("ADDRESS", "CACHE", "CLOSE_SECONDS", "CRASH", "CRASH_MARK", "DESK", "EVENT_BYTES", "FAULT", "GRACE"),
    *("GROUP_SECONDS", "LINGER", "NODE", "NOTICE", "PROVE", "SECRET", "SLOW_COPY", "TRUST", "VERIFY", "WHERE"),
)
VARIABLES: Final = frozenset(f"STEPWELL_{name}" for name in _NAMES)
"""All that the library reads."""
OPTIONS: Final = (
    *("overhead", "policy", "memory", "keep", "deltas", "levels", "data", "seed", "on_unseekable", "grace", "notice"),
    *("host_memory", "snapshot", "verify_snapshots", "track"),
)
STRATEGIES: Final = ("auto", "device", "overlap", "blocking")


def run_place(where: str | os.PathLike[str]) -> str:
    """The run's directory or address. `stepwell prove` redirects a script's runs with STEPWELL_WHERE."""
    given: Any = where
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(
            f"{given!r}: give the run's directory, or its address, such as s3://bucket/run", found=repr(given)
        )
    text = os.environ.get("STEPWELL_WHERE") or os.fspath(where)
    if "://" in text:
        return text
    if os.path.exists(text) and not os.path.isdir(text):
        raise ConfigError(f"{text}: is a file; give the run a directory", path=text)
    place = above = os.path.abspath(text)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise ConfigError(f"{text}: {above} is a file; give the run another directory", path=text)
    return place


def remarks(where: str | os.PathLike[str], place: str) -> list[Redirected | NoSuchVariable]:
    """What the environment does that the script may not expect: another place, a variable that means nothing."""
    given = os.fspath(where)
    found: list[Redirected | NoSuchVariable] = (
        [Redirected(asked=given, place=place)] if "://" in given and "://" not in place else []
    )
    for name in sorted(os.environ):
        if name.startswith("STEPWELL_") and name not in VARIABLES:
            meant = difflib.get_close_matches(name, VARIABLES, 1, 0.85)
            found += [NoSuchVariable(name=name, meant=meant[0])] if meant else []
    return found


def is_set(variable: str) -> bool:
    """A switch from the environment: 1 or 0."""
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{variable}={text!r}: give 1, or nothing", name=variable)
    return text == "1"


def seconds_from(variable: str, default: float) -> float:
    """A duration from the environment."""
    try:
        seconds = float(os.environ.get(variable, default))
    except ValueError:
        raise ConfigError(f"{variable}={os.environ[variable]!r} is not a number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{variable}={os.environ[variable]!r}: give seconds, 0 or more", name=variable)
    return seconds


def named_objects(named: dict[str, Any] | None, keywords: dict[str, Any]) -> dict[str, Any]:
    """What the user tracks, from `track=` and keywords together."""
    twice = sorted((named or {}).keys() & keywords.keys())
    if twice:
        raise ConfigError(f"{twice[0]!r} is given both as a keyword and in track=; drop one", name=twice[0])
    if not (named or keywords):
        raise ConfigError("nothing to save: pass model=..., optimizer=... or track={...}")
    for name, given in keywords.items():
        meant = difflib.get_close_matches(name, OPTIONS, 1, 0.8)
        if meant and not hasattr(given, "state_dict"):
            raise ConfigError(f"there is no option {name}=, did you mean {meant[0]}=?", name=name)
    return {**(named or {}), **keywords}


def choose_policy(policy: Policy | None, overhead: float | None) -> Policy:
    """The policy that was given, or the automatic one with the overhead that was given."""
    if policy is not None and overhead is not None:
        raise ConfigError("overhead= and policy= are both given; policy=Auto(overhead=...) says both", name="overhead")
    return policy or (Auto() if overhead is None else Auto(overhead=overhead))


def wants_epochs(policy: Policy | None, memory: Policy | None, keep: Keep) -> str | None:
    """What is asked for at the end of epochs, if anything is."""
    asked = {"policy": policy, "memory": memory}
    found = [f"{name}={given}" for name, given in asked.items() if isinstance(given, Every) and given.epochs]
    return found[0] if found else "Keep(epochs=True)" if keep.epochs else None


def read_deltas(deltas: Any, *, place: str, memory: Policy | None, levels: Any, ranks: int) -> Deltas | None:
    """What goes into chains between checkpoints, if anything does; a chain cannot be everywhere yet."""
    if deltas is None:
        return None
    from stepwell.storage.codecs.assignment import Deltas
    from stepwell.storage.codecs.zstd_frames import check_installed

    check_installed()
    refusals = {
        "a run in a bucket, where nothing can be appended": "://" in place,
        "memory=, because deltas= uses its snapshots; Deltas(every=) sets how often": memory is not None,
        "levels=": bool(levels),
        f"{ranks} ranks": ranks > 1,
    }
    for what, is_so in refusals.items():
        if is_so:
            raise ConfigError(f"deltas= cannot be combined with {what}", name="deltas")
    if isinstance(deltas, bool) or not hasattr(deltas, "__dataclass_fields__"):
        raise ConfigError(f"deltas={deltas!r}: give LC(bits=3), or Deltas(...)", name="deltas")
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
    if grace is not None and not (isinstance(grace, int | float) and 0 < grace < float("inf")):
        raise ConfigError(f"grace={grace!r}: give seconds, above 0, or None to ignore signals", name="grace")
    keep, seed = options["keep"], options["seed"]
    if isinstance(keep, bool) or not isinstance(keep, int | Keep):
        raise ConfigError(f"keep={keep!r}: give a number of checkpoints, or Keep(...)", name="keep")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ConfigError(f"seed={seed!r}: give a whole number, 0 or more", name="seed")
    if notice is not None and not isinstance(notice, str | os.PathLike) and not callable(notice):
        raise ConfigError(f"notice={notice!r}: give a path, or a function that returns True or False", name="notice")
    if notice == "":
        raise ConfigError("notice='': give a path, or a function that returns True or False", name="notice")
    if notice is not None and grace is None:
        raise ConfigError("notice= has no effect with grace=None, which ends nothing; drop one of them", name="notice")
    if snapshot not in STRATEGIES:
        raise ConfigError(f"snapshot={snapshot!r}: give one of {', '.join(STRATEGIES)}", name="snapshot")
    if options["on_unseekable"] not in ON_UNSEEKABLE:
        given = options["on_unseekable"]
        raise ConfigError(f"on_unseekable={given!r}: give one of {', '.join(ON_UNSEEKABLE)}", name="on_unseekable")
    if options["data"] is None and options["on_unseekable"] != "error":
        raise ConfigError("on_unseekable= has no effect without data=", name="on_unseekable")
    if host_memory is not None and (
        not isinstance(host_memory, int) or isinstance(host_memory, bool) or host_memory <= 0
    ):
        raise ConfigError(f"host_memory={host_memory!r}: give a number of bytes", name="host_memory")


def check_wishes(step: int | None, before: int | None, only: str | set[str] | None, names: list[str]) -> None:
    """What `restore` is asked for: one step or a limit, and objects that there are."""
    if step is not None and before is not None:
        raise ConfigError("step= and before= cannot be combined: step= names one checkpoint, before= the newest below")
    given: dict[str, Any] = {"step": step, "before": before}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(f"{name}={value!r}: give a number of steps", name=name)
    for name in sorted({only} if isinstance(only, str) else only or set()):
        if name not in names:
            meant = difflib.get_close_matches(name, names, 1) or [", ".join(names)]
            raise ConfigError(f"only={name!r}: no such object is tracked; there is {meant[0]}", name=name)


def check_count(epochs: Any) -> None:
    """How many epochs a loop wants."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
        raise ConfigError(f"epochs({epochs!r}): give a number of epochs")


def check_files(files: Files | None) -> dict[str, str]:
    """Files to be stored with a checkpoint: plain names, and paths that can be read now."""
    found = {}
    for name, path in (files or {}).items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}", name) or ".." in name:
            raise ConfigError(f"files={{{name!r}: ...}}: give a plain file name of letters, digits, '.', '_' and '-'")
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise ConfigError(f"files={{{name!r}: {os.fspath(path)!r}}}: no such file", path=str(path))
        found[name] = os.path.realpath(path)
    return found
