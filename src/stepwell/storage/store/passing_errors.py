"""Errors of a file system that pass: its server starts anew, the network is away, descriptors or memory are short.

Owns:    which errors these are, how often a read is tried again, and what is made of the last one.
Holds:   what may pass is never damage, or a good checkpoint would be void, or passed over for an older one. It becomes
         a StorageError, as of a bucket: an OSError, which agents try again.

An I/O error of a local disk is a bad sector after the last try, and that is damage. Of a shared file system it may be a
server that did not answer.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from stepwell.errors import DamagedError, StorageError
from stepwell.storage.store.mounts import is_shared

T = TypeVar("T")
_PASSING: Final = frozenset(
    {
        errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ESHUTDOWN, errno.EHOSTDOWN,
        errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EREMOTEIO, errno.ENOLINK,
        errno.ECOMM,
    }
)  # fmt: skip
_PAUSES: Final = (0.1, 0.3, 1.0)


def patiently(path: Path, read: Callable[[], T]) -> T:
    """What `read` returns. Tried again after an error that may pass; the last one is a StorageError. Raises OSError."""
    for pause in _PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno not in _PASSING and error.errno != errno.EIO:
                raise
            time.sleep(pause)
    try:
        return read()
    except OSError as error:
        if error.errno in _PASSING or (error.errno == errno.EIO and is_shared(path)):
            raise StorageError(
                f"{path}: cannot be read now: {error.strerror}; that says nothing about what lies there. Look after "
                "the file system, and try again",
                path=str(path),
            ) from error
        raise


def intact(path: Path, what: str, read: Callable[[], T]) -> T:
    """As `patiently`, where any other error is damage: `what`, as in `cannot be read`. Raises StorageError too."""
    try:
        return patiently(path, read)
    except StorageError:
        raise
    except OSError as error:
        raise DamagedError(f"{path}: {what}: {error.strerror}", path=str(path)) from error
