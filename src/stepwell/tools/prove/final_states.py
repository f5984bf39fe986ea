"""The final states of two runs.

Owns:    which checkpoint a run ended with, and how a difference reads when one run was killed and the other was not.
Not:     the comparison itself, byte for byte and value by value: `stepwell diff` has the same (interchange.compare).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError, RestoreError
from stepwell.restore.whole import Whole, parts_on_disk
from stepwell.storage.format.record import Record
from stepwell.storage.store import catalog
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.interchange.comparison import Change, compare

_OF_THE_SCRIPT = "stepwell/given/"
"""What the script set at its start says nothing of how training went."""
_VALUE: Final = "is not the same (value): "
_MOST_GROUPS: Final = 6
_MOST_VALUES: Final = 3
_OF_TENSORS: Final = ("bytes", "shape", "dtype", "strides", "tied")


@dataclass(frozen=True)
class LastCheckpoint:
    """What a run ended with."""

    whole: Whole

    @property
    def record(self) -> Record:
        """Rank 0's."""
        return self.whole.record


@dataclass(frozen=True)
class Difference:
    """One tensor or plain value that is not the same. `text` says how, as the end of a sentence on `path`."""

    path: str
    text: str
    is_tensor: bool

    @property
    def generator(self) -> str | None:
        """Name of the global random generator it belongs to, if it does: "python", "numpy", "torch", "cuda"."""
        parts = self.path.split("/")
        return parts[2].partition(" (rank ")[0] if parts[:2] == ["stepwell", "rng"] and len(parts) > 2 else None


@dataclass(frozen=True)
class StateComparison:
    """What was compared, and what differs: tensors first, in the order of the state."""

    step: int
    tensors: int
    nbytes: int
    values: int
    differences: list[Difference]


def grouped(differences: Sequence[Difference]) -> list[str]:
    """A line for each tracked object that differs: the first of its plain values, which tell the cause, then how many
    more. Objects with plain values come first, the run's own state before them, generators last.
    """
    groups: dict[str, list[Difference]] = {}
    for item in differences:
        groups.setdefault(item.path.partition("/")[0], []).append(item)
    plain = {name: [item for item in items if _is_plain(item)] for name, items in groups.items()}
    order = sorted(groups, key=lambda name: (not plain[name], name != "stepwell"))
    lines = []
    for name in order[:_MOST_GROUPS]:
        items = sorted(groups[name], key=lambda item: item not in plain[name])
        shown = [
            f"{item.path} {item.text.removeprefix(_VALUE)}" for item in items[: _MOST_VALUES if plain[name] else 1]
        ]
        more = len(items) - len(shown)
        lines.append("; ".join(shown) + (f"; and {more} more of {name}" if more else ""))
    rest = len(order) - len(lines)
    return lines + ([f"{rest} more objects"] if rest > 0 else [])


def _is_plain(item: Difference) -> bool:
    return not item.is_tensor and item.generator is None


def last_checkpoint(root: Path) -> LastCheckpoint:
    """The checkpoint a run ended with. Raises RestoreError if it has none, DamagedError if it is damaged."""
    paths = RunPaths(root)
    for entry in catalog.scan(paths):  # newest first
        if not entry.is_live or not entry.is_committed:
            continue
        if entry.manifest is None:
            raise DamagedError(f"{entry.path}: {entry.damage}", path=str(entry.path))
        return LastCheckpoint(Whole(parts_on_disk(paths, entry.manifest)))
    raise RestoreError(f"{root} has no committed checkpoint", path=str(root))


def why_not_comparable(uninterrupted: LastCheckpoint, killed: LastCheckpoint, *, same_length: bool) -> str | None:
    """Why the ends cannot be compared: other ranks, or (after equally many steps) nobody saved the end."""
    worlds = len(uninterrupted.whole.parts), len(killed.whole.parts)
    if worlds[0] != worlds[1]:
        return f"the uninterrupted run ended on {worlds[0]} ranks, the killed one on {worlds[1]}"
    one, two = uninterrupted.record.id.step, killed.record.id.step
    if one == two or not same_length:
        return None
    return (
        f"the last checkpoint is step {one} in the uninterrupted run and step {two} in the killed "
        "one: end the script with ckpt.epochs(), ckpt.save() or ckpt.close(), so that the end itself "
        "is saved"
    )


def compare_states(uninterrupted: LastCheckpoint, killed: LastCheckpoint) -> StateComparison:
    """Compare two checkpoints. Raises DamagedError if one of them is not what its record says."""
    found = compare(uninterrupted.whole, killed.whole)
    changes = [change for change in found.changes if not change.path.startswith(_OF_THE_SCRIPT)]
    values = sum(change.kind == "value" for change in changes)
    differences = [Difference(change.path, _text(change), change.kind in _OF_TENSORS) for change in changes]
    # Runs of different length differ everywhere: the length is what a person has to know first.
    differences.sort(key=lambda item: (item.path != "stepwell/step", not item.is_tensor))
    whole = uninterrupted.whole
    step, tensors = whole.record.id.step, len(whole.leaves)
    return StateComparison(step, tensors, whole.nbytes, found.equal_values + values, differences)


def _text(change: Change) -> str:
    if change.distance is not None:
        largest = change.distance.largest
        by = "" if largest is None else f", by at most {largest:.3g}"
        return f"differs in {change.distance.different} of {change.elements} elements{by}"
    if change.kind == "only in a":
        return f"is {change.a} uninterrupted and missing in the killed run"
    if change.kind == "only in b":
        return f"is missing in the uninterrupted run and {change.b} killed"
    if change.kind == "value":
        return f"{_VALUE}{change.a} uninterrupted, {change.b} killed"
    return f"is not the same ({change.kind}): {change.a} uninterrupted, {change.b} killed"
