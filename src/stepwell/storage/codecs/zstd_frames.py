"""zstd over packed symbols or shuffled bytes, with the size that is expected known beforehand.

Owns:    parameters of the compressor, and dictionaries for records that are very small.
Holds:   nothing is allocated on the word of a frame: the caller says how many bytes it has to give, or how many at
         most, and then room grows with what is read.

Packed symbols have hardly any repeats to find but uneven bytes, so they get zstd's fastest search with a tiny table: it
measured smaller and faster than level 1. Negative levels would leave out the entropy code, which is all that matters.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO, Final

from stepwell.errors import ConfigError, DamagedError

if TYPE_CHECKING:
    from types import ModuleType

    from zstandard import ZstdCompressionDict

MOST_DICTIONARY_BYTES: Final = 1 << 16
_WINDOW_NBYTES: Final = 1 << 23
"""The most a frame may ask for to look back; levels below 19 stay within it."""
_STRETCH_NBYTES: Final = 1 << 20
_LARGE_NBYTES: Final = 4 << 20
"""From here on threads are worth it. A frame has the same bytes whatever their number, as long as there are any."""


def compress(data: bytes | bytearray | memoryview, *, level: int = 0, dictionary: bytes = b"") -> bytes:
    """One frame. Level 0: for packed symbols."""
    zstd = _zstd()
    trained = _dictionary(dictionary)
    if level:
        return bytes(zstd.ZstdCompressor(level=level, dict_data=trained).compress(data))
    parameters = zstd.ZstdCompressionParameters(
        strategy=zstd.STRATEGY_FAST, window_log=20, hash_log=6, min_match=7, write_dict_id=False,
        threads=_threads() if len(data) > _LARGE_NBYTES else 0,
    )  # fmt: skip
    return bytes(zstd.ZstdCompressor(compression_params=parameters, dict_data=trained).compress(data))


def decompress(data: bytes | memoryview, nbytes: int, *, dictionary: bytes = b"") -> bytes:
    """The content of one frame, which has to have `nbytes`. Raises DamagedError."""
    zstd = _zstd()
    try:
        if zstd.frame_content_size(data) != nbytes:
            raise DamagedError(f"a frame does not hold {nbytes} bytes", expected=nbytes)
        found = bytes(zstd.ZstdDecompressor(dict_data=_dictionary(dictionary)).decompress(data, nbytes))
    except zstd.ZstdError as error:
        raise DamagedError(f"a frame cannot be read: {error}") from None
    if len(found) != nbytes:
        raise DamagedError(f"a frame holds {len(found)} bytes, not {nbytes}", expected=nbytes, found=len(found))
    return found


class ZstdFrame:
    """The content of one frame, which has to have `nbytes`, from front to end. Raises DamagedError, when made too."""

    def __init__(self, data: bytes | memoryview, nbytes: int, *, dictionary: bytes = b"") -> None:
        zstd = _zstd()
        self.left, self._error = nbytes, zstd.ZstdError
        try:
            if zstd.frame_content_size(data) != nbytes:
                raise DamagedError(f"a frame does not hold {nbytes} bytes", expected=nbytes)
            trained = _dictionary(dictionary)
            reader = zstd.ZstdDecompressor(dict_data=trained, max_window_size=_WINDOW_NBYTES).stream_reader(data)
        except zstd.ZstdError as error:
            raise DamagedError(f"a frame cannot be read: {error}") from None
        self._reader: BinaryIO = reader

    def fill(self, room: memoryview) -> None:
        """The next bytes."""
        try:
            while room:
                found = self._reader.readinto(room)  # type: ignore[attr-defined]
                if not found:
                    raise DamagedError(f"a frame ends {len(room)} bytes too early", expected=len(room))
                self.left, room = self.left - found, room[found:]
            if not self.left and self._reader.read(1):
                raise DamagedError("a frame holds more bytes than it says")
        except self._error as error:
            raise DamagedError(f"a frame cannot be read: {error}") from None


def content_nbytes(data: bytes | memoryview, most: int) -> int:
    """How many bytes a frame says that it holds. Raises DamagedError if that is more than `most`, or is not said."""
    zstd = _zstd()
    try:
        found = int(zstd.frame_content_size(data))
    except zstd.ZstdError as error:
        raise DamagedError(f"a frame cannot be read: {error}") from None
    if not 0 <= found <= most:
        raise DamagedError(f"a frame of {found} bytes, at most {most} were expected", expected=most, found=found)
    return found


def decompress_at_most(data: bytes | memoryview, most: int) -> bytes:
    """The content of one frame, which has at most so many bytes. Raises DamagedError."""
    zstd = _zstd()
    found = bytearray()
    try:
        reader = zstd.ZstdDecompressor(max_window_size=_WINDOW_NBYTES).stream_reader(data)
        while len(found) <= most and (piece := reader.read(_STRETCH_NBYTES)):
            found += piece
        if len(found) > most or len(found) != zstd.frame_content_size(data):
            raise DamagedError(f"a frame is cut off or holds more than {most} bytes", expected=most, found=len(found))
    except zstd.ZstdError as error:
        raise DamagedError(f"a frame cannot be read: {error}") from None
    return bytes(found)


def train(samples: list[bytes], nbytes: int) -> bytes:
    """A dictionary (code tables included) from payloads like those to come; empty where zstd finds too little."""
    zstd = _zstd()
    try:
        return bytes(zstd.train_dictionary(nbytes, samples).as_bytes())
    except zstd.ZstdError:
        return b""


def _threads() -> int:
    """Half of the cores. They are as polite as the thread that compresses: training comes first."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _dictionary(data: bytes) -> ZstdCompressionDict | None:
    return _zstd().ZstdCompressionDict(data) if data else None


def check_installed() -> None:
    """Raise ConfigError where the package is not there."""
    _zstd()


def _zstd() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "this codec needs zstandard, which is not installed: pip install stepwell[codecs]", missing="zstandard"
        ) from error
    return zstandard
