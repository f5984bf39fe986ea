"""The attacks, each a function that forges a run directory, with what must come of it.

`python -m tests.hostile.attacks NAME DIRECTORY` makes one to look at.

    older    the forged checkpoint is refused with its file named, and the older one is used
    newest   the forgery is harmless: the newest checkpoint is restored, whole
    error    nothing is restored: an error that names the file, or says what is missing
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepwell.storage.format.document import MAX_DOCUMENT_BYTES
from tests.hostile.forge import BIG, Forgery, sparse

Outcome = Literal["older", "newest", "error"]


@dataclass(frozen=True)
class Attack:
    """`names`: what the event or the error has to mention."""

    make: Callable[[Forgery], Any]
    outcome: Outcome
    names: str


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, make: Callable[[Forgery], Any], outcome: Outcome = "older", names: str = "rank-00000.json"
) -> None:
    ATTACKS[name] = Attack(make, outcome, names)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# -- lengths and places -----------------------------------------------------------------------------------------------
attack("leaf of 2**60 bytes", lambda f: f.leaf(end=1 << 60, shape=[1 << 58]))
attack("shape whose product overflows", lambda f: f.leaf(shape=[1 << 40, 1 << 40]))
attack("shape of zero times 2**61", lambda f: f.leaf(shape=[0, 1 << 61]))
attack("negative shape", lambda f: f.leaf(shape=[-1]))
attack("leaf outside the file", lambda f: f.leaf(start=1 << 30, end=(1 << 30) + BIG * 4))
attack("leaf over the header", lambda f: f.leaf(start=0, end=BIG * 4))
attack("leaf with a negative start", lambda f: f.leaf(start=-BIG * 4, end=0))
attack("overlapping leaves", lambda f: f.record(lambda d: d["leaves"][1].update(d["leaves"][0], name="x")))
attack("element type load", lambda f: f.leaf(dtype="load"))
attack("element type serialization", lambda f: f.leaf(dtype="serialization"))
attack("codec of tomorrow", lambda f: f.leaf(codec="zstd"))
attack("file of 2**60 bytes", lambda f: f.file(nbytes=1 << 60))
attack("no checksums", lambda f: f.file(blocks=[]))
attack("checksum of another type", lambda f: f.file(blocks=[None]))
attack("blocks of one byte", lambda f: f.file(block_bytes=1))
attack("blocks of 2**40 bytes", lambda f: f.file(block_bytes=1 << 40))
attack("blocks of 64 MiB for a small file", lambda f: f.file(block_bytes=64 << 20), "newest", "")
attack("device that is none", lambda f: f.leaf(device="garbage:1"), "newest", "")
attack("device with a path", lambda f: f.leaf(device="../../x"))
attack("world of 2**60 ranks", lambda f: f.manifest(lambda d: d.update(world_size=1 << 60)), names="manifest.json")
attack(
    "ten thousand records",
    lambda f: f.manifest(lambda d: d.update(records=d["records"] * 10_000)),
    names="manifest.json",
)
attack("record size of 2**60", lambda f: f.manifest(lambda d: d["records"][0].update(nbytes=1 << 60)))

# -- names that lead out ----------------------------------------------------------------------------------------------
attack("file name ../", lambda f: f.file(name="../../canary/secret"))
attack("absolute file name", lambda f: f.file(name=str(f.canary / "secret")))
attack("file name ..", lambda f: f.file(name=".."))
attack("file name with a newline", lambda f: f.file(name="rank-00000.safetensors\n"))
attack("record name ../", lambda f: f.manifest(lambda d: d["records"][0].update(name="../../canary/secret")),
       names="manifest.json")  # fmt: skip
attack("absolute record name", lambda f: f.manifest(lambda d: d["records"][0].update(name=str(f.canary / "secret"))),
       names="manifest.json")  # fmt: skip


def link(path: Path, to: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(to)


def link_to_copy(forgery: Forgery, path: Path) -> None:
    """A link to a perfect copy outside."""
    outside = forgery.canary / path.name
    shutil.move(path, outside)
    path.symlink_to(outside)


attack("shard is a link", lambda f: link_to_copy(f, f.shard_path), names="rank-00000.safetensors")
attack("record is a link", lambda f: link_to_copy(f, f.record_path))
attack("manifest is a link", lambda f: link_to_copy(f, f.manifest_path), names="manifest.json")
attack("checkpoint is a link", lambda f: link_to_copy(f, f.directory), "older", "")
attack("shard is a link to a device", lambda f: link(f.shard_path, Path("/dev/zero")), names="rank-00000.safetensors")
attack("run.json is a link", lambda f: link_to_copy(f, f.paths.run), "error", "run.json")
attack("lineage is a link", lambda f: link_to_copy(f, f.paths.lineages), "error", "lineage")
attack(
    "a lineage is a link", lambda f: (f.lineage(2, parent=1), link_to_copy(f, f.paths.lineage(2))), "error", "0002.json"
)
attack("events are a link", lambda f: link(f.paths.events, f.canary / "secret"), "newest", "")
attack("progress is a link", lambda f: link(f.paths.progress, f.canary / "secret"), "newest", "")
attack("a shard's hard link", lambda f: os.link(f.shard_path, f.directory / "more"), "newest", "")


# -- things that are no files -----------------------------------------------------------------------------------------
def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


attack("shard is a pipe", lambda f: fifo(f.shard_path), names="rank-00000.safetensors")
attack("manifest is a pipe", lambda f: fifo(f.manifest_path), names="manifest.json")
attack("manifest is a directory", lambda f: directory(f.manifest_path), names="manifest.json")
attack("run.json is a pipe", lambda f: fifo(f.paths.run), "error", "run.json")
attack("run.json is a directory", lambda f: directory(f.paths.run), "error", "run.json")
attack("run.json is missing", lambda f: f.paths.run.unlink(), "error", "run.json")
attack("lineage is a file", lambda f: (shutil.rmtree(f.paths.lineages), f.paths.lineages.touch()), "error", "lineage")
attack("lineage is missing", lambda f: shutil.rmtree(f.paths.lineages), "error", "abandoned")
attack("events are a pipe", lambda f: fifo(f.paths.events), "newest", "")
attack("events are a directory", lambda f: directory(f.paths.events), "newest", "")
attack("progress is a pipe", lambda f: fifo(f.paths.progress), "newest", "")
attack("progress is a directory", lambda f: directory(f.paths.progress), "newest", "")

# -- sizes of small files ---------------------------------------------------------------------------------------------
attack("record of 100 GB", lambda f: sparse(f.record_path, 100 << 30))
attack("record over the limit", lambda f: sparse(f.record_path, MAX_DOCUMENT_BYTES + 1))
attack("manifest of 100 GB", lambda f: sparse(f.manifest_path, 100 << 30), names="manifest.json")
attack("run.json of 100 GB", lambda f: sparse(f.paths.run, 100 << 30), "error", "run.json")
attack("lineage of 100 GB", lambda f: sparse(f.paths.lineage(2), 100 << 30), "error", "0002.json")
attack("progress of 100 GB", lambda f: sparse(f.paths.progress, 100 << 30), "newest", "")
attack("shard of 100 GB", lambda f: sparse(f.shard_path, 100 << 30), names="rank-00000.safetensors")

# -- chains: nothing in them is newer than the checkpoint, and nobody needs them --------------------------------------
GOLDEN = Path(__file__).parent.parent / "golden" / "chain1" / "zstd"


def chain(forgery: Forgery) -> Path:
    """Where the chain of the newest checkpoint would be."""
    path = forgery.root / "chains" / forgery.id.directory
    path.mkdir(parents=True)
    return path


def golden_chain(forgery: Forgery) -> Path:
    """A good chain, of something else."""
    path = chain(forgery)
    shutil.copytree(GOLDEN, path, dirs_exist_ok=True)
    return path


attack("chains are a link", lambda f: link(f.root / "chains", f.canary), "newest", "")
attack("a chain is a link", lambda f: link(chain(f), f.canary), "newest", "")
attack("a chain's document is a link", lambda f: link(chain(f) / "chain.json", f.canary / "secret"), "newest", "")
attack("a chain's document of 100 GB", lambda f: sparse(chain(f) / "chain.json", 100 << 30), "newest", "")
attack("a chain's document is a pipe", lambda f: fifo(chain(f) / "chain.json"), "newest", "")
attack("a segment is a link", lambda f: link(golden_chain(f) / "00000001.seg", f.canary / "secret"), "newest", "")
attack("a segment of 100 GB", lambda f: sparse(golden_chain(f) / "00000001.seg", 100 << 30), "newest", "")
attack("a segment is a pipe", lambda f: fifo(golden_chain(f) / "00000001.seg"), "newest", "")
attack("a chain of another base", golden_chain, "newest", "")

# -- JSON -------------------------------------------------------------------------------------------------------------
DEEP = 1_000_000
attack("record is empty", lambda f: f.record_text("{}"))
attack("record is a list", lambda f: f.record_text("[1}"))
attack("record is cut", lambda f: f.record_text('{"format":"stepwell.record/1","run":}'))
attack("record of deep lists", lambda f: f.record_text('{"tree":' + "[" * DEEP + "]" * DEEP + "}"))
attack("record of deep objects", lambda f: f.record_text('{"tree":' + '{"a":' * DEEP + "1" + "}" * DEEP + "}"))
attack("record with a key twice", lambda f: f.record_text(
    f.record_path.read_text().rpartition(',"checksum"')[0].replace('"rank":0', '"rank":0,"rank":0') + "}"))  # fmt: skip
attack("record with NaN", lambda f: f.record(lambda d: d.update(created=float("nan"))))
attack("record with 1e999", lambda f: f.record_text(
    f.record_path.read_text().rpartition(',"checksum"')[0].replace('"created":1700000000.5', '"created":1e999') + "}"
))  # fmt: skip
attack("record with an integer of 100000 digits", lambda f: f.record_text('{"format":' + "1" * 100_000 + "}"))
attack("record that is not UTF-8", lambda f: f.record_text(b'{"format":"\xff\xfe"}'))
attack("record of version 2", lambda f: f.record(lambda d: d.update(format="stepwell.record/2")))
attack("record of another run", lambda f: f.record(lambda d: d.update(run="0" * 16)))
attack("record of another step", lambda f: f.record(lambda d: d.update(step=3)))
attack("manifest of another step", lambda f: f.manifest(lambda d: d.update(step=3)), names="manifest.json")
attack("manifest of deep lists", lambda f: f.manifest_path.write_bytes(b"[" * DEEP), names="manifest.json")
attack(
    "every field of the record is null", lambda f: f.record(lambda d: d.update({k: None for k in d if k != "format"}))
)

# -- values -----------------------------------------------------------------------------------------------------------
attack("unknown tag", lambda f: f.value({"$exec": "import os"}))
attack("tag beside a key", lambda f: f.value({"$tuple": [], "x": 1}))
attack("900 levels of values", lambda f: f.value(json.loads("[" * 900 + "]" * 900)))
attack("leaf that is not there", lambda f: f.value({"$tensor": "nowhere"}))
attack("leaf name is a number", lambda f: f.value({"$tensor": 5}))
attack("leaf without a name", lambda f: f.value({"$ndarray": {}}))
attack("tensor of unknown kind", lambda f: f.value({"$tensor": {"leaf": "values/big"}}))
attack(
    "enum of a module that is not loaded",
    lambda f: f.value({"$enum": ["antigravity", "X", "Y"]}),
    "error",
    "antigravity",
)
attack("enum that is a function", lambda f: f.value({"$enum": ["os", "system", "true"]}), "error", "os.system")
attack(
    "enum that is a class", lambda f: f.value({"$enum": ["subprocess", "Popen", "true"]}), "error", "subprocess.Popen"
)
attack(
    "enum through an attribute",
    lambda f: f.value({"$enum": ["os", "path.os.system", "x"]}),
    "error",
    "os.path.os.system",
)
attack("enum behind a lazy module", lambda f: f.value({"$enum": ["torch", "_dynamo", "x"]}), "error", "torch._dynamo")
attack("enum without such a member", lambda f: f.value({"$enum": ["enum", "Enum", "x"]}))
attack("enum with numbers", lambda f: f.value({"$enum": [1, 2, 3]}))
attack(
    "flag that is none",
    lambda f: f.value({"$flag": ["collections", "OrderedDict", 1]}),
    "error",
    "collections.OrderedDict",
)
attack("named tuple that is a tuple", lambda f: f.value({"$namedtuple": ["builtins", "tuple", [1]]}))
attack("named tuple that is a struct", lambda f: f.value({"$namedtuple": ["os", "stat_result", [1]]}))
attack(
    "named tuple of another length", lambda f: f.value({"$namedtuple": ["sched", "Event", [1]]}), "error", "sched.Event"
)
attack("element type value load", lambda f: f.value({"$dtype": "load"}))
attack("element type value of a lazy module", lambda f: f.value({"$dtype": "_dynamo"}))
attack("device value that is none", lambda f: f.value({"$device": "garbage"}))
attack("size of texts", lambda f: f.value({"$size": ["a"]}))
attack("array of objects", lambda f: f.value({"$ndarray": {"leaf": "values/big", "dtype": "|O", "shape": [BIG // 2]}}))
attack("array type with fields", lambda f: f.value({"$ndarray": {"leaf": "values/big", "dtype": "i4,O", "shape": [1]}}))
attack(
    "array of a huge shape", lambda f: f.value({"$ndarray": {"leaf": "values/big", "dtype": "<f4", "shape": [1 << 62]}})
)
attack("scalar object", lambda f: f.value({"$npscalar": ["|O", b64(bytes(8))]}))
attack("scalar of 2 GB", lambda f: f.value({"$npscalar": ["S2000000000", b64(b"x")]}))
attack("scalar that is two", lambda f: f.value({"$npscalar": ["<i4", b64(bytes(8))]}))
attack("integer that is none", lambda f: f.value({"$int": "zz"}))
attack("bytes that are none", lambda f: f.value({"$bytes": "!"}))
attack("text that is none", lambda f: f.value({"$str": b64(b"\xff")}))
attack("float that is none", lambda f: f.value({"$float": "one"}))
attack("set of lists", lambda f: f.value({"$set": [[1]]}))
attack("deque with a negative length", lambda f: f.value({"$deque": [[1], -1]}))
attack("factory eval", lambda f: f.value({"$defaultdict": ["eval", []]}))
attack("key twice", lambda f: f.value({"$dict": [["a", 1], ["a", 2]]}))
attack("pairs that are none", lambda f: f.value({"$ordered": [1, 2]}))
attack("range of texts", lambda f: f.value({"$range": ["a", "b", "c"]}))
attack("a leaf ten thousand times", lambda f: f.value(
    [{"$ndarray": {"leaf": "values/big", "dtype": "<f4", "shape": [BIG]}}] * 10_000), "newest", "")  # fmt: skip
attack(
    "a hundred thousand dimensions",
    lambda f: f.leaf(**{key: [1 << 61] * 100_000 for key in ("shape", "global_shape", "offsets")}),
)
attack("tree is a list", lambda f: f.record(lambda d: d.update(tree=[1])))
attack("tree without the run's own state", lambda f: f.record(lambda d: d["tree"].pop("stepwell")))
attack("model is a number", lambda f: f.tree(5, at="model"))
attack("model is a list", lambda f: f.tree([1, 2], at="model"))
attack("model is a bad state dict", lambda f: f.tree({"$state_dict": 5}, at="model"))
attack(
    "model without a weight", lambda f: f.tree({"bias": {"$tensor": "model/bias"}}, at="model"), "error", "model/weight"
)
attack("model with texts for tensors", lambda f: f.tree({"weight": "x", "bias": "y"}, at="model"), "error", "model")
attack("own step of another checkpoint", lambda f: f.own(step=7))
attack("own state is a list", lambda f: f.tree([1], at="stepwell"))
attack("own epoch is negative", lambda f: f.own(epoch=-1))
attack("own position is a text", lambda f: f.own(consumed="x"))
attack("own samples are a text", lambda f: f.own(data={"samples": "x"}))
attack("own length is negative", lambda f: f.own(data={"length": -1}))
attack("own data are a list", lambda f: f.own(data=[1]))
attack("own end is a number", lambda f: f.own(finished=1))
attack("generators are missing", lambda f: f.own(rng=None))
attack("generators are garbage", lambda f: f.own(rng={"python": [3, [1], None], "torch": {"$tensor": "values/small"}}))

# -- the shard's own header -------------------------------------------------------------------------------------------
SHARD = "rank-00000.safetensors"
attack("header length of 2**63", lambda f: f.shard(lambda d: struct.pack_into("<Q", d, 0, 1 << 63)), names=SHARD)
attack("header that ends elsewhere", lambda f: f.shard(lambda d: struct.pack_into("<Q", d, 0, 4000)), names=SHARD)
attack("header with other names", lambda f: f.shard(lambda d: d.__setitem__(slice(0, 4096), bytes(d[:4096]).replace(
    b"values/big", b"values/bog"))), names=SHARD)  # fmt: skip
attack("header that is no JSON", lambda f: f.shard(lambda d: d.__setitem__(8, 0x20)), names=SHARD)
attack("header of deep lists", lambda f: f.shard(lambda d: d.__setitem__(slice(8, 4096), b"[" * 4088)), names=SHARD)

# -- the run ----------------------------------------------------------------------------------------------------------
attack("run id with a path", lambda f: f.run(id="../../x"), "error", "run.json")
attack("run id of a thousand letters", lambda f: f.run(id="a" * 1000), "error", "run.json")
attack("seed below zero", lambda f: f.run(seed=-1), "error", "run.json")
attack("lineage that is its own parent", lambda f: f.lineage(2, parent=2), "error", "0002.json")
attack("lineages in a circle", lambda f: (f.lineage(2, parent=3), f.lineage(3, parent=2)), "error", "0002.json")
attack("lineage of another number", lambda f: f.lineage(2, number=5), "error", "0002.json")
attack("lineage from nowhere", lambda f: f.lineage(3, parent=2), "error", "lineage 2 is missing")
attack("lineage with a step below zero", lambda f: f.lineage(2, step=-5), "error", "0002.json")
attack("lineage names that are no numbers", lambda f: [(f.paths.lineages / name).touch() for name in (
    "\u00b2.json", "\u0663\u0663\u0663\u0663.json", "99999999.json", "x.json", "-001.json", "0000.json")],
    "newest", "")  # fmt: skip
attack("events are garbage", lambda f: f.paths.events.write_bytes(
    bytes(range(256)) + b"\n" + b"[" * DEEP + b'\n{"kind":5}\n{"kind":' + b"1" * 5000 + b"}\n" + b"x" * 3_000_000),
    "newest", "")  # fmt: skip
attack("progress is garbage", lambda f: f.paths.progress.write_bytes(b"stepwel1" + b"\xff" * 5000), "newest", "")
attack("progress is short", lambda f: f.paths.progress.write_bytes(b"stepwel1"), "newest", "")


if __name__ == "__main__":
    ATTACKS[sys.argv[1]].make(Forgery(Path(sys.argv[2])))
