"""Plain values as typed JSON: what goes in comes out with its types, and no code runs.

Owns:    the encoding of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict,
         OrderedDict, Counter, defaultdict, named tuples, enums, flags, ranges and slices. Tensors and arrays are
         handed to `extern` by the state package.
Holds:   a value that cannot be represented, or could not be found again, is refused with its path; a decoded class
         is looked up only in modules that are already imported, never imported and never computed.

Encoding: JSON scalars and lists stand for themselves; a dict with plain string keys stands for itself; everything
else is an object with one key that starts with `$`. `docs/format.md` lists the tags.
"""

from __future__ import annotations

import base64
import enum
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from stepwell.errors import DamagedError, StateError

Path = tuple[str, ...]
Extern = Callable[[Any, Path], Any]
"""Encodes a value the format does not know; returns NotImplemented to refuse it."""
Intern = Callable[[str, Any], Any]
"""Decodes a `$tag` the format does not know; returns NotImplemented to refuse it."""

MAX_DEPTH: Final = 100
"""Of containers in containers. Decoding takes four frames of Python's stack a level, and must not run out of them."""
_JSON_INT: Final = 1 << 63
_FACTORIES: Final = {kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple)}


def show(path: Path) -> str:
    """A path in the tree for people: `optimizer/state/0/exp_avg`."""
    return "/".join(path) or "(root)"


def encode(value: Any, path: Path, extern: Extern) -> Any:
    """Typed JSON for `value`. Raises StateError with the path of what cannot be represented."""
    try:
        return _encode(value, path, extern)
    except RecursionError:
        raise StateError(
            f"{show(path)}: nested too deeply for what is left of Python's stack", path=show(path)
        ) from None


