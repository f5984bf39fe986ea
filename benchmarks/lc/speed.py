"""How fast the codecs are on one core, as ratios to memcpy in the same run, and what using tables again saves.

CPU time of this thread, best of several runs: the machine may be shared. Differences are normal, with a scale for each
tensor; the sizes of the records are those of such differences, not of a network. Encoding takes a digest of the state
for every record, a restore one for a segment of them: figures with it are of the sum of the times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report import rows, save, wait_while_quiet

from stepwell.storage.chain.chain_image import ChainImage
from stepwell.storage.codecs import parts
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange
from stepwell.storage.codecs.codec_spec import parse
from stepwell.storage.codecs.parts import Memory, apply, code, read

SCHEMES = ("lc(bits=2)", "lc(bits=3)", "ternary", "uniform(step=1)", "uniform(step=0.25)", "lc(bits=2,entropy=huffman)",
           "top(mantissa=3)", "zstd", "xor")  # fmt: skip
SEGMENT = 16
"""Records from one skip record to the next, by default."""


def best(call: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> float:
    found = []
    for _ in range(repeats):
        wait_while_quiet()
        prepare()
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return min(found)


def measure(scheme: str, size: int, repeats: int) -> dict:
    rng = np.random.default_rng(0)
    spec = parse(scheme)
    role = "parameter" if spec.is_delta else "moment1"
    shares = [0.5, 0.25, 0.15, 0.1]
    leaves = [CodedLeaf(str(i), "float32", (int(size * share),), role) for i, share in enumerate(shares)]
    options = Deltas(parameters=spec) if spec.is_delta else Deltas(first_moments=spec)
    (part,) = arrange(leaves, options)
    old = [rng.standard_normal(leaf.count).astype(np.float32) * np.float32(0.02) for leaf in leaves]
    new = [
        line + rng.standard_normal(line.size).astype(np.float32) * np.float32(1e-4 * (i + 1))
        for i, line in enumerate(old)
    ]
    image, memory = ChainImage([part]), Memory()
    array = image.arrays[0]
    values = new if part.is_floats else [line.view(np.uint8) for line in new]
    reset = lambda: image.fill([old if part.is_floats else [line.view(np.uint8) for line in old]])  # noqa: E731
    nbytes = sum(line.nbytes for line in new)
    record: list[bytes] = []

    def encode(reuse: bool) -> None:
        nonlocal record
        record, _ = code(part, values, array, memory, reuse=reuse)

    fresh = best(lambda: encode(False), repeats, reset)
    reset()
    encode(False)
    first = b"".join(record)
    cached = best(lambda: encode(True), repeats, reset) if spec.is_delta else fresh
    back = best(lambda: apply(part, [read(part, memoryview(first), Memory())], array), repeats, reset)
    room = np.empty_like(array)
    memcpy = best(lambda: np.copyto(room, array), repeats)
    digest = best(image.digest, repeats)
    return {"scheme": scheme, "encode": nbytes / fresh / 1e9, "encode_cached": nbytes / cached / 1e9,
            "encode_digest": nbytes / (fresh + digest) / 1e9, "restore": nbytes / back / 1e9,
            "restore_digest": nbytes / (back + digest / SEGMENT) / 1e9, "memcpy": nbytes / memcpy / 1e9,
            "digest": nbytes / digest / 1e9, "bits": 8 * len(first) / (nbytes / 4)}  # fmt: skip


def small_records(entropy: str, dictionary_bytes: int, reuse: bool, entries: int, records: int = 40) -> dict:
    """What using code tables again, or a dictionary, saves where records are small: bits for an entry."""
    rng = np.random.default_rng(1)
    leaf = CodedLeaf("x", "float32", (entries,), "parameter")
    (part,) = arrange([leaf], Deltas(parameters=parse(f"lc(bits=3,entropy={entropy})"), small="pool"))
    image, memory = ChainImage([part]), Memory()
    value, sizes = np.zeros(entries, np.float32), []
    start = time.thread_time()
    for _ in range(records):
        value = value + rng.standard_normal(entries).astype(np.float32)
        section, _ = code(part, [value], image.arrays[0], memory, reuse=reuse, dictionary_bytes=dictionary_bytes)
        sizes.append(sum(map(len, section)))
    seconds = time.thread_time() - start
    return {"entropy": entropy, "dictionary": dictionary_bytes, "reuse": reuse, "entries": entries,
            "bits": 8 * float(np.mean(sizes)) / entries, "bits_late": 8 * float(np.mean(sizes[-10:])) / entries,
            "microseconds": 1e6 * seconds / records}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--entries", type=int, default=16_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    parts._SHARED_NBYTES = 1 << 62  # nothing is shared: this is about one core
    found = []
    for scheme in SCHEMES:
        slow = "huffman" in scheme
        found.append(measure(scheme, options.entries // (8 if slow else 1), 2 if slow else options.repeats))
        print(found[-1], flush=True)
    ways = (("zstd", 0, False), ("zstd", 0, True), ("zstd", 2048, True), ("huffman", 0, False), ("huffman", 0, True))
    small = [small_records(*way, entries) for entries in (500, 2000, 8000) for way in ways]
    ratio = lambda row, key: f"{row[key]:.2f} ({row[key] / row['memcpy']:.2f})"  # noqa: E731
    table = rows(
        ["codec", "encode GB/s (x memcpy)", "with the digest", "tables used again", "restore", "with a digest in 16",
         "memcpy GB/s", "digest", "bits"],
        [[r["scheme"], ratio(r, "encode"), f"{r['encode_digest']:.2f}", ratio(r, "encode_cached"), ratio(r, "restore"),
          f"{r['restore_digest']:.2f}", f"{r['memcpy']:.1f}", f"{r['digest']:.1f}", f"{r['bits']:.2f}"] for r in found],
    )  # fmt: skip
    second = rows(
        ["entries", "entropy code", "tables again", "dictionary", "bits an entry", "in the last 10", "us a record"],
        [[r["entries"], r["entropy"], "yes" if r["reuse"] else "no", r["dictionary"] or "-", f"{r['bits']:.3f}",
          f"{r['bits_late']:.3f}", f"{r['microseconds']:.0f}"] for r in small],
    )  # fmt: skip
    by_name = {row["scheme"]: row for row in found}
    two, wanted = by_name["lc(bits=2)"], by_name["lc(bits=3)"]
    verdict = (
        f"Wanted for lc(bits=3): encode >= 0.6 GB/s, found {wanted['encode']:.2f}; restore >= 5 GB/s, found "
        f"{wanted['restore']:.2f}. lc(bits=2): {two['encode']:.2f} and {two['restore']:.2f}."
    )

    def draw(pyplot) -> None:
        _, axis = pyplot.subplots(figsize=(9, 4))
        names = [row["scheme"] for row in found]
        for number, key in enumerate(("encode", "encode_cached", "restore")):
            axis.bar(
                np.arange(len(names)) + 0.27 * number, [row[key] / row["memcpy"] for row in found], 0.27, label=key
            )
        axis.set_xticks(np.arange(len(names)) + 0.27, names, rotation=25, fontsize=7)
        axis.set_ylabel("x memcpy")
        axis.legend()

    about = "Small records, and what is carried on from one to the next (lc, 3 bits, normal differences):"
    text = f"{verdict}\n\n{table}\n{about}\n\n{second}"
    save("speed", "Speed of the codecs on one core", {"codecs": found, "small_records": small}, text, draw, options.out)


if __name__ == "__main__":
    main()
