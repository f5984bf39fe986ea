"""A checkpoint that another library saves: its tensors and values, written and committed as ours.

Owns:    the files of one rank, and the commit by the one that leads.
Not:     who stores what, and when (that library); copying while training runs (there the caller waits).
Holds:   the order of every checkpoint: files, record, then the manifest; the same fence, the same retention.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from stepwell.agent.files.sink import shelf_of
from stepwell.agent.files.writer import Writer
from stepwell.agent.target.shared_target import block_bytes
from stepwell.errors import PersistError, StateError
from stepwell.storage.format.box import Box
from stepwell.storage.format.record import FileEntry, LeafEntry, Record
from stepwell.storage.format.shard import LeafSpec, lay_out
from stepwell.storage.store import assemble, catalog, commit, retention
from stepwell.storage.store.lineage import create_next, newest_number, open_run, read_history
from stepwell.storage.store.paths import RunPaths
from stepwell.types import CheckpointId, Keep, Owner

__all__ = ["CommitTicket", "Owner", "begin", "finish", "write_part"]

if TYPE_CHECKING:
    import torch

    from stepwell.training.state.flatten import Leaf


_OWN: Final = "stepwell"
"""Where the run's own state is: the step, and the generators of each rank."""


@dataclass(frozen=True)
class CommitTicket:
    """Which checkpoint is being written, for all ranks."""

    where: str
    run: str
    directory: str
    created: float

    @property
    def id(self) -> CheckpointId:
        """Its id."""
        found = CheckpointId.parse(self.directory)
        assert found is not None
        return found


def begin(where: str, step: int, keep: Keep) -> CommitTicket:
    """Open or create the run, and take the next lineage: who else continues the run may not commit any more."""
    paths = RunPaths.at(where)
    run = open_run(paths, seed=None)
    steps = [entry.id.step for entry in catalog.scan(paths) if entry.is_live and entry.is_committed]
    left = min(step, max(steps, default=0))
    lineage = create_next(paths, parent=newest_number(paths), step=left, keep=keep)
    return CommitTicket(where, run.id, CheckpointId(step, 0, lineage.number).directory, time.time())


def write_part(ticket: CommitTicket, owner: Owner, state: Mapping[str, Any], stored: set[tuple[str, ...]]) -> int:
    """Write what this rank stores of a state, then its record. Returns the bytes. Raises OSError, StepwellError.

    stored:  places in the state of the tensors that this rank stores, of those that belong to all
    """
    import torch

    from stepwell.training.state import rng
    from stepwell.training.state.flatten import flatten

    if _OWN in state:
        raise StateError(f"{_OWN!r} is the name of the run's own state; give this object another one", path=_OWN)
    own = {"step": ticket.id.step, "epoch": 0, "consumed": 0, "finished": False, "rng": rng.capture()}
    flat = flatten({**state, _OWN: own})
    mine = [leaf for leaf in flat.leaves if leaf.path in stored and (leaf.tensor.numel() or not _has_elements(leaf))]
    mine += [replace(leaf, is_private=True) for leaf in flat.leaves if not _is_tensor(leaf, state)]
    paths = RunPaths.at(ticket.where, owner.rank)
    specs = {leaf.name: LeafSpec(leaf.name, leaf.dtype, tuple(leaf.tensor.shape)) for leaf in mine}
    layout = lay_out(specs.values())
    tensors = {leaf.name: leaf.tensor for leaf in mine}
    name, grain = f"{owner.stem}.safetensors", block_bytes(owner)
    directory = commit.open_checkpoint(paths, ticket.id, owner)
    stream = shelf_of(paths, Writer(), ticket.id.lineage).open_stream(directory / name, layout.nbytes, grain)
    try:
        stream.write(memoryview(layout.header))
        for placed in layout.placements:
            if placed.end > placed.start:
                stream.write(_bytes(tensors[placed.spec.name]))
        blocks = stream.finish()
    except BaseException:
        stream.abort()
        raise
    places = {placed.spec.name: (placed.start, placed.end) for placed in layout.placements}
    record = Record(
        run=ticket.run,
        id=ticket.id,
        owner=owner,
        created=ticket.created,
        files=(FileEntry(name, "safetensors", layout.nbytes, grain, blocks),),
        leaves=tuple(_entry(leaf, *places[leaf.name]) for leaf in mine),
        tree=flat.tree,
        suspect=None,
        versions={"torch": torch.__version__},
        copies={},
    )
    assemble.leave_record(paths, record)
    return record.nbytes


def _has_elements(leaf: Leaf) -> bool:
    """Whether there is something of the whole tensor: then a rank without any of it stores nothing."""
    return leaf.global_shape is not None and all(leaf.global_shape)


def _is_tensor(leaf: Leaf, state: Mapping[str, Any]) -> bool:
    """Whether a tensor of the state stands at this place; an array is a plain value for other libraries."""
    import torch

    if leaf.path[0] == _OWN:
        return False
    found: Any = state
    for key in leaf.path:
        found = found[int(key) if isinstance(found, Sequence) else _key(found, key)]
    return isinstance(found, torch.Tensor)


def _key(mapping: Mapping[Any, Any], text: str) -> Any:
    return text if text in mapping else next(key for key in mapping if str(key) == text)


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _entry(leaf: Leaf, start: int, end: int) -> LeafEntry:
    from stepwell.training.state.strides import strides_of

    shape = tuple(leaf.tensor.shape)
    box = Box.whole(shape) if leaf.box is None else leaf.box
    return LeafEntry(
        name=leaf.name,
        file=0,
        dtype=leaf.dtype,
        shape=shape,
        start=start,
        end=end,
        role="value",
        device=str(leaf.tensor.device),
        global_shape=shape if leaf.global_shape is None else leaf.global_shape,
        offsets=box.offsets,
        private=leaf.is_private,
        strides=strides_of(leaf),
    )


def finish(ticket: CommitTicket, world_size: int, keep: Keep) -> None:
    """All ranks have written: let the checkpoint exist, and make room. Raises OSError, StepwellError."""
    paths = RunPaths.at(ticket.where)
    found = assemble.gather(paths, ticket.id, world_size)
    summaries = [item for item in found if not isinstance(item, int)]
    if not summaries:
        told = f"{ticket.id}: only {len(found)} of {world_size} ranks wrote their records"
        raise PersistError(told, step=ticket.id.step)
    commit.publish_manifest(paths, assemble.make_manifest(summaries))
    if read_history(paths).newest == ticket.id.lineage:
        entries = catalog.scan(paths)
        for entry in retention.left_over(entries, ticket.id.lineage):  # of saves that failed or were killed
            retention.remove_directory(entry.path)
        for entry, _ in retention.surplus(entries, keep):
            retention.remove_checkpoint(entry.id, entry.path)
