"""Runs a training loop and tells whether each checkpoint equals the state at its trigger.

The expected bytes are cloned by the test itself, synchronously, right before the snapshot starts; the copy is slowed
down so that forward, backward and everything else of the next iteration run while it is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import stepwell
from stepwell import Every, Keep
from stepwell.events.journal import read_events
from stepwell.storage.store.catalog import read_record, scan
from stepwell.storage.store.paths import RunPaths

Body = Callable[[], None]


@dataclass
class Case:
    """A training loop: what is tracked, and one iteration. `options` go to the Checkpointer."""

    tracked: dict[str, Any]
    body: Callable[[stepwell.Checkpointer, int], None]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a run left: expected and found leaves per step, and the events."""

    expected: dict[int, dict[str, torch.Tensor]]
    found: dict[int, dict[str, torch.Tensor]]
    events: list[dict[str, Any]]

    def wrong(self) -> list[str]:
        """Leaves whose bytes are not those of the trigger, and checkpoints that are not there."""
        problems = [f"step {step}: no checkpoint" for step in self.expected.keys() - self.found.keys()]
        for step, leaves in self.found.items():
            for name, tensor in self.expected[step].items():
                if not same_bytes(leaves[name], tensor):
                    problems.append(f"step {step}: {name}")
        return sorted(problems)

    def kinds(self) -> set[str]:
        return {event["kind"] for event in self.events}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous().cpu(), b.contiguous().cpu()
    if a.numel() == 0:
        return b.numel() == 0
    return bytes(a.reshape(-1).view(torch.uint8).numpy()) == bytes(b.reshape(-1).view(torch.uint8).numpy())


def run(case: Case, where: Path, *, steps: int = 7, every: int = 2) -> Outcome:
    """Train `steps` steps with a checkpoint every `every`, then read all checkpoints back."""
    expected: dict[int, dict[str, torch.Tensor]] = {}
    ckpt = stepwell.Checkpointer(
        where, policy=Every(steps=every), keep=Keep(last=100), track=case.tracked, **case.options
    )
    take = ckpt._snapshotter.take

    def remembering(flat: Any, request: Any, *, block: bool) -> Any:
        ckpt._snapshotter.gate()
        clones = {leaf.name: leaf.tensor.clone().cpu() for leaf in flat.leaves}
        taken = take(flat, request, block=True)
        expected[request.step] = clones
        return taken

    ckpt._snapshotter.take = remembering  # type: ignore[method-assign]
    for number in range(steps):
        case.body(ckpt, number)
        ckpt.step()
    ckpt._snapshotter.drain()
    ckpt.close(save=False)
    return Outcome(expected, read_all(where), list(read_events(where / "events.jsonl")))


def read_all(where: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Every checkpoint of a run, read with stock safetensors."""
    found = {}
    paths = RunPaths(where)
    for entry in scan(paths):
        if entry.manifest is None:
            continue
        leaves = {}
        record = read_record(paths, entry.manifest)
        for file in record.files:
            with safe_open(entry.path / file.name, "pt") as opened:
                leaves.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 (not a dict)
        found[entry.id.step] = leaves
    return found


def state_bytes(ckpt: stepwell.Checkpointer) -> dict[str, torch.Tensor]:
    """The state as it is now, cloned."""
    return {leaf.name: leaf.tensor.clone() for leaf in ckpt._capture.flatten(ckpt._own.capture()).leaves}
