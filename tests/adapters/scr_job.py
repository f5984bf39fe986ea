"""Jobs of `scr_program.py` on several nodes: ranks with private caches, which are lost with their node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell.adapters.scr.application_files import FOLDER
from stepwell.adapters.scr.prefix_index import Prefix
from stepwell.storage.store.paths import RunPaths
from tests.crash.harness import Server, wait_for
from tests.ranks.launch import Job, Launch


class ScrJob(Job):
    """Its nodes are directories beside the prefix."""

    script = Path(__file__).with_name("scr_program.py")

    def __init__(self, server: Server, folder: Path, *arguments: object, **env: str) -> None:
        super().__init__(server, folder, *arguments, **{"STEPWELL_GROUP_SECONDS": "40", **env})
        self.prefix = Prefix(folder / "prefix")
        self.prefix.root.mkdir(exist_ok=True)
        self.paths = RunPaths(self.prefix.root / FOLDER)

    def command(self, *arguments: object) -> list[object]:
        return [self.script, self.folder, *arguments]

    def start(self, nodes: Sequence[str], *arguments: object, **env: str) -> Launch:
        """One rank for each name; ranks with the same one share a node."""
        each: dict[int, Mapping[str, str]] = {
            rank: {"SCR_CACHE_BASE": str(self.node(name)), "STEPWELL_NODE": name} for rank, name in enumerate(nodes)
        }
        return self.launch(len(nodes), *arguments, each=each, SCR_PREFIX=str(self.prefix.root), **env)

    def node(self, name: str) -> Path:
        return self.folder / f"node.{name}"

    def lose(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.node(name))

    def results(self, launch: Launch) -> list[dict[str, Any]]:
        """What all ranks saw, once they wrote it."""
        places = [self.folder / f"result.{launch.number}.{rank}" for rank in range(launch.world)]
        self.wait_while_alive_or_ended(launch, places)
        return [json.loads(place.read_text()) for place in places]

    def wait_while_alive_or_ended(self, launch: Launch, places: Sequence[Path]) -> None:
        def is_there() -> bool:
            return all(place.exists() for place in places)

        if not is_there():
            self.wait_while_alive(launch, is_there, "all ranks are through")

    def wait_any_end(self, launch: Launch) -> None:
        """Until a rank is gone."""
        wait_for(launch.has_ended, "a rank died")

    def same(self, launch: Launch) -> dict[str, Any]:
        """What every rank saw; it has to be the same."""
        found = self.results(launch)
        assert all(other == found[0] for other in found), found
        return found[0]

    def cached_files(self, name: str) -> list[Path]:
        """The application's files in a node's cache, of the newest dataset."""
        steps = sorted(self.node(name).glob("*/stepwell-scr/runs/*/step-*"))
        return sorted(steps[-1].glob("rank-*.file"))

    def in_prefix(self) -> list[str]:
        """Names of the datasets there, the oldest first."""
        return [item.name for item in reversed(self.prefix.datasets())]

    def event_kinds(self) -> list[str]:
        return [event["kind"] for rank in range(self.world) for event in self.rank_events(rank)]

    def rank_events(self, rank: int) -> list[dict[str, Any]]:
        from stepwell.events.journal import read_events

        return list(read_events(RunPaths(self.paths.root, rank).events))


def flip(path: Path, offset: int = 1000) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
