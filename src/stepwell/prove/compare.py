"""The final states of two runs.

Owns:    which checkpoint a run ended with, and how a difference reads when one run was killed and the other was not.
Not:     the comparison itself, byte for byte and value by value: `stepwell diff` has the same (interchange.compare).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.errors import DamagedError, RestoreError
from stepwell.format.record import Record
from stepwell.interchange.assembled import assembled
from stepwell.interchange.compare import Change, Known, compare_readers
from stepwell.store import catalog
from stepwell.store.paths import RunPaths

_OF_TENSORS: Final = ("bytes", "shape", "dtype", "tied")


@dataclass(frozen=True)
class LastCheckpoint:
    """What a run ended with: the records of all ranks."""

    records: list[Record]
    directory: Path

    @property
    def record(self) -> Record:
        """Of rank 0."""
        return self.records[0]


@dataclass(frozen=True)
class Difference:
    """One tensor or plain value that is not the same. `text` says how, as the end of a sentence on `path`.

    `rank`: whose, where it is a rank's own.
    """

    path: str
    text: str
    is_tensor: bool
    rank: int = 0

    @property
    def label(self) -> str:
        """What a person reads."""
        return f"{self.path} (rank {self.rank})" if self.rank else self.path

    @property
    def generator(self) -> str | None:
        """Name of the global random generator it belongs to, if it does: "python", "numpy", "torch", "cuda"."""
        parts = self.path.split("/")
        return parts[2] if parts[:2] == ["stepwell", "rng"] and len(parts) > 2 else None


@dataclass(frozen=True)
class StateComparison:
    """What was compared, and what differs: tensors first, in the order of the state."""

    step: int
    tensors: int
    nbytes: int
    values: int
    differences: list[Difference]


def last_checkpoint(root: Path) -> LastCheckpoint:
    """The checkpoint a run ended with. Raises RestoreError if it has none, DamagedError if it is damaged."""
    paths = RunPaths(root)
    for entry in catalog.scan(paths):  # newest first
        if not entry.is_live or not entry.is_committed:
            continue
        if entry.manifest is None:
            raise DamagedError(f"{entry.path}: {entry.damage}", path=str(entry.path))
        manifest = entry.manifest
        records = [catalog.read_record(paths, manifest, rank) for rank in range(manifest.world_size)]
        return LastCheckpoint(records, entry.path)
    raise RestoreError(f"{root} holds no committed checkpoint", path=str(root))


def why_not_comparable(uninterrupted: LastCheckpoint, killed: LastCheckpoint, *, same_length: bool) -> str | None:
    """Both runs did equally many steps and yet ended with checkpoints of different ones: nobody saved the end."""
    worlds = len(uninterrupted.records), len(killed.records)
    if worlds[0] != worlds[1]:
        return f"the run ended on {worlds[0]} ranks uninterrupted and on {worlds[1]} killed"
    one, two = uninterrupted.record.id.step, killed.record.id.step
    if one == two or not same_length:
        return None
    return (
        f"the last checkpoint is that of step {one} uninterrupted and of step {two} killed: end the script with "
        "ckpt.epochs(), ckpt.save() or ckpt.close(), so that the end itself is saved"
    )


def compare_states(uninterrupted: LastCheckpoint, killed: LastCheckpoint) -> StateComparison:
    """Compare two checkpoints. Raises DamagedError if one of them is not what its record says."""
    sides = zip(*(assembled(each.records, each.directory) for each in (uninterrupted, killed)), strict=True)
    common: Known = {}
    values = tensors = 0
    differences: list[Difference] = []
    for rank, (one, two) in enumerate(sides):
        own = {name for side in (one, two) for name, leaf in side.entries.items() if leaf.private}
        known = {key: distance for key, distance in common.items() if not own & set(key)}
        told = {item.path for item in differences}
        with contextlib.closing(one), contextlib.closing(two):
            found = compare_readers(one, two, known=known)
        tensors += len([name for name, leaf in one.entries.items() if leaf.private or (name, name) not in common])
        common |= {key: distance for key, distance in known.items() if not own & set(key)}
        values += found.equal_values + sum(change.kind == "value" for change in found.changes)
        differences += [
            Difference(change.path, _text(change), change.kind in _OF_TENSORS, rank)
            for change in found.changes
            if change.kind != "bytes" or change.path in own or change.path not in told  # of all ranks: told once
        ]
    # Runs of different length differ everywhere: the length is what a person has to know first.
    differences.sort(key=lambda item: (item.path != "stepwell/step", not item.is_tensor))
    nbytes = sum(record.nbytes for record in uninterrupted.records)
    return StateComparison(uninterrupted.record.id.step, tensors, nbytes, values, differences)


def _text(change: Change) -> str:
    if change.distance is not None:
        largest = change.distance.largest
        by = "" if largest is None else f", by at most {largest:.3g}"
        return f"differs in {change.distance.different} of {change.elements} elements{by}"
    if change.kind == "only in a":
        return f"is {change.a} uninterrupted and missing in the killed run"
    if change.kind == "only in b":
        return f"is missing in the uninterrupted run and {change.b} killed"
    return f"is not the same ({change.kind}): {change.a} uninterrupted, {change.b} killed"
