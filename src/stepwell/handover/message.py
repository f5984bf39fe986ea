"""What a message is, how it becomes JSON, and how it comes back.

Owns:    both ways, the check of what arrives, and the base classes that say who says a message to whom.
Not:     which messages there are (protocol).
Holds:   what arrives is a message with all of its fields, no others, each of its type, or MessageError. What other
         modules own (trees, leaves, levels, deltas) is only known to be JSON.
         The form of a kind is looked up with its first message, not at import: an agent has to start fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from stepwell.errors import AgentError, ConfigError
from stepwell.types import SaveRequest, quick_dataclass

_MOST_SHOWN: Final = 40


class MessageError(AgentError):
    """The other end said what cannot be understood: `kind`, `field`, `found`, `expected`."""


@quick_dataclass(frozen=True)
class Encoded:
    """A value that is JSON already."""

    text: str


@quick_dataclass(frozen=True)
class Message:
    """One message. `kind` is what it is called in JSON; empty if it never travels."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        if kind:
            cls.kinds[kind] = cls


class ToAgent(Message):
    """The trainer says it."""


class ToTrainer(Message):
    """The agent says it."""


class FromClient(Message):
    """The trainer's end of the socket says it to the trainer itself; it never travels."""


class ToHolder(Message):
    """A process that restores says it, to an agent that may hold what it needs."""


class ToSuccessor(Message):
    """An agent answers it to that process."""


Heard = ToTrainer | FromClient
"""What a trainer hears of its agent."""
M = TypeVar("M", bound=Message)


def expect(message: Message, whose: type[M]) -> M:
    """The message, if it is one of those. Raises MessageError."""
    if isinstance(message, whose):
        return message
    raise MessageError(
        f"a message of kind {message.kind!r} came, expected is one {whose.__name__}",
        kind=message.kind,
        found=type(message).__name__,
        expected=whose.__name__,
    )


def encode(message: Message) -> str:
    """As JSON. What is JSON already comes last."""
    values = _named(message)
    ready = [name for name, value in values.items() if isinstance(value, Encoded)]
    texts = [f',"{name}":{values.pop(name).text}' for name in ready]
    return _JSON.encode(values)[:-1] + "".join(texts) + "}"


def _named(part: Any) -> dict[str, Any]:
    """Its values by the names they have in JSON, without those that are usual."""
    out = {"type": part.kind} if isinstance(part, Message) else {}
    given = vars(part)
    for entry in _form(type(part)):
        value = given[entry.name]
        if entry.is_beside:
            out |= _named(value)  # beside the others, as it always was
        elif entry.usual is MISSING or value != entry.usual:
            out[entry.name] = value
    return out


_JSON: Final = json.JSONEncoder(separators=(",", ":"), default=_named)


def decode(data: bytes | bytearray, kinds: Mapping[str, type[Message]]) -> Message:
    """The message behind JSON. Raises MessageError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message of {len(data)} bytes is not JSON: {error}", expected="JSON") from error
    if not isinstance(found, dict):
        raise _wrong("message", found, "an object")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        what = f"the unknown type {kind[:_MOST_SHOWN]!r}" if isinstance(kind, str) else "no type"
        expected = ", ".join(sorted(kinds))
        raise MessageError(f"a message has {what}, expected is one of {expected}", field="type", found=kind,
                           expected=expected)  # fmt: skip
    message: Message = _read(kinds[kind], found, kind)
    return message


def _read(cls: Any, found: Any, path: str) -> Any:
    """An object as that class."""
    if type(found) is not dict:
        raise _wrong(path, found, "an object")
    rest = dict(found)
    if issubclass(cls, Message) and (kind := rest.pop("type", None)) != cls.kind:
        raise _wrong(f"{path}.type", kind, cls.kind)
    made = _take(cls, rest, path)
    for name, value in rest.items():
        raise _wrong(f"{path}.{name[:_MOST_SHOWN]}", value, "no such field")
    return made


def _take(cls: Any, rest: dict[str, Any], path: str) -> Any:
    """The same, from values among which there may be others; its own are taken out."""
    values = {}
    for entry in _form(cls):
        if entry.is_beside:
            values[entry.name] = _take(SaveRequest, rest, path)
            continue
        value = rest.pop(entry.name, MISSING)
        if value is not MISSING:
            values[entry.name] = entry.read(value, f"{path}.{entry.name}")
        elif entry.usual is MISSING:
            raise _wrong(f"{path}.{entry.name}", MISSING, entry.expected)
    try:
        return cls(**values)
    except ConfigError as error:
        kind, _, field = path.partition(".")
        raise MessageError(f"{field} of {kind!r}: {error}", **{**error.fields, "kind": kind, "field": field}) from error


def _wrong(path: str, found: object, expected: str) -> MessageError:
    """Without the value, which may be a secret, or large."""
    kind, _, field = path.partition(".")
    what = "missing" if found is MISSING else f"of type {type(found).__name__}"
    return MessageError(
        f"a message cannot be understood: {field or 'all'} of {kind!r} is {what}, expected is {expected}",
        kind=kind,
        field=field,
        found=what,
        expected=expected,
    )


_PLAIN: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "Any": (),
    "dict[str, Any]": (dict,),
}
"""What JSON gives for a type; nothing: whatever it is."""
_Read = Callable[[Any, str], Any]


def _reader(text: str, owner: type) -> _Read:
    """What makes a value of the type with this name, in the module of `owner`, of what JSON gave."""
    if text.endswith(" | None"):
        some = _reader(text.removesuffix(" | None"), owner)
        return lambda value, path: None if value is None else some(value, path)
    if text in _PLAIN:
        types = _PLAIN[text]
        return lambda value, path: value if not types or type(value) in types else _refuse(path, value, text)
    if text.startswith("tuple["):
        item = _reader(text.removeprefix("tuple[").removesuffix(", ...]"), owner)
        return lambda value, path: (
            tuple(item(each, path) for each in value) if type(value) is list else _refuse(path, value, text)
        )
    if text == "dict[str, str]":
        return lambda value, path: value if _is_table(value) else _refuse(path, value, text)
    part = vars(sys.modules[owner.__module__])[text]
    return lambda value, path: _read(part, value, path)


def _refuse(path: str, found: object, expected: str) -> NoReturn:
    raise _wrong(path, found, expected)


def _is_table(value: object) -> bool:
    return type(value) is dict and all(type(each) is str for each in value.values())


@quick_dataclass(frozen=True)
class _Entry:
    """A field: its name, the name of its type, its default, and what reads it. is_beside: its own fields stand beside
    the others.
    """

    name: str
    expected: str
    usual: Any
    read: _Read
    is_beside: bool


_forms: Final[dict[type, tuple[_Entry, ...]]] = {}


def _form(cls: type) -> tuple[_Entry, ...]:
    """Its fields, looked up once."""
    if cls not in _forms:
        _forms[cls] = tuple(_entry(cls, each.name, str(each.type), each.default) for each in fields(cls))
    return _forms[cls]


def _entry(cls: type, name: str, text: str, usual: Any) -> _Entry:
    return _Entry(name, text, usual, _reader(text.removeprefix("Encoded | "), cls), text == SaveRequest.__name__)
