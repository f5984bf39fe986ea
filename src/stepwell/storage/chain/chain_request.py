"""What a user wants of a chain, as it travels to the agent.

Holds:   `load(dump(deltas))` equals `deltas`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stepwell.storage.codecs.assignment import Deltas
from stepwell.storage.codecs.codec_spec import Spec, parse


def dump(deltas: Deltas) -> dict[str, Any]:
    """Codecs by their texts, everything else as it is."""
    values = {field.name: getattr(deltas, field.name) for field in fields(deltas)}
    return {name: value.text if isinstance(value, Spec) else value for name, value in values.items()}


def load(message: dict[str, Any]) -> Deltas:
    """Back again."""
    usual = Deltas()
    values: dict[str, Any] = {
        name: parse(value) if isinstance(getattr(usual, name), Spec) else value for name, value in message.items()
    }
    return Deltas(**values)
