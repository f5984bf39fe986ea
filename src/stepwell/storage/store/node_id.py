"""Who a node is: an id in its cache directory, which neither host names nor ranks change.

Holds:   made once and exclusively; several processes that ask at once get the same one.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.store import files

NODE: Final = "stepwell.node/1"
_ID: Final = re.compile(r"[0-9a-f]{16}")
_MAX_BYTES: Final = 4096


def node_id(root: Path) -> str:
    """The id of the node whose cache this is; drawn at the first call. Raises OSError or DamagedError."""
    path = root / "node.json"
    if not files.exists(path):
        os.makedirs(root, 0o700, exist_ok=True)
        files.put_new(path, seal({"format": NODE, "id": os.urandom(8).hex()}), point="node")
    found = Fields(unseal(files.get(path, limit=_MAX_BYTES), path=str(path), kind=NODE), path=str(path)).text("id")
    if not _ID.fullmatch(found):
        raise DamagedError(f"{path}: {found!r} is no id; remove the file, and the caches beside it", path=str(path))
    return found


def renew(root: Path) -> str:
    """Another id for this node, since somebody else has its own. One that cannot be written holds for this start."""
    fresh = os.urandom(8).hex()
    with contextlib.suppress(OSError):
        files.put(root / "node.json", seal({"format": NODE, "id": fresh}), point="node.new")
    return fresh
