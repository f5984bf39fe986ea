"""How large the record of a snapshot will be: one that nobody could read back is refused before it is begun.

Not:     the last bytes of it (which files, what is suspect): the agent finds those too large, and gives up.
Holds:   what would fit is never refused. What stays of a state costs nothing here (`Flat.text`, `Plan.leaves_text`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from stepwell.errors import StateError
from stepwell.handover.message import Encoded
from stepwell.storage.format import document
from stepwell.storage.format.checksum import BLOCK_BYTES
from stepwell.training.snapshot.layout import Plan
from stepwell.training.state.flatten import Flat

_DIGEST_BYTES: Final = 19
"""Of each block: its checksum in quotes, and a comma."""
_MOST_DEPTH: Final = 20
_LOOKED_AT: Final = 1000
_PLAIN_BYTES: Final = 12
_CONTAINERS: Final = (dict, list)
_OF_PAIRS: Final = ("$dict", "$ordered", "$counter", "$state_dict", "$defaultdict")
_PLACES: Final = {"$state_dict": 0, "$deque": 0, "$defaultdict": 1, "$namedtuple": 2}
"""Where the items are, in what a tag stands before."""


def check_size(tree: Encoded, flat: Flat, plan: Plan) -> None:
    """Raise StateError, with what takes the most and what to do, if the record of a state is too large."""
    values, leaves = len(tree.text), len(plan.leaves_text)
    total = values + leaves + (plan.live.nbytes + plan.frozen_bytes) // BLOCK_BYTES * _DIGEST_BYTES
    limit = document.MAX_DOCUMENT_BYTES
    if total <= limit:
        return
    if values > leaves:
        path, count = heaviest(flat.tree)
        what = f"{path} holds {count} plain values or letters; store it as a tensor or array instead of a list"
    else:
        path, count = _fullest(flat)
        what = f"{path} has {count} tensors; store many small ones as one tensor"
    raise StateError(
        f"this state cannot be saved: {what}. Plain values and the names of tensors may take {_size(limit)} of a "
        f"checkpoint, these take {_size(total)}",
        path=path,
        expected=limit,
        found=total,
    )


def heaviest(tree: Any) -> tuple[str, int]:
    """The path of the smallest part of a typed tree that still takes most of it, and how many items that has."""
    path: list[str] = []
    while len(path) < _MOST_DEPTH:
        children = [(_weight(child), name, child) for name, child in _children(tree)]
        largest = max(children, key=lambda item: item[0], default=None)
        if largest is None or 2 * largest[0] < _weight(tree):
            break
        tree = largest[2]
        path.append(largest[1])
    items = _payload(tree)
    return "/".join(path), len(items) if isinstance(items, list | dict | str) else 1


def _weight(tree: Any, depth: int = 0) -> float:
    """About how long a value is as JSON: of what is long a few items are looked at."""
    if isinstance(tree, str):
        return len(tree)
    if not isinstance(tree, list | dict) or not tree or depth > _MOST_DEPTH:
        return _PLAIN_BYTES
    items = tree if isinstance(tree, list) else list(tree.values())
    some = items[:: -(-len(items) // _LOOKED_AT)]
    names = 0 if isinstance(tree, list) else _PLAIN_BYTES * len(items)
    return names + len(items) * sum(_weight(item, depth + 1) for item in some) / len(some)


def _payload(tree: Any) -> Any:
    """What is behind the tag of a value."""
    if isinstance(tree, dict) and len(tree) == 1 and (tag := next(iter(tree))).startswith("$"):
        payload = tree[tag]
        place = _PLACES.get(tag)
        return payload if place is None or not isinstance(payload, list) else payload[place]
    return tree


def _children(tree: Any) -> list[tuple[str, Any]]:
    """The parts of a value that have a path of their own: not single numbers of a list."""
    tag = next(iter(tree), "") if isinstance(tree, dict) and len(tree) == 1 else ""
    payload = _payload(tree)
    if isinstance(payload, dict):
        return list(payload.items())
    if not isinstance(payload, list):
        return []
    if tag in _OF_PAIRS:
        return [(str(key), item) for key, item in payload]
    return [(str(number), item) for number, item in enumerate(payload) if type(item) in _CONTAINERS]


def _fullest(flat: Flat) -> tuple[str, int]:
    """The path under which most leaves lie, and how many these are."""
    path: tuple[str, ...] = ()
    count = len(flat.leaves)
    for depth in range(1, _MOST_DEPTH):
        below = Counter(leaf.path[:depth] for leaf in flat.leaves if leaf.path[: depth - 1] == path)
        found, most = below.most_common(1)[0]
        if 2 * most < count or most < 2:
            break
        path, count = found, most
    return "/".join(path), count


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes} bytes"
