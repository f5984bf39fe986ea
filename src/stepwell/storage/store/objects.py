"""Names in a bucket, and the few operations on them: what `files` is for a file system.

Owns:    the client of a bucket, its patience, and what its errors mean.
Holds:   an object is there whole or not at all: a large one is sent in parts and appears with the last of them; a name
         that was given with `put_new` is given once, whoever asks again. What cannot be reached is a StorageError,
         never damage: nobody falls back to an older checkpoint because of a network.

Retries, with waits that grow and differ, are the client's; beyond them the agent tries again with the next snapshot.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepwell.errors import ConfigError, StorageError
from stepwell.escape import HIDDEN, without_secrets
from stepwell.faults import file_operation

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES: Final = ("s3", "gs", "az")
PART_BYTES: Final = 16 << 20
"""What is sent in one request, at least."""
_SMALL_PART_BYTES: Final = 6 << 20  # services take nothing below 5 MiB, but for the last one
_MOST_PARTS: Final = 9_000  # services take 10,000
_IN_FLIGHT: Final = 12
_WRITTEN: Final = "cannot be written"
_KEYS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
    "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_WRITER: Final = "stepwellwriter"
"""Attribute of an object that says who put it. Letters alone: Azure takes no dash, some proxies no underscore."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """A name in a bucket, put together like a `Path`. `bucket` is its address, `key` the rest."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, text: str) -> ObjectPath:
        """`s3://bucket/some/where`. Raises ConfigError."""
        scheme, _, rest = text.partition("://")
        bucket, *keys = [part for part in rest.split("/") if part] or [""]
        _refuse_secrets(scheme, bucket, rest)
        if scheme not in SCHEMES or not bucket or {".", ".."} & set(keys):
            known = ", ".join(f"{scheme}://bucket/..." for scheme in SCHEMES)
            raise ConfigError(f"{text}: give a directory, or a place in a bucket ({known})", found=text)
        if importlib.util.find_spec("obstore") is None:
            raise ConfigError(f"{text}: object storage needs its client: pip install 'stepwell[s3]'", found=text)
        return cls(f"{scheme}://{bucket}", "/".join(keys))

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """All but the last part."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])


def _refuse_secrets(scheme: str, bucket: str, rest: str) -> None:
    """An address is written into events and errors, and handed to other processes: keys do not belong there."""
    _, mark, query = rest.partition("?")
    if "@" in bucket or ":" in bucket or (mark and "=" in query):
        raise ConfigError(
            f"{scheme}://{HIDDEN}: this address holds a user name, a password or a token; give the bucket and the path "
            f"alone, and the keys in {_KEYS.get(scheme, 'the environment')}"
        )


Location = Path | ObjectPath
"""Where something of a run lies."""


def is_address(text: str) -> bool:
    """Whether it names a place in a bucket, or tries to."""
    return "://" in text


@dataclass(frozen=True)
class ObjectFacts:
    """Size, time of the last change in seconds since 1970, and what is the same for two names of one file."""

    nbytes: int
    modified: float
    identity: str = ""


@functools.cache
def _client(bucket: str) -> ObjectStore:
    from obstore.store import from_url

    endpoints = {
        key: value for key, value in os.environ.items() if key.startswith(("AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT"))
    }
    for key, value in endpoints.items():
        if without_secrets(value) != value:
            keys = _KEYS.get(bucket.partition("://")[0], "variables of their own")
            raise ConfigError(
                f"{key}={without_secrets(value)}: this address holds a password or a token; give it without, and the "
                f"keys in {keys}",
                name=key,
            )
    try:
        return from_url(
            bucket,
            client_options={
                "timeout": timedelta(seconds=120),
                "connect_timeout": timedelta(seconds=10),
                "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints.values()),
            },
            retry_config={
                "max_retries": 12,
                "backoff": {
                    "base": 2,
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=10),
                },
                "retry_timeout": timedelta(seconds=120),
            },
        )
    except Exception as error:
        raise ConfigError(f"{bucket}: {_first_line(error)}", found=bucket) from _cause(error)


@contextlib.contextmanager
def _asking(path: ObjectPath, what: str) -> Iterator[None]:
    """Errors of the client as ours. FileNotFoundError stays what it is, but for something that is being written."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        if what == _WRITTEN:
            raise StorageError(f"{path}: {what}: there is no bucket {path.bucket}", path=str(path)) from error
        raise FileNotFoundError(f"{path}: there is no such object") from error
    except BaseError as error:
        raise StorageError(f"{path}: {what}: {_first_line(error)}", path=str(path)) from _cause(error)


def _cause(error: Exception) -> Exception | None:
    """What a traceback may show beside our own error: not what repeats a secret, as of a proxy or a signed request."""
    return error if without_secrets(str(error)) == str(error) else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(": <?xml")[0].strip()


def get(path: ObjectPath, limit: int) -> bytes:
    """All of a small object; at most one byte more than `limit`. Raises FileNotFoundError, StorageError."""
    import obstore

    with _asking(path, "cannot be read"):
        found = obstore.get(_client(path.bucket), path.key)
        if found.meta["size"] > limit:
            return bytes(obstore.get_range(_client(path.bucket), path.key, start=0, length=limit + 1))
        return bytes(found.bytes())


