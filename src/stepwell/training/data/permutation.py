"""The order of an epoch as a function: which sample comes at which position, for any number of samples, without a list.

Owns:    the order `ORDER`: a keyed bijection of [0, count), computed at any position, in both directions.
Holds:   the same (seed, epoch, count) gives the same order on every machine and with every library: whole numbers
         modulo 2**32, keys from blake2b. A position in the middle costs what the first one costs.

Many samples: a Feistel network of six rounds on an a x b grid that is hardly larger than the count; what falls outside
is sent through again. Few samples (where such networks are poor): sorted by a keyed hash.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import torch

from stepwell.errors import DataError

ORDER: Final = "feistel6/1"
"""Names the order in a checkpoint: it changes when a single position would."""
MOST: Final = 1 << 60
_SORTED: Final = 1 << 16
_ROUNDS: Final = 6
_LOW: Final = (1 << 32) - 1
_UPPER: Final = (1 << 17) - 1
"""What a shift by 15 leaves of 32 bits, whatever their sign."""
_FACTORS: Final = (0x7FEB352D, 0x5851F42D, 0x4C957F2D)
"""Odd and below 2**31."""

_Key = tuple[int, ...]


class Permutation:
    """The order of one epoch over `count` samples."""

    def __init__(self, count: int, *, seed: int, epoch: int) -> None:
        if not 0 <= count <= MOST:
            raise DataError(f"an order over {count} samples; there may be 0 to 2**60")
        self.count = count
        self._keys = [_key(seed, epoch, count, number) for number in range(_ROUNDS)]
        self._a = math.isqrt(max(0, count - 1)) + 1
        self._b = -(-count // self._a)
        self._sorted: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        if count <= _SORTED:
            hashes = _mix(torch.arange(count), self._keys[0]) ^ _mix(torch.arange(count), self._keys[1])
            self._sorted = torch.argsort(hashes, stable=True)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The samples at these positions (int64, each in [0, count))."""
        if self._sorted is not None:
            return self._sorted[positions]
        values = self._forth(positions)
        for place in (values >= self.count).nonzero().reshape(-1).tolist():  # a few: one by one is faster than again
            value = int(values[place])
            while value >= self.count:
                value = self._step(value)
            values[place] = value
        return values

    def find(self, samples: torch.Tensor) -> torch.Tensor:
        """The positions of these samples: the inverse of `at`."""
        if self._sorted is None:
            return self._walk_back(samples)
        if self._inverse is None:
            self._inverse = torch.argsort(self._sorted)
        return self._inverse[samples]

    def _step(self, value: int) -> int:
        """`_forth` of one number."""
        x, y = divmod(value, self._b)
        for number, key in enumerate(self._keys):
            if number % 2:
                y = (_mix_one(x, key) + y) % self._b
            else:
                x = (_mix_one(y, key) + x) % self._a
        return x * self._b + y

    def _walk_back(self, values: torch.Tensor) -> torch.Tensor:
        values = self._back(values)
        outside = values >= self.count
        while bool(outside.any()):
            values[outside] = self._back(values[outside])
            outside = values >= self.count
        return values

    def _forth(self, values: torch.Tensor) -> torch.Tensor:
        x, y = values // self._b, values % self._b
        for number, key in enumerate(self._keys):
            if number % 2:
                y = _mix(x, key).add_(y).remainder_(self._b)
            else:
                x = _mix(y, key).add_(x).remainder_(self._a)
        return x.mul_(self._b).add_(y)

    def _back(self, values: torch.Tensor) -> torch.Tensor:
        x, y = values // self._b, values % self._b
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                y = (y - _mix(x, key)) % self._b
            else:
                x = (x - _mix(y, key)) % self._a
        return x * self._b + y


def _key(seed: int, epoch: int, count: int, number: int) -> _Key:
    """Hashed, so that neighbouring seeds and epochs share nothing: eight numbers of 32 bits, the highest their sign."""
    text = f"stepwell.order/{ORDER}:{seed}:{epoch}:{count}:{number}".encode()
    digest = hashlib.blake2b(text, digest_size=32).digest()
    return tuple(int.from_bytes(digest[at : at + 4], "little", signed=True) for at in range(0, 32, 4))


def _mix(values: torch.Tensor, key: _Key) -> torch.Tensor:
    """61 bits for each value, which is below 2**31."""
    small = values.to(torch.int32)
    return _scramble(small, key[:4]).bitwise_left_shift_(29).bitwise_xor_(_scramble(small, key[4:]))


def _mix_one(value: int, key: _Key) -> int:
    """`_mix` of one number."""
    halves = []
    for part in (key[:4], key[4:]):
        half = (value ^ part[0]) & _LOW
        for word, factor in zip(part[1:], _FACTORS, strict=True):
            half = (half * factor) & _LOW
            half ^= (half >> 15) ^ (word & _LOW)
        halves.append(half)
    return halves[0] << 29 ^ halves[1]


def _scramble(values: torch.Tensor, key: _Key) -> torch.Tensor:
    """32 bits for each value: multiplied and folded three times, with a part of the key before each.

    Numbers of 32 bits that wrap around: a machine does eight of them at once, and half as many bytes are moved.
    """
    values = values ^ key[0]  # a copy, which the rest changes in place
    for part, factor in zip(key[1:], _FACTORS, strict=True):
        values.mul_(factor)
        values.bitwise_xor_((values >> 15).bitwise_and_(_UPPER)).bitwise_xor_(part)
    return values.to(torch.int64).bitwise_and_(_LOW)
