"""The tests' own book of what was trained on: written in every step from the tensors it got, read back after the kills.

A line holds the launch, the rank, the step and its micro-batches as (epoch, samples, checksum of each sample's bytes).
The first line of a launch on a rank says from which step it resumed. A line is a single write to a file opened for
appending: a kill leaves whole lines, and ranks do not tear each other's.

What survives of a launch are its steps up to the earliest one that a later launch resumed from: the others were rolled
back with the weights. Ranks take slices of a global batch that lie together, so the surviving lines, by step,
micro-batch and rank, are one stream of samples, whatever the world sizes were: each `length` of it is one epoch.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch

Line = dict[str, Any]
Sample = tuple[int, int]
"""Index and checksum."""


class Writer:
    """One rank's hand in the book."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._fixed = {
            "launch": int(os.environ["RANKS_LAUNCH"]),
            "rank": int(os.environ["RANK"]),
            "world": int(os.environ["WORLD_SIZE"]),
            "pid": os.getpid(),
        }

    def note(self, **line: Any) -> None:
        os.write(self._fd, (json.dumps({**self._fixed, **line}) + "\n").encode())


def of_batch(epoch: int, batch: torch.Tensor) -> list[Any]:
    """A micro-batch as it stands in the book; the first column holds the indices."""
    rows = batch.numpy()
    return [epoch, [int(row[0]) for row in rows], [zlib.crc32(row.tobytes()) for row in rows]]


class Ledger:
    """What the launches of a run wrote down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def last_step(self, launch: int, rank: int | None = None) -> int:
        """The latest step that a launch wrote down, on this rank or on any; 0 if there is none."""
        lines = [line for line in self.lines() if line["launch"] == launch and rank in (None, line["rank"])]
        return max((line["step"] for line in lines if "step" in line), default=0)

    def resumed(self) -> dict[int, int]:
        """For each launch whose ranks all got that far, the step it resumed from. All ranks have to agree."""
        found: dict[int, dict[int, int]] = {}
        worlds = {}
        for line in self.lines():
            if "resumed" in line:
                found.setdefault(line["launch"], {})[line["rank"]] = line["resumed"]
                worlds[line["launch"]] = line["world"]
        for launch, steps in found.items():
            assert len(set(steps.values())) == 1, f"launch {launch}: ranks resumed from different steps: {steps}"
        return {launch: steps[min(steps)] for launch, steps in found.items() if len(steps) == worlds[launch]}

    def survived(self) -> dict[int, dict[int, Line]]:
        """The surviving lines, by step and rank. Raises AssertionError for a step that some rank did not do."""
        resumed, kept = self.resumed(), {}
        for line in self.lines():
            if "step" in line and line["launch"] in resumed:
                later = [step for launch, step in resumed.items() if launch > line["launch"]]
                if line["step"] <= min(later, default=line["step"]):
                    kept.setdefault(line["step"], {})[line["rank"]] = line
        for step, lines in kept.items():
            worlds = {line["world"] for line in lines.values()}
            assert worlds == {len(lines)}, f"step {step}: ranks {sorted(lines)} of worlds {worlds}"
        assert sorted(kept) == list(range(1, len(kept) + 1)), f"steps are missing: {sorted(kept)}"
        return dict(sorted(kept.items()))

    def stream(self) -> list[Sample]:
        """All samples of the surviving history, in the order of their positions."""
        found = []
        for lines in self.survived().values():
            for micro in range(len(lines[0]["used"])):
                for rank in sorted(lines):
                    _, samples, checksums = lines[rank]["used"][micro]
                    found += list(zip(samples, checksums, strict=True))
        return found

    def problem(self, length: int, epochs: int) -> str | None:
        """What is wrong with the surviving history: each epoch has to hold each sample once."""
        stream = [sample for sample, _ in self.stream()]
        if len(stream) < length * epochs:
            return f"missed: {length * epochs - len(stream)} samples at the end"
        for epoch in range(epochs):
            times = Counter(stream[epoch * length : (epoch + 1) * length])
            if missed := sorted(set(range(length)) - times.keys()):
                return f"missed: {missed} in epoch {epoch}"
        if carried := [sample for sample, count in Counter(stream[epochs * length :]).items() if count > 1]:
            return f"repeated: {carried} in what was carried over"
        return None

    def difference(self, other: Ledger) -> str | None:
        """The first surviving step, of the same world size, that had other batches, bytes or weights."""
        mine, theirs = self.survived(), other.survived()
        if mine.keys() != theirs.keys():
            return f"{len(mine)} steps, expected {len(theirs)}"
        for step, lines in mine.items():
            for rank, line in lines.items():
                for name in ("used", "weights"):
                    if line[name] != theirs[step][rank][name]:
                        return f"other {name} in step {step} on rank {rank}"
        for line in self.lines():
            if line.get("resumed") and line["weights"] != theirs[line["resumed"]][line["rank"]]["weights"]:
                return f"other weights after the restore of step {line['resumed']} on rank {line['rank']}"
        return None
