"""What a rank stores for the others of its set besides copies: parity, and whose it is.

Owns:    `parity-00005.json`: fields, dumping, checked loading. The bytes lie beside it in `parity-00005.bin`.
Holds:   it names the record of every member by digest, so that what is rebuilt from it is checked against these.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Final

from stepwell.errors import DamagedError
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.format.manifest import RecordRef
from stepwell.storage.format.record import FileEntry, check_file_name, load_file
from stepwell.types import CheckpointId

PARITY: Final = "stepwell.parity/1"
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Parity:
    """Of the member `rank`. members: the ranks of the set in their order; losses: how many may be lost."""

    run: str
    id: CheckpointId
    rank: int
    members: tuple[int, ...]
    losses: int
    records: tuple[RecordRef, ...]
    lengths: tuple[int, ...]
    file: FileEntry

    @property
    def position(self) -> int:
        return self.members.index(self.rank)

    def dump(self) -> bytes:
        """Bytes of the document."""
        where = {"step": self.id.step, "repeat": self.id.repeat, "lineage": self.id.lineage}
        facts = {"rank": self.rank, "losses": self.losses, "members": self.members, "lengths": self.lengths}
        records = [asdict(record) for record in self.records]
        return seal(
            {"format": PARITY, "run": self.run, **where, **facts, "records": records, "file": asdict(self.file)}
        )

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Parity:
        """Parse and check it. Raises DamagedError."""
        fields = Fields(unseal(data, path=path, kind=PARITY), path=path)
        members, lengths = fields.shape("members"), fields.shape("lengths")
        records = tuple(_reference(item, path) for item in fields.items("records"))
        rank, losses = fields.integer("rank"), fields.integer("losses")
        is_set = len(set(members)) == len(members) == len(records) == len(lengths) and rank in members
        if not is_set or not 1 <= losses < len(members):
            raise DamagedError(f"{path}: members, records and lengths do not belong together", path=path)
        return cls(
            run=fields.run_id("run"),
            id=CheckpointId(fields.integer("step"), fields.integer("repeat"), fields.integer("lineage")),
            rank=rank,
            members=members,
            losses=losses,
            records=records,
            lengths=lengths,
            file=load_file(fields.raw("file"), path),
        )


def parity_name(rank: int) -> str:
    """Name of the document; the bytes have the same one with another ending."""
    return f"parity-{rank:05d}.json"


def _reference(item: object, path: str) -> RecordRef:
    fields = Fields(item, path=path)
    name, digest = check_file_name(fields.text("name"), path=path), fields.text("digest")
    if not _DIGEST.fullmatch(digest):
        raise DamagedError(f"{path}: record {name} has a digest that is none", path=path)
    return RecordRef(name, fields.integer("nbytes"), digest)
