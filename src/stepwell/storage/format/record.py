"""The shard record: what one rank contributed to one checkpoint, and how to check it.

Owns:    the fields of `rank-00000.json` and their meaning.
Before:  the agent wrote the files and knows their block checksums.   After: the manifest names the record by digest.
Holds:   file names stay inside the checkpoint's directory; the leaves of a file follow each other from a page
         boundary to its end, without gap or overlap.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from stepwell.errors import DamagedError
from stepwell.storage.format import dtypes
from stepwell.storage.format.box import Box
from stepwell.storage.format.checksum import block_count
from stepwell.storage.format.document import Fields, seal, unseal
from stepwell.types import CheckpointId, Owner

KIND: Final = "stepwell.record/1"
MAX_BLOCK_BYTES: Final = 64 << 20
_PAGE: Final = 4096
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")
_DEVICE: Final = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")


@dataclass(frozen=True)
class FileEntry:
    """One file of a shard. `kind`: safetensors, or opaque for a file that the user wrote."""

    name: str
    kind: str
    nbytes: int
    block_bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class LeafEntry:
    """One tensor: what it is, where it lies, and what later stages need to know of it.

    role:          parameter, moment, buffer, rng, value ...: what the codecs may do with it
    global_shape:  shape of the whole tensor of which this is the box at `offsets` (equal to shape on one rank)
    private:       this rank's own: leaves of this name in other records are other tensors
    codec:         raw, or the name of the code; `parent` names the base of a delta; `exact` is false for lossy codes
    strides:       how the whole tensor lies in memory, without gaps; None: row by row. In the file it always does
    """

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    role: str
    device: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    codec: str = "raw"
    exact: bool = True
    parent: str | None = None
    private: bool = False
    strides: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        """Which part of the whole tensor it is."""
        return Box(self.offsets, self.shape)


@dataclass(frozen=True)
class Record:
    """Everything one rank says about its part of one checkpoint."""

    run: str
    id: CheckpointId
    owner: Owner
    created: float
    files: tuple[FileEntry, ...]
    leaves: tuple[LeafEntry, ...]
    tree: Any
    suspect: str | None = None
    parity: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    """Digests over samples of what several ranks (`0-2`) hold copies of, and store parts of."""
    elsewhere: tuple[LeafEntry, ...] | None = None
    """Leaves of the tree of which this rank stores nothing, as whole tensors. None: not known, as in older records."""
    partners: tuple[int, ...] = ()
    """Ranks that store the rest of what this rank holds."""

    @property
    def nbytes(self) -> int:
        """Size of all its files."""
        return sum(file.nbytes for file in self.files)

    def dump(self) -> bytes:
        """Bytes of the record file."""
        more: dict[str, Any] = {"copies": self.copies} if self.copies else {}
        if self.elsewhere is not None:
            more |= {"elsewhere": [absent_fields(leaf) for leaf in self.elsewhere], "partners": self.partners}
        return seal(
            {
                "format": KIND,
                "run": self.run,
                "step": self.id.step,
                "repeat": self.id.repeat,
                "lineage": self.id.lineage,
                "rank": self.owner.rank,
                "world_size": self.owner.world_size,
                "created": self.created,
                "suspect": self.suspect,
                "parity": self.parity,
                "versions": self.versions,
                **more,
                "files": [asdict(file) for file in self.files],
                "leaves": [leaf_fields(leaf) for leaf in self.leaves],
                "tree": self.tree,
            }
        )

    @classmethod
    def load(cls, data: bytes, *, path: str) -> Record:
        """Parse and check a record file. Raises DamagedError with the file's name."""
        fields = Fields(unseal(data, path=path, kind=KIND), path=path)
        files = tuple(load_file(item, path) for item in fields.items("files"))
        if len({file.name for file in files}) != len(files):
            raise DamagedError(f"{path}: two files share a name", path=path)
        leaves = tuple(_leaf(item, files, path) for item in fields.items("leaves"))
        elsewhere = (
            tuple(load_absent(item, path) for item in fields.items("elsewhere")) if "elsewhere" in fields else None
        )
        named = [leaf.name for leaf in (*leaves, *(elsewhere or ()))]
        if len(set(named)) != len(named):
            raise DamagedError(f"{path}: two leaves share a name", path=path)
        for number, file in enumerate(files):
            _check_cover(file, [leaf for leaf in leaves if leaf.file == number], path)
        parity, versions, copies = fields.raw("parity"), fields.raw("versions"), fields.optional("copies", {})
        if (
            not (parity is None or isinstance(parity, dict))
            or not isinstance(versions, dict)
            or not isinstance(copies, dict)
        ):
            raise DamagedError(f"{path}: parity, versions or copies are not of their form", path=path)
        owner = Owner(fields.integer("rank"), fields.integer("world_size"))
        if owner.rank >= owner.world_size:
            raise DamagedError(f"{path}: rank {owner.rank} of {owner.world_size}", path=path)
        partners = fields.shape("partners") if elsewhere is not None else ()
        if any(rank >= owner.world_size for rank in partners):
            raise DamagedError(f"{path}: partners beyond rank {owner.world_size - 1}", path=path)
        return cls(
            run=fields.run_id("run"),
            id=CheckpointId(fields.integer("step"), fields.integer("repeat"), fields.integer("lineage")),
            owner=owner,
            created=fields.number("created"),
            suspect=fields.optional_text("suspect"),
            parity=parity,
            versions=versions,
            copies=copies,
            elsewhere=elsewhere,
            partners=partners,
            files=files,
            leaves=leaves,
            tree=fields.raw("tree"),
        )


