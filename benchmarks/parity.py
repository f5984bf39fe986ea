"""What parity costs a core: encoding and rebuilding shards in memory, beside memcpy, in one run, all taking turns.

    python benchmarks/parity.py [--out build/parity] [--quick]

    memcpy         a shard copied to memory that is there already, whole; and by slices into one room, as parity is fed
    encode         what one member does for the parity it stores: it reads m times a shard from the others
    rebuild        one lost member, or m of them

Both rates are medians over rounds, in GB/s: `shard` counts the bytes of a shard (one that is protected, or those that
are rebuilt), `read` what went through the code. One process, one thread; nothing is sent, nothing is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "src"))

from stepwell.levels.protect.erasure import SLICE_BYTES, StripeLayout, encode, rebuild  # noqa: E402

CASES = [(1, 4), (1, 8), (2, 4), (2, 8)]


class Shards:
    """A set in memory, with its parity, which is computed when it is made."""

    def __init__(self, contents: list[memoryview], parity: int) -> None:
        self.contents, self.read_bytes = contents, 0
        self.layout = StripeLayout(tuple(map(len, contents)), parity)
        self.parity = [memoryview(bytearray(self.layout.parity_bytes)) for _ in contents]
        self.back = {member: memoryview(bytearray(len(contents[member]))) for member in range(parity)}
        for member in range(len(contents)):
            self.encode(member)

    def read(self, member: int, start: int, nbytes: int, into: memoryview) -> None:
        into[:] = self.contents[member][start : start + nbytes]
        self.read_bytes += nbytes

    def read_parity(self, member: int, start: int, nbytes: int, into: memoryview) -> None:
        into[:] = self.parity[member][start : start + nbytes]
        self.read_bytes += nbytes

    def store(self, member: int, offset: int, data: memoryview) -> None:
        self.parity[member][offset : offset + len(data)] = data

    def encode(self, member: int = 0) -> None:
        encode(self.layout, member, self.read, lambda offset, data: self.store(member, offset, data))

    def rebuild(self, count: int) -> None:
        def write(member: int, offset: int, data: memoryview) -> None:
            self.back[member][offset : offset + len(data)] = data

        rebuild(self.layout, range(count), self.read, self.read_parity, write)

    def check(self) -> None:
        for member, content in self.back.items():
            assert content == self.contents[member], f"member {member} came back wrong"


def copies(contents: list[memoryview]) -> dict[str, Callable[[], int]]:
    nbytes, target, room = len(contents[0]), numpy.zeros(len(contents[0]), numpy.uint8), bytearray(SLICE_BYTES)
    source = numpy.frombuffer(contents[0], numpy.uint8)

    def whole() -> int:
        numpy.copyto(target, source)
        return nbytes

    def sliced() -> int:
        view = memoryview(room)
        for start in range(0, nbytes, SLICE_BYTES):
            view[:] = contents[0][start : start + SLICE_BYTES]
        return nbytes

    return {"memcpy": whole, "memcpy by slices": sliced}


def works(shards: Shards) -> dict[str, tuple[Callable[[], None], int]]:
    """What is timed, and how many shards it is for."""
    parity, count = shards.layout.parity, shards.layout.members
    found: dict[str, tuple[Callable[[], None], int]] = {f"m={parity} n={count} encode": (shards.encode, 1)}
    for lost in sorted({1, parity}):
        found[f"m={parity} n={count} rebuild {lost}"] = ((lambda lost=lost: shards.rebuild(lost)), lost)
    return found


def measure(shard_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    random = numpy.random.default_rng(7)
    contents = [memoryview(random.bytes(shard_bytes)) for _ in range(max(count for _, count in CASES))]
    sets = [Shards(contents[:count], parity) for parity, count in CASES]
    plain = copies(contents)
    times: dict[str, list[tuple[float, int, int]]] = {}
    for number in range(rounds + 1):  # the first one makes everything ready, and is left out
        for name, copy in plain.items():
            started = time.perf_counter()
            nbytes = copy()
            times.setdefault(name, []).append((time.perf_counter() - started, nbytes, nbytes))
        for shards in sets:
            for name, (work, count) in works(shards).items():
                shards.read_bytes, started = 0, time.perf_counter()
                work()
                taken = time.perf_counter() - started
                times.setdefault(name, []).append((taken, count * shard_bytes, shards.read_bytes))
        if not number:
            times.clear()
    for shards in sets:
        shards.check()
    return {
        name: {
            "shard_gb_s": statistics.median(shard / taken for taken, shard, _ in found) / 1e9,
            "read_gb_s": statistics.median(read / taken for taken, _, read in found) / 1e9,
            "best_read_gb_s": max(read / taken for taken, _, read in found) / 1e9,
        }
        for name, found in times.items()
    }


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# stepwell: what parity costs a core, {result['date']}", ""]
    lines += [
        f"Machine: {result['machine']}. Shards of {result['shard_bytes'] >> 20} MiB, {result['rounds']} rounds.",
        "",
    ]
    lines += ["| what | shard GB/s | read GB/s | best read GB/s |", "|---|---|---|---|"]
    for name, found in result["found"].items():
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in found.values())} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "parity")
    parser.add_argument("--quick", action="store_true", help="small shards and a few rounds only, to try the script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shard_bytes, rounds = (24 << 20, 3) if options.quick else (252 << 20, 9)
    result = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"CPU, {os.cpu_count()} cores, numpy {version('numpy')}, pyeclib {version('pyeclib')}",
        "load": os.getloadavg()[0],
        "shard_bytes": shard_bytes,
        "rounds": rounds,
        "found": measure(shard_bytes, rounds),
    }
    (options.out / "parity.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "parity.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
