"""Where the secret of a run is kept, and who of its processes can have it.

    STEPWELL_SECRET      for all ranks, if it is set; nothing else is asked then
    secret               in the run directory: mode 0600, for the ranks of one user
    secret               in the bucket: for who can read the bucket, and so the weights

Owns:    that order; making the file or the object once; the file on this machine that names its agents.
Not:     what the keys are for (groups, levels, agent).
Holds:   the secret leaves these places only for the memory of the run's processes. A run that has none gets one at its
         next start; whoever gives a run directory away leaves the file out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError
from stepwell.ranks.wire.keyfile import make_keyfile, read_keyfile
from stepwell.ranks.wire.secret import draw_secret, key_from_environment, key_of
from stepwell.storage.store import files, mirror
from stepwell.storage.store.objects import ObjectPath
from stepwell.storage.store.paths import RunPaths

_MAX_BYTES: Final = 128


def make_shared(paths: RunPaths) -> None:
    """Draw the secret of the run, if it has none. Raises OSError, ConfigError."""
    if key_from_environment() is not None:
        return
    place = paths.secret
    if isinstance(place, ObjectPath):
        if not files.exists(place):
            files.put_new(place, f"{draw_secret()}\n".encode(), point="secret")
    else:
        make_keyfile(place)


def read_shared(paths: RunPaths) -> bytes:
    """What all ranks have in common. Raises OSError, ConfigError."""
    found = key_from_environment()
    if found is not None:
        return found
    place = paths.secret
    if not isinstance(place, ObjectPath):
        return read_keyfile(place)
    try:
        return key_of(files.get(place, limit=_MAX_BYTES).decode(errors="replace").removesuffix("\n"))
    except ConfigError:
        raise ConfigError(f"{place}: does not hold a secret; remove it, and the next start makes another one") from None


def make_local(paths: RunPaths) -> None:
    """Draw the secret of this machine's agents of the run, if there is none. Raises OSError, ConfigError."""
    mirror.lay(paths)
    make_keyfile(_local(paths))


def read_local(paths: RunPaths, *, to_look: bool = False) -> bytes | None:
    """What names the agents of the run on this machine: for its processes, and commands of the same user.

    None: nothing was ever drawn. Raises ConfigError for a file that others can read, unless STEPWELL_SECRET is set, or
    this is only `to_look`.
    """
    try:
        return read_keyfile(_local(paths), to_look=to_look)
    except FileNotFoundError:
        return key_from_environment()
    except ConfigError:
        found = key_from_environment()
        if found is None:
            raise
        return found


def _local(paths: RunPaths) -> Path:
    """In a directory the run's own; of a run in a bucket a file of this machine."""
    return paths.desk / "secret"