def leaf_fields(leaf: LeafEntry) -> dict[str, Any]:
    """As it is written; `private` and `strides` only where they say something, so that old readers' files stay as
    they were.
    """
    fields = dict(vars(leaf))  # not `asdict`, which copies every tuple
    if not leaf.private:
        del fields["private"]
    if leaf.strides is None:
        del fields["strides"]
    return fields


def absent_fields(leaf: LeafEntry) -> dict[str, Any]:
    """Of a leaf of which nothing is stored here: what the tensor is."""
    fields = {key: getattr(leaf, key) for key in ("name", "dtype", "global_shape", "device")}
    return fields if leaf.strides is None else fields | {"strides": leaf.strides}


def absent_leaf(
    name: str, dtype: str, shape: tuple[int, ...], device: str, strides: tuple[int, ...] | None
) -> LeafEntry:
    """A leaf of which nothing is stored here."""
    offsets = (0,) * len(shape)
    return LeafEntry(name, 0, dtype, shape, 0, 0, "value", device, shape, offsets, strides=strides)


def load_absent(item: object, path: str) -> LeafEntry:
    fields = Fields(item, path=path)
    strides = None if fields.optional("strides", None) is None else fields.dimensions("strides")
    what = fields.text("name"), fields.text("dtype"), fields.dimensions("global_shape"), fields.text("device")
    leaf = absent_leaf(*what, strides)
    _check_kind(leaf, path)
    return leaf


def check_file_name(name: str, *, path: str) -> str:
    """Refuse names that could lead out of the checkpoint's directory."""
    if not _FILE_NAME.fullmatch(name) or ".." in name:
        raise DamagedError(f"{path}: {name!r} is not a plain file name", path=path, found=name)
    return name


def load_file(item: object, path: str) -> FileEntry:
    """A file, as a document names it. Raises DamagedError."""
    fields = Fields(item, path=path)
    nbytes, block_bytes = fields.integer("nbytes"), fields.integer("block_bytes", limit=MAX_BLOCK_BYTES + 1)
    blocks, kind = fields.items("blocks"), fields.text("kind")
    name = check_file_name(fields.text("name"), path=path)
    if kind not in ("safetensors", "opaque"):
        raise DamagedError(f"{path}: file {name} is of unknown kind {kind!r}", path=path)
    if not block_bytes or block_bytes % _PAGE or len(blocks) != block_count(nbytes, block_bytes):
        raise DamagedError(
            f"{path}: file {name} has {len(blocks)} checksums for {nbytes} bytes in blocks of {block_bytes}", path=path
        )
    if not all(isinstance(block, str) and _DIGEST.fullmatch(block) for block in blocks):
        raise DamagedError(f"{path}: file {name} has a checksum that is none", path=path)
    return FileEntry(name, kind, nbytes, block_bytes, tuple(blocks))


