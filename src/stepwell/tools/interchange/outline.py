"""The tree of a record as nodes with paths: containers, tensors and plain values, without torch and without classes.

Owns:    what each tag of typed JSON contains, and how a plain value reads to a person.
Not:     giving Python objects back (format.tree with the state package).
Holds:   the order of the tree is kept; a forged tree that is too deep or not of its form is damage.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from stepwell.errors import DamagedError, StepwellError
from stepwell.storage.format import tree

METADATA: Final = "(metadata)"
"""Key under which a module's own notes on its state dict appear; nothing a person named."""
_SEQUENCES: Final = {"$tuple": "tuple", "$set": "set", "$frozenset": "frozenset"}
_MAPPINGS: Final = {"$dict": "dict", "$ordered": "OrderedDict", "$counter": "Counter"}
_MOST_CHARACTERS: Final = 60
_NUMPY: Final = {
    "b1": "?",
    "i1": "b",
    "u1": "B",
    "i2": "h",
    "u2": "H",
    "i4": "i",
    "u4": "I",
    "i8": "q",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "ff",
    "c16": "dd",
}
"""numpy's names of numbers and those of `struct`."""


@dataclass(frozen=True)
class OutlineNode:
    """One place in the state.

    kind:      list, dict, tuple ... for a container; tensor or array for a leaf; value for the rest
    children:  what a container holds, with the key of each
    leaf:      name of the leaf in the record, for a tensor or an array
    value:     typed JSON of a plain value; for tensors and arrays, what the tree says beside the leaf's name
    is_keyed:  whether the keys of the children are keys, and not positions
    key_kinds: types of the keys that are not text
    """

    kind: str
    children: list[tuple[str, OutlineNode]] = field(default_factory=list)
    leaf: str | None = None
    value: Any = None
    is_keyed: bool = False
    key_kinds: dict[str, str] = field(default_factory=dict)

    @property
    def is_container(self) -> bool:
        """Whether it may have children."""
        return self.leaf is None and self.kind != "value"

    def walk(self, path: tree.Path = ()) -> Iterator[tuple[tree.Path, OutlineNode]]:
        """This node and all below it, in order."""
        yield path, self
        for key, child in self.children:
            yield from child.walk((*path, key))

    def leaves(self, path: tree.Path = ()) -> Iterator[tuple[tree.Path, str]]:
        """Path and leaf name of every tensor and array. A tied one appears once for each of its paths."""
        for where, node in self.walk(path):
            if node.leaf is not None:
                yield where, node.leaf


def outline(encoded: Any) -> OutlineNode:
    """Nodes of a typed tree. Raises DamagedError."""
    with damage_if_malformed():
        return _node(encoded, 0)


