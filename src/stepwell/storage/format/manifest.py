"""The manifest (a checkpoint exists if and only if its manifest does), its opposite, and the two records of a run.

Owns:    `manifest.json`, `void.json`, `run.json` and `lineage/0001.json`: fields, dumping, checked loading.
Holds:   a manifest names every record by digest; a lineage names its parent and the step where it left it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Final

from stepwell.errors import ConfigError, DamagedError
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.storage.format.record import check_file_name
from stepwell.types import CheckpointId, Keep

MANIFEST: Final = "stepwell.manifest/1"
RUN: Final = "stepwell.run/1"
LINEAGE: Final = "stepwell.lineage/1"
VOID: Final = "stepwell.void/1"
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


MAX_SEED: Final = 1 << 64
"""A run's seed is a whole number below this."""


@dataclass(frozen=True)
class RecordRef:
    """A record by file name and digest of its bytes."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The commit record of one checkpoint. `name` is set for checkpoints the user named: these are never pruned."""

    run: str
    id: CheckpointId
    world_size: int
    created: float
    records: tuple[RecordRef, ...]
    nbytes: int
    exact: bool = True
    suspect: str | None = None
    epoch_end: bool = False
    finished: bool = False
    name: str | None = None

    def dump(self) -> bytes:
        """Bytes of the manifest file."""
        return seal(
            {
                "format": MANIFEST,
                "run": self.run,
                "step": self.id.step,
                "repeat": self.id.repeat,
                "lineage": self.id.lineage,
                "world_size": self.world_size,
                "created": self.created,
                "nbytes": self.nbytes,
                "exact": self.exact,
                "suspect": self.suspect,
                "epoch_end": self.epoch_end,
                "finished": self.finished,
                "name": self.name,
                "records": [{"name": ref.name, "nbytes": ref.nbytes, "digest": ref.digest} for ref in self.records],
            }
        )

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Manifest:
        """Parse and check a manifest file."""
        fields = Fields(unseal(data, path=path, kind=MANIFEST), path=path)
        records = []
        for item in fields.items("records"):
            ref = Fields(item, path=path)
            name = check_file_name(ref.text("name"), path=path)
            digest = ref.text("digest")
            if not _DIGEST.fullmatch(digest):
                raise DamagedError(f"{path}: record {name} has a digest that is none", path=path)
            records.append(RecordRef(name, ref.integer("nbytes"), digest))
        if not records or len(records) != fields.integer("world_size"):
            raise DamagedError(f"{path}: {len(records)} records for {fields.integer('world_size')} ranks", path=path)
        return cls(
            run=fields.run_id("run"),
            id=CheckpointId(fields.integer("step"), fields.integer("repeat"), fields.integer("lineage")),
            world_size=fields.integer("world_size"),
            created=fields.number("created"),
            records=tuple(records),
            nbytes=fields.integer("nbytes"),
            exact=fields.flag("exact"),
            suspect=fields.optional_text("suspect"),
            epoch_end=fields.flag("epoch_end"),
            finished=fields.flag("finished"),
            name=fields.optional_text("name"),
        )


@dataclass(frozen=True)
class Void:
    """Why a checkpoint of many ranks will never exist: what `rank` said, or could not be waited for."""

    run: str
    id: CheckpointId
    rank: int
    reason: str

    def dump(self) -> bytes:
        """Bytes of `rank-00003.void` or `void.json`."""
        where = {"step": self.id.step, "repeat": self.id.repeat, "lineage": self.id.lineage}
        return seal({"format": VOID, "run": self.run, **where, "rank": self.rank, "reason": self.reason})

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Void:
        """Parse and check it."""
        fields = Fields(unseal(data, path=path, kind=VOID), path=path)
        return cls(
            run=fields.run_id("run"),
            id=CheckpointId(fields.integer("step"), fields.integer("repeat"), fields.integer("lineage")),
            rank=fields.integer("rank"),
            reason=fields.text("reason"),
        )


@dataclass(frozen=True)
class Run:
    """Identity of a run: its id, and the seed drawn or given at the first start."""

    id: str
    seed: int
    created: float

    def dump(self) -> bytes:
        """Bytes of `run.json`."""
        return seal({"format": RUN, "id": self.id, "seed": self.seed, "created": self.created})

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Run:
        """Parse and check `run.json`."""
        fields = Fields(unseal(data, path=path, kind=RUN), path=path)
        return cls(fields.run_id("id"), fields.integer("seed", limit=MAX_SEED), fields.number("created"))


@dataclass(frozen=True)
class Lineage:
    """One continuation of the run: it left lineage `parent` at `step` (parent 0: it started fresh).

    `lossy`: of what it went on from, if that was not the state to the bit. `keep`: what its process was told to keep;
    None where an older version wrote it.
    """

    number: int
    parent: int
    step: int
    created: float
    host: str
    lossy: str | None = None
    keep: Keep | None = None

    def dump(self) -> bytes:
        """Bytes of `lineage/<number>.json`."""
        return seal(
            {
                "format": LINEAGE,
                "number": self.number,
                "parent": self.parent,
                "step": self.step,
                "created": self.created,
                "host": self.host,
                **({} if self.lossy is None else {"lossy": self.lossy}),
                **({} if self.keep is None else {"keep": asdict(self.keep)}),
            }
        )

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Lineage:
        """Parse and check a lineage file."""
        fields = Fields(unseal(data, path=path, kind=LINEAGE), path=path)
        return cls(
            number=fields.integer("number"),
            parent=fields.integer("parent"),
            step=fields.integer("step"),
            created=fields.number("created"),
            host=fields.text("host"),
            lossy=fields.optional("lossy", None) and fields.text("lossy"),
            keep=None if fields.optional("keep", None) is None else _load_keep(fields.raw("keep"), path),
        )


def _load_keep(document: object, path: str) -> Keep:
    fields = Fields(document, path=path)
    try:
        every = None if fields.optional("every", None) is None else fields.integer("every")
        return Keep(last=fields.integer("last"), every=every, epochs=fields.flag("epochs"))
    except ConfigError as error:
        raise DamagedError(f"{path}: {error}", path=path) from error