def _leaf(item: object, files: tuple[FileEntry, ...], path: str) -> LeafEntry:
    fields = Fields(item, path=path)
    leaf = LeafEntry(
        name=fields.text("name"),
        file=fields.integer("file"),
        dtype=fields.text("dtype"),
        shape=fields.dimensions("shape"),
        start=fields.integer("start"),
        end=fields.integer("end"),
        role=fields.text("role"),
        device=fields.text("device"),
        global_shape=fields.dimensions("global_shape"),
        offsets=fields.dimensions("offsets"),
        codec=fields.text("codec"),
        exact=fields.flag("exact"),
        parent=fields.optional_text("parent"),
        private=fields.optional_flag("private"),
        strides=None if fields.optional("strides", None) is None else fields.dimensions("strides"),
    )
    if leaf.codec != "raw" or leaf.parent is not None:
        raise DamagedError(
            f"{path}: leaf {leaf.name!r} is coded as {leaf.codec!r}, this version reads 'raw'",
            path=path,
            leaf=leaf.name,
        )
    _check_kind(leaf, path)
    size = dtypes.element_count(leaf.shape) * dtypes.itemsize(leaf.dtype)
    if leaf.file >= len(files) or leaf.end - leaf.start != size or leaf.end > files[leaf.file].nbytes:
        raise DamagedError(f"{path}: leaf {leaf.name!r} does not lie inside its file", path=path, leaf=leaf.name)
    return leaf


def _check_kind(leaf: LeafEntry, path: str) -> None:
    if not dtypes.is_known(leaf.dtype):
        raise DamagedError(f"{path}: leaf {leaf.name!r} has unknown element type {leaf.dtype!r}", path=path)
    if not _DEVICE.fullmatch(leaf.device) or not _is_box(leaf):
        raise DamagedError(f"{path}: leaf {leaf.name!r} has a device or box that is none", path=path, leaf=leaf.name)
    if leaf.strides is not None and not _is_dense(leaf.global_shape, leaf.strides):
        raise DamagedError(f"{path}: leaf {leaf.name!r} has strides with gaps", path=path, leaf=leaf.name)


def _is_box(leaf: LeafEntry) -> bool:
    """Whether shape at offsets lies inside the global shape."""
    if not len(leaf.shape) == len(leaf.offsets) == len(leaf.global_shape):
        return False
    corners = zip(leaf.offsets, leaf.shape, leaf.global_shape, strict=True)
    return all(offset + size <= whole for offset, size, whole in corners)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements with these strides lie side by side: what is allocated for them is what they take."""
    if len(shape) != len(strides):
        return False
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _check_cover(file: FileEntry, leaves: list[LeafEntry], path: str) -> None:
    """Leaves that overlap would be read in part only; bytes between them would belong to nobody."""
    ordered = sorted(leaves, key=lambda leaf: (leaf.start, leaf.end))
    if file.kind == "opaque":
        if ordered:
            raise DamagedError(f"{path}: leaf {ordered[0].name!r} lies in an opaque file", path=path)
        return
    position = ordered[0].start if ordered else file.nbytes
    if not position or position % _PAGE:
        raise DamagedError(f"{path}: the data of {file.name} starts at {position}, not on a page boundary", path=path)
    for leaf in ordered:
        if leaf.start != position:
            raise DamagedError(
                f"{path}: leaf {leaf.name!r} starts at {leaf.start}, the one before it ends at {position}",
                path=path,
                leaf=leaf.name,
            )
        position = leaf.end
    if position != file.nbytes:
        raise DamagedError(f"{path}: the leaves of {file.name} end at {position} of {file.nbytes} bytes", path=path)
