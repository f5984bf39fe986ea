"""Are two states the same, types and bits included? Returns the path of the first difference."""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy
import torch


def difference(found: Any, expected: Any, path: str = "") -> str | None:
    """None if equal with equal types, else where and how they differ."""
    if type(found) is not type(expected):
        return f"{path}: {type(found).__qualname__}, expected {type(expected).__qualname__}"
    if isinstance(expected, torch.Tensor):
        return _tensor(found, expected, path)
    if isinstance(expected, numpy.ndarray | numpy.generic):
        facts = [(value.dtype.str, value.shape, _array_bytes(value)) for value in (found, expected)]
        return None if facts[0] == facts[1] else f"{path}: {facts[0]}, expected {facts[1]}"
    if isinstance(expected, float | complex):
        return None if _bits(found) == _bits(expected) else f"{path}: {found!r}, expected {expected!r}"
    if isinstance(expected, dict):
        return _dict(found, expected, path)
    if isinstance(expected, list | tuple | deque):
        if isinstance(expected, deque) and found.maxlen != expected.maxlen:
            return f"{path}: maxlen {found.maxlen}, expected {expected.maxlen}"
        if len(found) != len(expected):
            return f"{path}: {len(found)} items, expected {len(expected)}"
        return _first(difference(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
    if isinstance(expected, set | frozenset):
        return difference(sorted(found, key=repr), sorted(expected, key=repr), path + "/{}")
    return None if found == expected else f"{path}: {found!r}, expected {expected!r}"


def _tensor(found: torch.Tensor, expected: torch.Tensor, path: str) -> str | None:
    for name in ("dtype", "shape", "device", "requires_grad", "layout"):
        if getattr(found, name) != getattr(expected, name):
            return f"{path}: {name} {getattr(found, name)}, expected {getattr(expected, name)}"
    return None if tensor_bytes(found) == tensor_bytes(expected) else f"{path}: other values"


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Its elements in order, whatever its strides and element type."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.numel():
        return b""
    if plain.element_size() == 1:
        plain = plain.view(torch.uint8)  # some types have no copy
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _array_bytes(value: Any) -> object:
    if value.dtype.kind == "f" and value.dtype.itemsize > 8:
        return value.tolist()  # a longdouble has six bytes of padding with anything in them
    return value.tobytes()


def _bits(value: float | complex) -> tuple[object, ...]:
    parts = (value,) if isinstance(value, float) else (value.real, value.imag)
    return tuple("nan" if part != part else struct.pack("<d", part) for part in parts)


def _dict(found: Any, expected: Any, path: str) -> str | None:
    if isinstance(expected, defaultdict) and found.default_factory is not expected.default_factory:
        return f"{path}: factory {found.default_factory}, expected {expected.default_factory}"
    if isinstance(expected, OrderedDict) and getattr(found, "_metadata", 0) != getattr(expected, "_metadata", 0):
        return f"{path}: other _metadata"
    keys = difference(list(found), list(expected), f"{path}/keys")  # in order
    if keys is not None:
        return keys
    pairs = zip(found.values(), expected.values(), strict=True)
    return _first(difference(a, b, f"{path}/value {i}") for i, (a, b) in enumerate(pairs))


def _first(results: Any) -> str | None:
    return next((result for result in results if result is not None), None)