def _encode(value: Any, path: Path, extern: Extern) -> Any:
    if len(path) > MAX_DEPTH:
        raise StateError(f"{show(path[:8])}/...: nested deeper than {MAX_DEPTH}, or containing itself", path=show(path))
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if _is_text(value) else {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    if kind is int:
        return value if -_JSON_INT <= value < _JSON_INT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return _encode_dict(value, path, extern)
    if kind is list:
        return _encode_items(value, path, extern)
    if kind is tuple:
        return {"$tuple": _encode_items(value, path, extern)}
    if kind is bytes or kind is bytearray:
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if kind is set or kind is frozenset:
        items = [_encode(item, (*path, "{}"), extern) for item in value]
        return {f"${kind.__name__}": sorted(items, key=repr)}
    if kind is deque:
        return {"$deque": [[_encode(item, (*path, str(i)), extern) for i, item in enumerate(value)], value.maxlen]}
    if kind is range or kind is slice:
        return {f"${kind.__name__}": [_encode(n, path, extern) for n in (value.start, value.stop, value.step)]}
    if isinstance(value, enum.Enum):
        return _encode_enum(value, path, extern)
    encoded = extern(value, path)
    if encoded is not NotImplemented:
        return encoded
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        _check_class(kind, path)
        items = [_encode(item, (*path, name), extern) for name, item in zip(kind._fields, value, strict=True)]
        return {"$namedtuple": [kind.__module__, kind.__qualname__, items]}
    raise StateError(
        f"{show(path)}: a value of type {kind.__module__}.{kind.__qualname__} cannot be stored without pickle; "
        "give it state_dict/load_state_dict and track it, or turn it into plain values",
        path=show(path),
        found=kind.__qualname__,
    )


def _encode_items(value: Iterable[Any], path: Path, extern: Extern) -> list[Any]:
    """Numbers come by the million (parameters, generators, losses): what stands for itself is not looked at further."""
    isfinite = math.isfinite
    return [
        item
        if (type(item) is int and -_JSON_INT <= item < _JSON_INT) or (type(item) is float and isfinite(item))
        else _encode(item, (*path, str(i)), extern)
        for i, item in enumerate(value)
    ]


def _encode_enum(value: enum.Enum, path: Path, extern: Extern) -> Any:
    """A member by its name; a flag, which may be several members at once, by its value."""
    kind = type(value)
    _check_class(kind, path)
    if isinstance(value, enum.Flag):
        return {"$flag": [kind.__module__, kind.__qualname__, _encode(value.value, path, extern)]}
    return {"$enum": [kind.__module__, kind.__qualname__, value.name]}


def _check_class(kind: type, path: Path) -> None:
    """Refuse a class now that a restart would not find: one made in a function, or hidden behind another."""
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        raise StateError(
            f"{show(path)}: {kind.__module__}.{kind.__qualname__} cannot be found by that name; define it at the top "
            "level of a module",
            path=show(path),
            found=kind.__qualname__,
        )


def _is_text(value: str) -> bool:
    """Whether JSON gives it back unchanged: lone surrogates would be joined into other characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part(key: Any) -> str:
    """A key as a part of a path. Python refuses to print integers of thousands of digits."""
    try:
        return str(key)
    except ValueError:
        return f"<{type(key).__name__}>"


def _encode_dict(value: dict[Any, Any], path: Path, extern: Extern) -> Any:
    extra = getattr(value, "_metadata", None)
    plain = type(value) is dict and all(type(key) is str and key[:1] != "$" and _is_text(key) for key in value)
    if plain:
        return {key: _encode(item, (*path, key), extern) for key, item in value.items()}
    items = [
        [_encode(key, (*path, f"key {_part(key)}"), extern), _encode(item, (*path, _part(key)), extern)]
        for key, item in value.items()
    ]
    if type(value) is dict or type(value) is Counter:
        return {"$dict" if type(value) is dict else "$counter": items}
    if isinstance(value, defaultdict):
        factory = value.default_factory
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise StateError(
                f"{show(path)}: a defaultdict with factory {factory!r} cannot be stored; use a plain dict",
                path=show(path),
            )
        return {"$defaultdict": [None if factory is None else factory.__name__, items]}
    if extra is None:
        return {"$ordered": items}
    return {"$state_dict": [items, _encode(extra, (*path, "_metadata"), extern)]}


def decode(value: Any, intern: Intern) -> Any:
    """The value behind typed JSON. Raises DamagedError for a tag that nobody knows."""
    try:
        return _decode(value, intern)
    except RecursionError:
        raise DamagedError("the tree of values is nested too deeply") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise DamagedError(f"the tree of values is not valid: {error}") from error


def _decode(value: Any, intern: Intern) -> Any:
    if isinstance(value, list):
        return [_decode(item, intern) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, payload = next(iter(value.items()))
        if tag.startswith("$"):
            return _decode_tag(tag, payload, intern)
    if any(key.startswith("$") for key in value):
        raise ValueError("a tag beside other keys")
    return {key: _decode(item, intern) for key, item in value.items()}


def _decode_tag(tag: str, payload: Any, intern: Intern) -> Any:
    def each(items: Any) -> list[Any]:
        return [_decode(item, intern) for item in items]

    def pairs(items: Any) -> dict[Any, Any]:
        found = {_decode(key, intern): _decode(item, intern) for key, item in items}
        if len(found) != len(items):
            raise ValueError("a key stands twice")
        return found

    if tag == "$int":
        return int(payload, 16)
    if tag == "$float" or tag == "$complex":
        return float(payload) if tag == "$float" else complex(float(payload[0]), float(payload[1]))
    if tag == "$str":
        return base64.b64decode(payload, validate=True).decode("utf-8", "surrogatepass")
    if tag == "$tuple":
        return tuple(each(payload))
    if tag == "$bytes" or tag == "$bytearray":
        data = base64.b64decode(payload, validate=True)
        return data if tag == "$bytes" else bytearray(data)
    if tag == "$set" or tag == "$frozenset":
        return set(each(payload)) if tag == "$set" else frozenset(each(payload))
    if tag == "$range" or tag == "$slice":
        return range(*each(payload)) if tag == "$range" else slice(*each(payload))
    if tag in ("$dict", "$ordered", "$counter"):
        return {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}[tag](pairs(payload))
    if tag == "$defaultdict":
        return defaultdict(None if payload[0] is None else _FACTORIES[payload[0]], pairs(payload[1]))
    if tag == "$deque":
        return deque(each(payload[0]), payload[1])
    if tag == "$state_dict":
        state = OrderedDict(pairs(payload[0]))
        state._metadata = _decode(payload[1], intern)  # type: ignore[attr-defined]
        return state
    if tag == "$enum":
        return _loaded_class(payload[0], payload[1], enum.Enum).__members__[payload[2]]
    if tag == "$flag":
        return _loaded_class(payload[0], payload[1], enum.Flag)(_decode(payload[2], intern))
    if tag == "$namedtuple":
        kind, items = _loaded_class(payload[0], payload[1], tuple), each(payload[2])
        if len(kind._fields) != len(items):
            raise DamagedError(f"named tuple {payload[1]} has {len(kind._fields)} fields, stored are {len(items)}")
        return tuple.__new__(kind, items)
    found = intern(tag, payload)
    if found is NotImplemented:
        raise DamagedError(f"value of unknown kind {tag!r}: written by a newer version?", found=tag)
    return found


def _find_class(module: str, qualname: str) -> Any:
    """What stands under that name in a module that is loaded. Importing it, or asking a module's `__getattr__`, would
    run code that a checkpoint named."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
    return found


def _loaded_class(module: str, qualname: str, base: type) -> Any:
    found = _find_class(module, qualname)
    if not isinstance(found, type) or not issubclass(found, base):
        raise StateError(
            f"{module}.{qualname} is needed to restore a value and is not loaded; import {module} before restore()",
            found=f"{module}.{qualname}",
        )
    return found
