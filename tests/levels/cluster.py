"""A job on several nodes: ranks with private caches, which are lost with their node."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepwell.levels import cached as cache
from stepwell.levels.assignments import run_cache
from stepwell.storage.store import files
from stepwell.storage.store.lineage import read_history, read_run
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId
from tests.ranks.launch import Job, Launch


class Cluster(Job):
    """Its nodes are directories beside the run, each named by what its ranks were told."""

    def start(self, nodes: Sequence[str], *arguments: object, **env: str) -> Launch:
        """One rank for each name; ranks with the same one share a node."""
        each: dict[int, Mapping[str, str]] = {
            rank: {"RANKS_NODE": node, "STEPWELL_NODE": node} for rank, node in enumerate(nodes)
        }
        self.nodes = list(nodes)
        return self.launch(len(nodes), *arguments, each=each, **env)

    def cache(self, node: str) -> RunPaths:
        """What a node's cache holds of the run."""
        return run_cache(self.folder / f"node.{node}", read_run(self.paths).id)

    def caches(self) -> list[RunPaths]:
        return [self.cache(path.name.removeprefix("node.")) for path in sorted(self.folder.glob("node.*"))]

    def lose(self, node: str) -> None:
        """The node is gone, with its agents and all that it held."""
        for rank, name in enumerate(self.nodes):
            if name == node:
                self.kill_agents_of(rank)
        shutil.rmtree(self.folder / f"node.{node}", ignore_errors=True)

    def whole(self) -> list[CheckpointId]:
        """Checkpoints that rank 0 called whole, on any node or in the shared place, the oldest first."""
        if not files.exists(self.paths.run):
            return []
        history, found = read_history(self.paths), set()
        for paths in [*self.caches(), self.paths]:
            found |= {id for id in cache.steps(paths) if files.exists(paths.manifest(id)) and history.is_live(id)}
        return sorted(found)

    def newest_step(self) -> int:
        return max((id.step for id in self.whole()), default=0)

    check_newest = newest_step

    def flushed(self) -> list[int]:
        """Steps in the shared place."""
        return [id.step for id in sorted(cache.steps(self.paths)) if files.exists(self.paths.manifest(id))]

    def temporary(self) -> list[Path]:
        """Leftovers in the caches of the nodes that were in the last start."""
        found = [path for node in sorted(set(self.nodes)) for path in self.folder.glob(f"node.{node}/**/*")]
        return [path for path in found if path.name.endswith(files.TEMPORARY)]

    def end_all(self, launch: Launch) -> None:
        """All ranks and all agents die at once, as with the power: nothing is left in memory."""
        for agent in self.agents():  # ranks too
            agent.signal(signal.SIGSTOP)
            agent.close()
        launch.kill()
        self.kill_agents()
        launch.end_store()

    def check_nothing_left(self) -> None:
        super().check_nothing_left()
        assert not self.temporary(), self.temporary()