@functools.lru_cache(maxsize=4096)
def get_constant(path: ObjectPath, limit: int) -> bytes:
    """Like `get`, for what is written once and never changes: asked for once."""
    return get(path, limit)


def get_range(path: ObjectPath, start: int, nbytes: int, buffer: memoryview) -> int:
    """Fill the front of `buffer`. Returns how much there was. Raises FileNotFoundError, StorageError."""
    import obstore

    with _asking(path, "cannot be read"):
        data = memoryview(obstore.get_range(_client(path.bucket), path.key, start=start, length=nbytes))
    buffer[: len(data)] = data
    return len(data)


def put(path: ObjectPath, data: bytes) -> None:
    """Store a small object, in the place of what was there. Raises StorageError."""
    import obstore

    file_operation("write", path)
    with _asking(path, _WRITTEN):
        obstore.put(_client(path.bucket), path.key, data, use_multipart=False)


def put_new(path: ObjectPath, data: bytes) -> bool:
    """Store a small object if its name is free. False if it was taken. Raises StorageError."""
    import obstore
    from obstore.exceptions import AlreadyExistsError

    file_operation("write", path)
    client, writer = _client(path.bucket), os.urandom(8).hex()
    with _asking(path, _WRITTEN):
        try:
            obstore.put(client, path.key, data, mode="create", attributes={_WRITER: writer}, use_multipart=False)
        except AlreadyExistsError:
            # Perhaps by this very call: an answer that was lost is asked for again, and then the name is taken.
            return bool(obstore.get(client, path.key).attributes.get(_WRITER) == writer)
    return True


def upload(path: ObjectPath, pieces: Iterable[memoryview], part_bytes: int) -> None:
    """Send a large object, several pieces at a time. It appears when all were taken, or not at all.

    Raises StorageError, or what the pieces raise.
    """
    import obstore

    file_operation("write", path)
    raised: list[BaseException] = []

    def guarded() -> Iterator[memoryview]:
        try:
            yield from pieces
        except BaseException as error:
            raised.append(error)
            raise

    try:
        with _asking(path, _WRITTEN):
            obstore.put(
                _client(path.bucket),
                path.key,
                guarded(),
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=_IN_FLIGHT,
            )
    except BaseException:
        if raised:
            raise raised[0] from None
        raise


class Upload:
    """An object that is sent chunk by chunk, for hosts with little memory. It appears with `finish`, or never."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        import obstore

        file_operation("write", path)
        self._path = path
        part = max(_SMALL_PART_BYTES, -(-nbytes // _MOST_PARTS))
        self._writer = obstore.open_writer(_client(path.bucket), path.key, buffer_size=part, max_concurrency=2)

    def write(self, data: memoryview) -> None:
        """Send more. Raises StorageError."""
        with _asking(self._path, _WRITTEN):
            self._writer.write(bytes(data))  # it keeps what it is given until that is sent, and the caller goes on

    def finish(self) -> None:
        """Let it appear. Raises StorageError."""
        with _asking(self._path, _WRITTEN):
            self._writer.close()


def part_bytes(nbytes: int) -> int:
    """How large the parts of an object have to be."""
    return max(PART_BYTES, -(-nbytes // _MOST_PARTS // PART_BYTES) * PART_BYTES)


def copy(source: ObjectPath, path: ObjectPath) -> None:
    """The same bytes under another name, without fetching them. Raises StorageError."""
    import obstore

    file_operation("link", path)
    with _asking(path, _WRITTEN):
        obstore.copy(_client(path.bucket), source.key, path.key)


def remove(path: ObjectPath) -> None:
    """Remove an object if it is there. Raises StorageError."""
    import obstore

    file_operation("unlink", path)
    with contextlib.suppress(FileNotFoundError), _asking(path, "cannot be removed"):
        obstore.delete(_client(path.bucket), path.key)


def list_facts(path: ObjectPath) -> dict[str, ObjectFacts | None]:
    """What lies directly below a name; None for what has something below itself. Raises StorageError."""
    import obstore

    with _asking(path, "cannot be listed"):
        found = obstore.list_with_delimiter(_client(path.bucket), path.key or None)
    names: dict[str, ObjectFacts | None] = {
        prefix.rstrip("/").rpartition("/")[2]: None for prefix in found["common_prefixes"]
    }
    for item in found["objects"]:
        names[item["path"].rpartition("/")[2]] = ObjectFacts(item["size"], item["last_modified"].timestamp())
    return names


def facts(path: ObjectPath) -> ObjectFacts:
    """Size and time of an object. Raises FileNotFoundError, StorageError."""
    import obstore

    with _asking(path, "cannot be looked at"):
        found = obstore.head(_client(path.bucket), path.key)
    return ObjectFacts(found["size"], found["last_modified"].timestamp())


def is_directory(path: ObjectPath) -> bool:
    """Whether anything lies below a name. Raises StorageError."""
    import obstore

    with _asking(path, "cannot be listed"):
        pages = obstore.list(_client(path.bucket), f"{path.key}/" if path.key else None, chunk_size=50)
        return bool(next(iter(pages), []))
