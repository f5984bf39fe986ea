"""stepwell: as its README says, with `save()` instead of a policy so that all rows save at the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import stepwell
from peer.rows.base import Row, Saved


class Stepwell(Row):
    """Two slots of host memory are made ready in the background after the first step; the agent prunes by itself."""

    label = "stepwell"
    is_async = True
    fsyncs = "all"
    prepares = True

    def open(self, **options: Any) -> None:
        self.checkpointer = stepwell.Checkpointer(
            self.where,
            policy=stepwell.Every(steps=10**9),
            model=self.work.model,
            optimizer=self.work.optimizer,
            **options,
        )

    def close(self) -> None:
        self.checkpointer.close(save=False)

    def tick(self) -> None:
        self.checkpointer.step()

    def path(self, step: int) -> Path:
        """This step's folder. A training that starts again counts its steps anew."""
        found = sorted(self.where.glob(f"step-{self._own_step(step):012d}.*"))
        return found[-1] if found else self.where / f"step-{self._own_step(step):012d}.l0001"

    def _own_step(self, step: int) -> int:
        """stepwell counts from its opening, the workload from its start."""
        return step - (int(self._offset.read_text()) if self._offset.exists() else 0)

    @property
    def _offset(self) -> Path:
        return self.where.with_suffix(".offset")

    def save(self, step: int) -> Saved:
        handle = self.checkpointer.save()
        if not self._offset.exists():
            self._offset.write_text(str(step - handle.step))
        return Saved(wait_done=handle.upload_completion.result)

    def forget(self, step: int) -> None:
        pass

    def is_complete(self, step: int) -> bool:
        return (self.path(step) / "manifest.json").exists()

    def import_all(self) -> None:
        _ = stepwell.Checkpointer, stepwell.Every  # the package imports its parts when they are asked for

    def load(self, step: int) -> None:
        """The newest that is whole, as a restart would do; another one leaves the run's history as it is."""
        self.open()
        if not self.checkpointer.restore():
            raise RuntimeError("nothing to restore")

    def peek(self, step: int) -> None:
        self.open()
        self.checkpointer.restore(step=self._own_step(step), only={"model", "optimizer"})

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.where / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event.get("event", event.get("kind")) == kind]

    def facts(self) -> dict[str, Any]:
        self.checkpointer.status()
        return {
            "gate_seconds": [event["seconds"] for event in self.events("stall")],
            "copy_seconds": [event["copy_seconds"] for event in self.events("snapshot")],
            "strategies": sorted({event["strategy"] for event in self.events("snapshot")}),
            "arenas": self.events("arena"),
        }
