"""A typed tree in plainer types: only what `torch.load(weights_only=True)` gives back on a machine without our code.

Owns:    what each type becomes that the stock loader refuses.
Holds:   no value is lost; every change of type is listed with its path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from stepwell.errors import StepwellError
from stepwell.storage.format import tree
from stepwell.tools.interchange.outline import damage_if_malformed, key_text, numpy_scalar, tagged

_COMPLEX: Final = {"<c8": "complex64", "<c16": "complex128"}
_PLAIN_NUMPY: Final = {"<f2", "<f4", "<f8", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "|i1", "|u1", "|b1"}
_MOST_NAMED: Final = 3
_LONGEST_INT: Final = 2 * 250
"""Hex digits of the largest whole number that the stock loader reads: 255 bytes, less sign and prefix."""


@dataclass(frozen=True)
class ArrayLeaf:
    """An array that becomes a tensor: its leaf, and type and shape where the leaf holds only bytes."""

    leaf: str
    shape: tuple[int, ...] | None
    dtype: str | None


@dataclass
class Plain:
    """The tree, the arrays it refers to under names of their own, and what was changed."""

    encoded: Any = None
    arrays: dict[str, ArrayLeaf] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    keeps_arrays: bool = False


def simplify(encoded: Any, *, keep_arrays: bool = False) -> Plain:
    """Rewrite a typed tree. Raises DamagedError if it is not of its form. `keep_arrays`: numpy's stay as they are."""
    plain = Plain(keeps_arrays=keep_arrays)
    with damage_if_malformed():
        plain.encoded = _simplify(encoded, (), plain)
    return plain


def _simplify(value: Any, path: tree.Path, plain: Plain, *, is_key: bool = False) -> Any:
    """`is_key`: the result must be hashable, which a set is not."""
    if isinstance(value, list):
        return [_simplify(item, (*path, str(i)), plain) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tag, payload = tagged(value)
    if not tag.startswith("$"):
        return {key: _simplify(item, (*path, key), plain) for key, item in value.items()}

    def each(items: Any) -> list[Any]:
        hashable = is_key or tag in ("$set", "$frozenset")
        return [_simplify(item, (*path, str(i)), plain, is_key=hashable) for i, item in enumerate(items)]

    def pairs(items: Any) -> list[Any]:
        return [
            [_simplify(key, path, plain, is_key=True), _simplify(item, (*path, key_text(key)), plain)]
            for key, item in items
        ]

    def became(what: str, result: Any) -> Any:
        plain.changes.append(f"{tree.show(path)}: {tag[1:]} -> {what}")
        return result

    if tag in ("$tuple", "$set"):
        return {tag: each(payload)}
    if tag in ("$dict", "$ordered", "$counter"):
        return {tag: pairs(payload)}
    if tag == "$state_dict":
        return {tag: [pairs(payload[0]), _simplify(payload[1], (*path, "_metadata"), plain)]}
    if tag == "$frozenset":
        return became("tuple", {"$tuple": each(payload)}) if is_key else became("set", {"$set": each(payload)})
    if tag == "$deque":
        return became("list", each(payload[0]))
    if tag == "$defaultdict":
        return became("dict", {"$dict": pairs(payload[1])})
    if tag == "$namedtuple":
        return became("tuple", {"$tuple": each(payload[2])})
    if tag in ("$range", "$slice"):
        return became("tuple", {"$tuple": each(payload)})
    if tag == "$enum":
        return became("str", f"{payload[1]}.{payload[2]}")
    if tag == "$flag":
        return became("int", payload[2])
    if tag == "$npscalar":
        number = numpy_scalar(payload)
        return became(type(number).__name__, tree.encode(number, path, _nothing))
    if tag in ("$npstr", "$npbytes"):
        plainer = payload if tag == "$npstr" else {"$bytes": payload}
        return became(tag[3:], _simplify(plainer, path, plain, is_key=is_key))
    if tag == "$int" and len(payload) > _LONGEST_INT:
        return became("str", payload)
    if tag == "$bytes" and not payload:  # the one bytes object that the stock loader refuses
        return became("str", "") if is_key else became("bytearray", {"$bytearray": ""})
    if tag == "$ndarray" and not plain.keeps_arrays:
        return became("tensor", _array(payload, plain))
    return value


def change_notes(plain: Plain) -> list[str]:
    """What a person has to know of the changes."""
    if not plain.changes:
        return []
    some = ", ".join(plain.changes[:_MOST_NAMED])
    more = len(plain.changes) - _MOST_NAMED
    return [
        "written in plainer types, so that torch.load(weights_only=True) reads them: "
        + (f"{some} and {more} more" if more > 0 else some)
    ]


def _nothing(value: Any, path: tree.Path) -> Any:
    raise StepwellError(f"{tree.show(path)}: {type(value).__name__} cannot be written")


def _array(payload: Any, plain: Plain) -> Any:
    """Numbers that torch has keep type and shape; others (dates, text, other byte orders) stay bytes."""
    leaf, dtype, shape = payload["leaf"], payload["dtype"], tuple(payload["shape"])
    known = dtype in _PLAIN_NUMPY or dtype in _COMPLEX
    name = f"array/{len(plain.arrays)}/{leaf}"
    plain.arrays[name] = ArrayLeaf(leaf, shape if known else None, _COMPLEX.get(dtype))
    return {"$tensor": name}
