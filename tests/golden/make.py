"""Makes the golden runs: tiny checkpoints, committed once, that every later version must read.

`python -m tests.golden.make DIRECTORY` writes the first one as today's code would, and with the word `strides` behind
that the one whose tensors do not lie row by row. tests/golden/v1 and v1strides were made so and are never made again: a
change of the format gets a v2 beside them.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch

from stepwell.storage.format.manifest import Lineage, Run
from stepwell.storage.store.paths import RunPaths
from stepwell.training.state import rng
from stepwell.types import CheckpointId
from tests.restore.build import RunBuilder

RUN = Run(id="60a1d00000000001", seed=7, created=1700000000.0)
LINEAGE = Lineage(number=1, parent=0, step=0, created=1700000000.25, host="golden")
STEP = 3
FROZEN = ("model/embed",)
NOTES = b"kept beside the tensors\n"


def state() -> dict[str, Any]:
    model: OrderedDict[str, torch.Tensor] = OrderedDict(
        weight=torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.25, -0.0]]),
        bias=torch.tensor([1.0, -1.5], dtype=torch.bfloat16),
        embed=torch.tensor([1, 2, 3], dtype=torch.int16),
        count=torch.tensor(3),
    )
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {
        "model": model,
        "values": {
            "wave": torch.tensor([1 + 2j], dtype=torch.complex64),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.empty(0, 2),
            "lr": 0.1,
            "none": None,
            "milestones": Counter({30: 1}),
            0: "int key",
            "0": ("tuple", [b"bytes", float("inf"), 2**70]),
            "array": numpy.array([[1, 2]], dtype=">i2"),
        },
    }


def own() -> dict[str, Any]:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    return {"step": STEP, "epoch": 1, "consumed": 2, "finished": False, "rng": rng.capture()}


def woven() -> dict[str, Any]:
    image = torch.arange(12.0).view(1, 3, 2, 2)
    return {
        "values": {
            "channels_last": image.contiguous(memory_format=torch.channels_last),
            "one row": image[:, :1, :1].contiguous(memory_format=torch.channels_last),
            "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
            "gaps": torch.arange(6, dtype=torch.int16).view(2, 3)[:, ::2],
            "array": numpy.asfortranarray(numpy.arange(6, dtype="<i4").reshape(2, 3)),
        }
    }


def make_woven(root: Path, own_state: dict[str, Any]) -> CheckpointId:
    """Write the run whose tensors do not lie row by row."""
    build = begin(root)
    id = build.write(woven(), STEP, own=own_state, created=1700000003.5)
    build.paths.events.unlink()
    return id


def make(root: Path, own_state: dict[str, Any]) -> CheckpointId:
    """Write the run. Everything but torch's version is the same each time."""
    build = begin(root)
    notes = root.parent / "notes"
    notes.write_bytes(NOTES)
    id = build.write(state(), STEP, frozen=FROZEN, own=own_state, created=1700000003.5, files={"notes": str(notes)})
    build.paths.events.unlink()
    notes.unlink()
    return id


def begin(root: Path) -> RunBuilder:
    """An empty run, the same each time."""
    paths = RunPaths(root)
    paths.lineages.mkdir(parents=True)
    paths.run.write_bytes(RUN.dump())
    build = RunBuilder(root)
    paths.lineage(1).write_bytes(LINEAGE.dump())
    return build


if __name__ == "__main__":
    (make_woven if sys.argv[2:] == ["strides"] else make)(Path(sys.argv[1]), own())
