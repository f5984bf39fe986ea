"""What a node must pass before it may join: a cache directory that works, room in it, and the user's own probe.

Holds:   every refusal is one sentence that names what was found. A disk that hangs keeps the node outside, nobody else.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from stepwell.errors import ConfigError
from stepwell.launch.conf import Conf
from stepwell.storage.store.private_directory import make_private

PROBE_BYTES: Final = 4 << 20


def why_refused(root: Path | None, conf: Conf) -> str | None:
    """The reason why this node may not join; None if it may. Blocks for as long as the probes take."""
    if root is None and conf.min_free_gb:
        return "min_free_gb is set, but STEPWELL_CACHE is not; set it to the cache directory of this node"
    if root is not None and (reason := _look_at(root, conf.min_free_gb)):
        return reason
    return _run(conf.probe, conf.probe_seconds) if conf.probe else None


def _look_at(root: Path, min_free_gb: float) -> str | None:
    try:
        make_private(root, advice="set STEPWELL_CACHE to a directory that only you can write to", may_be_passed=True)
        found = os.statvfs(root)
        free_gb = found.f_bavail * found.f_frsize / 1e9
        if free_gb < min_free_gb:
            return f"{root}: {free_gb:.1f} GB free, but min_free_gb asks for {min_free_gb:g} GB"
        return _write_and_read(root)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{root}: cannot use it: {error.strerror or error}"


def _write_and_read(root: Path) -> str | None:
    data = secrets.token_bytes(PROBE_BYTES)
    with tempfile.TemporaryFile(dir=root) as file:  # without a name: a kill leaves nothing behind
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is read then comes from the disk
        file.seek(0)
        return None if file.read() == data else f"{root}: does not return the bytes that were written"


def _run(command: str, seconds: float) -> str | None:
    try:
        done = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the probe {command!r} took more than {seconds:g} s"
    except (OSError, ValueError) as error:
        return f"cannot run the probe {command!r}: {error}"
    if done.returncode == 0:
        return None
    words = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"the probe {command!r} ended with status {done.returncode}{': ' + words[-1][:200] if words else ''}"
