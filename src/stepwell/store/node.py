"""Who this node is: an id in a file of its cache directory, made once.

Holds:   the id never changes as long as the directory is there, and two processes that make it at the same time get the
         same one. It is not the host name (machines are renamed, and replaced under the same name) and not a rank.
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError
from stepwell.format.document import parse_json
from stepwell.store import files

NAME: Final = "node.json"
FORMAT: Final = "stepwell.node/1"
_ID: Final = re.compile(r"[0-9a-f]{32}")


def node_id(root: Path) -> str:
    """The id of the node whose cache directory this is. Raises OSError, and DamagedError if the file holds no id."""
    path = root / NAME
    if not files.exists(path):
        root.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "id": secrets.token_hex(16)}
        files.put_new(path, json.dumps(document).encode() + b"\n", point="node")
    document = parse_json(files.get(path), path=str(path))
    found = document.get("id") if isinstance(document, dict) and document.get("format") == FORMAT else None
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise DamagedError(f"{path}: holds no node id of {FORMAT}; remove it, and a new one is made", path=str(path))
    return found