@contextmanager
def damage_if_malformed() -> Iterator[None]:
    """What goes wrong while a tree is taken apart is the fault of the tree."""
    try:
        yield
    except RecursionError:
        raise DamagedError("the tree of values is nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        raise DamagedError(f"the tree of values is not valid: {error}") from error


def _node(value: Any, depth: int) -> OutlineNode:
    if depth > tree.MAX_DEPTH:
        raise DamagedError("the tree of values is nested too deeply")
    if isinstance(value, list):
        return _sequence("list", value, depth)
    if not isinstance(value, dict):
        return OutlineNode("value", value=value)
    tag, payload = tagged(value)
    if not tag.startswith("$"):
        return OutlineNode("dict", [(key, _node(item, depth + 1)) for key, item in value.items()], is_keyed=True)
    if tag in _SEQUENCES:
        return _sequence(_SEQUENCES[tag], payload, depth)
    if tag in _MAPPINGS:
        return _mapping(_MAPPINGS[tag], payload, depth)
    if tag == "$deque":
        return _sequence(f"deque(maxlen={payload[1]})", payload[0], depth)
    if tag == "$defaultdict":
        return _mapping(f"defaultdict({payload[0]})", payload[1], depth)
    if tag == "$namedtuple":
        return _sequence(f"{payload[0]}.{payload[1]}", payload[2], depth)
    if tag == "$state_dict":
        node = _mapping("OrderedDict", payload[0], depth)
        node.children.append((METADATA, _node(payload[1], depth + 1)))
        return node
    if tag in ("$tensor", "$ndarray"):
        name = payload if isinstance(payload, str) else payload["leaf"]
        if not isinstance(name, str):
            raise DamagedError("the tree of values refers to a leaf without a name")
        beside = None if isinstance(payload, str) else {key: payload[key] for key in payload if key != "leaf"}
        return OutlineNode("tensor" if tag == "$tensor" else "array", leaf=name, value=beside)
    return OutlineNode("value", value=value)


def tagged(value: dict[str, Any]) -> tuple[str, Any]:
    """Tag and payload of an encoded value; an object that is none has no tag that starts with `$`."""
    return next(iter(value.items())) if len(value) == 1 else ("", None)


def _sequence(kind: str, items: list[Any], depth: int) -> OutlineNode:
    return OutlineNode(kind, [(str(i), _node(item, depth + 1)) for i, item in enumerate(items)])


def _mapping(kind: str, pairs: list[Any], depth: int) -> OutlineNode:
    children: dict[str, OutlineNode] = {}
    key_kinds = {}
    for key, item in pairs:
        text = base = key_text(key)
        number = 1
        while text in children:  # the keys 1 and "1"
            number += 1
            text = f"{base}~{number}"
        children[text] = _node(item, depth + 1)
        if not isinstance(key, str):
            key_kinds[text] = tagged(key)[0][1:] if isinstance(key, dict) else type(key).__name__
    return OutlineNode(kind, list(children.items()), is_keyed=True, key_kinds=key_kinds)


def key_text(key: Any) -> str:
    """A dictionary key as it stands in a path: what `str` gives of the key itself, where that needs no class."""
    if isinstance(key, str):
        return key
    try:
        return str(tree.decode(key, _numpy_only))
    except StepwellError:
        return value_text(key)  # an enum or a named tuple: its class is not loaded here


def _numpy_only(tag: str, payload: Any) -> Any:
    if tag == "$npscalar":
        return numpy_scalar(payload)
    return tree.decode(payload, _numpy_only) if tag == "$npstr" else NotImplemented


def numpy_scalar(payload: Any) -> bool | int | float | complex | bytes:
    """The number behind a numpy scalar, without numpy; the bytes of one that is no number Python has."""
    kind, data = payload[0], base64.b64decode(payload[1])
    order, code = ("=" if kind[0] == "|" else kind[0]), _NUMPY.get(kind[1:])
    if code is None:
        return data
    numbers = struct.unpack(f"{order}{code}", data)
    return complex(*numbers) if len(numbers) == 2 else numbers[0]


def value_text(value: Any, limit: int = _MOST_CHARACTERS) -> str:
    """A plain value for a person, cut to `limit` characters."""
    with damage_if_malformed():
        text = _text(value)
    return text if len(text) <= limit else f"{text[: max(0, limit - 3)]}..."


def _text(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    if not isinstance(value, dict) or len(value) != 1:
        return str(value) if not isinstance(value, dict | list) else json.dumps(value)
    tag, payload = next(iter(value.items()))
    if tag in ("$bytes", "$bytearray"):
        return f"{tag[1:]} of {len(base64.b64decode(payload, validate=True))}"
    if tag == "$enum":
        return f"{payload[1]}.{payload[2]}"
    if tag == "$flag":
        return f"{payload[1]}({_text(payload[2])})"
    if tag == "$dtype":
        return f"torch.{payload}"
    if tag == "$device":
        return f"device {payload}"
    if tag == "$npscalar":
        return f"numpy {payload[0]} {numpy_scalar(payload)!r}"
    if tag in ("$npstr", "$npbytes"):
        return f"numpy {_text(payload if tag == '$npstr' else {'$bytes': payload})}"
    if tag in ("$range", "$slice", "$size"):
        return f"{tag[1:]}({', '.join(_text(item) for item in payload)})"
    try:
        return repr(tree.decode(value, lambda tag, payload: NotImplemented))
    except DamagedError:
        return json.dumps(value)


def summary(node: OutlineNode) -> str:
    """A container without tensors on one line: its values if they are few, else how many."""
    if not node.is_container:
        return value_text(node.value)
    inner = [f"{key}: {summary(child)}" if node.is_keyed else summary(child) for key, child in node.children]
    opening, closing = "{}" if node.is_keyed or "set" in node.kind else "()" if node.kind == "tuple" else "[]"
    text = f"{opening}{', '.join(inner)}{closing}"
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 20]}... ({len(node.children)} in all)"
