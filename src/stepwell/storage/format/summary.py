"""The summary of a record: what the leader needs to commit a part, and nothing that grows with the leaves.

Owns:    the fields of `rank-00003.summary`, which lies beside the record that it sums up.
Holds:   it is an aid, not a promise: a reader checks the record itself against size and digest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from stepwell.errors import DamagedError
from stepwell.storage.format.checksum import document_digest
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.format.record import Record
from stepwell.types import CheckpointId, Owner

SUMMARY: Final = "stepwell.summary/1"
MAX_SUMMARY_BYTES: Final = 1 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Summary:
    """A record, summed up.

    nbytes, digest:  of the record file
    data_bytes:      of all files of the shard
    """

    run: str
    id: CheckpointId
    owner: Owner
    created: float
    nbytes: int
    digest: str
    data_bytes: int
    suspect: str | None
    copies: dict[str, str]

    @classmethod
    def of(cls, record: Record, data: bytes) -> Summary:
        """`data`: the bytes of the record file."""
        return cls(
            record.run,
            record.id,
            record.owner,
            record.created,
            len(data),
            document_digest(data),
            record.nbytes,
            record.suspect,
            record.copies,
        )

    def dump(self) -> bytes:
        """Bytes of the file."""
        return seal(
            {
                "format": SUMMARY,
                "run": self.run,
                "step": self.id.step,
                "repeat": self.id.repeat,
                "lineage": self.id.lineage,
                "rank": self.owner.rank,
                "world_size": self.owner.world_size,
                "created": self.created,
                "nbytes": self.nbytes,
                "digest": self.digest,
                "data_bytes": self.data_bytes,
                "suspect": self.suspect,
                "copies": self.copies,
            }
        )

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Summary:
        """Parse and check it. Raises DamagedError."""
        fields = Fields(unseal(data, path=path, kind=SUMMARY), path=path)
        copies, digest = fields.raw("copies"), fields.text("digest")
        if not _DIGEST.fullmatch(digest):
            raise DamagedError(f"{path}: a digest that is none", path=path)
        if not isinstance(copies, dict) or not all(isinstance(value, str) for value in copies.values()):
            raise DamagedError(f"{path}: copies are not of their form", path=path)
        return cls(
            run=fields.run_id("run"),
            id=CheckpointId(fields.integer("step"), fields.integer("repeat"), fields.integer("lineage")),
            owner=Owner(fields.integer("rank"), fields.integer("world_size")),
            created=fields.number("created"),
            nbytes=fields.integer("nbytes"),
            digest=digest,
            data_bytes=fields.integer("data_bytes"),
            suspect=fields.optional_text("suspect"),
            copies=copies,
        )
