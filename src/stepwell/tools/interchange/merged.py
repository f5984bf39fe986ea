"""One tree for a checkpoint of many ranks, also where each rank has other parts of the state: stages of a pipeline.

Holds:   the tree is that of the rank that `Whole` looks at; to it comes what only others name, in the order of the
         ranks. What is another rank's own is left out, since it would stand beside this rank's.
"""

from __future__ import annotations

from typing import Any, Final

from stepwell.errors import ConfigError, DamagedError
from stepwell.restore.whole import Whole
from stepwell.tools.interchange.outline import damage_if_malformed, outline, tagged

_PAIRS: Final = ("$dict", "$ordered", "$counter")
_NOTHING: Final = object()


def tree_of(whole: Whole) -> Any:
    """The typed tree of all ranks. Raises DamagedError."""
    tree = whole.record.tree
    if not isinstance(tree, dict):
        raise DamagedError(f"{whole.record.id}: the tree of values is no object")
    if whole.is_single:
        return tree
    missing = whole.leaves.keys() - _leaves(tree)
    for part in whole.parts:
        if missing and part.record is not whole.record and missing & _leaves(part.record.tree):
            with damage_if_malformed():
                tree = _merge(tree, part.record.tree, missing)
            missing -= _leaves(tree)
    return tree


def part(whole: Whole, only: str | None) -> Any:
    """The typed tree of a checkpoint, or of one tracked object in it. Raises ConfigError naming those there are."""
    tree = tree_of(whole)
    if only is None:
        return tree
    if only not in tree:
        raise ConfigError(f"{whole.record.id} has no {only!r}; it has {', '.join(tree)}", found=only)
    return tree[only]


def _leaves(tree: Any) -> set[str]:
    return {leaf for _, leaf in outline(tree).leaves()}


def _merge(mine: Any, theirs: Any, missing: set[str]) -> Any:
    """`mine`, and of `theirs` what leads to a leaf that is missing."""
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return mine
    tag, payload = tagged(mine)
    other, items = tagged(theirs)
    if not tag.startswith("$") and not other.startswith("$"):
        return dict(_merge_pairs(list(mine.items()), list(theirs.items()), missing))
    if tag != other:
        return mine
    if tag in _PAIRS:
        return {tag: _merge_pairs(payload, items, missing)}
    if tag == "$state_dict":
        return {tag: [_merge_pairs(payload[0], items[0], missing), payload[1]]}
    return mine


def _merge_pairs(mine: list[Any], theirs: list[Any], missing: set[str]) -> list[Any]:
    found = [[key, item] for key, item in mine]
    places = {repr(key): number for number, (key, _) in enumerate(found)}
    for key, item in theirs:
        number = places.get(repr(key))
        if number is not None:
            found[number][1] = _merge(found[number][1], item, missing)
        elif (kept := _only_missing(item, missing)) is not _NOTHING:
            found.append([key, kept])
    return found


def _only_missing(item: Any, missing: set[str]) -> Any:
    """A part of another rank's tree, if all its leaves are missing in ours; it has some."""
    leaves = _leaves(item)
    return item if leaves and leaves <= missing else _NOTHING
