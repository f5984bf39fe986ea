"""What a trainer asks of one snapshot, with what tests do not care about filled in."""

from __future__ import annotations

from typing import Any

from stepwell.types import SaveRequest


def request(step: int = 3, **changes: Any) -> SaveRequest:
    facts = {"repeat": 0, "created": 1.0, "tree": {}, "epoch_end": False, "finished": False, "name": None, "files": {}}
    return SaveRequest(step, **{**facts, **changes})
