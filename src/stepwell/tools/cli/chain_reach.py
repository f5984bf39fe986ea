"""What the chains of a run reach, for people and scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stepwell.storage.chain.chain_files import list_chains
from stepwell.storage.format.manifest import Lineage
from stepwell.storage.store.lineage import read_history, read_lineages
from stepwell.storage.store.paths import RunPaths
from stepwell.tools.cli import wording
from stepwell.types import CheckpointId


@dataclass(frozen=True)
class Reach:
    """One chain: its base, the newest step in it that is on the path of the run, and how it was coded."""

    base: str
    step: int
    records: int
    codec: str
    nbytes: int

    def text(self) -> str:
        """One line."""
        records = wording.count(self.records, "record")
        return f"lossy: {self.base} and {records} reach step {self.step} ({self.codec}, {wording.size(self.nbytes)})"

    def as_document(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def find_reaches(paths: RunPaths) -> list[Reach]:
    """Chains whose base is there and that a restart could use, the newest first."""
    if not list_chains(paths):  # most runs have none, and need not load what reads them
        return []
    from stepwell.restore.from_chain import find_chains

    history, found = read_history(paths), []
    for chain in find_chains(paths):
        live = [item for item in chain.records if history.is_live(CheckpointId(item.step, 0, chain.base.lineage))]
        if live:
            found.append(Reach(chain.base.directory, live[-1].step, len(live), chain.codec, chain.nbytes))
    return found


def lossy_starts(paths: RunPaths) -> list[Lineage]:
    """Continuations of the run that did not begin with an exact state, if they are on its path."""
    history = read_history(paths)
    return [
        lineage
        for number, lineage in sorted(read_lineages(paths)[0].items())
        if lineage.lossy is not None and history.is_live(CheckpointId(lineage.step, 0, number))
    ]


def find_broken(paths: RunPaths) -> list[str]:
    """What is wrong with chains, one sentence for each."""
    if not list_chains(paths):
        return []
    from stepwell.restore.from_chain import find_chains, why_broken

    problems = [why_broken(paths, chain.base) for chain in find_chains(paths)]
    return [problem for problem in problems if problem is not None]
