"""Who stores what, agreed on by many ranks: what that costs rank 0, and each of the others.

    python -m benchmarks.many.agreement [--ranks 64,1024,10240] [--leaves 1000] [--before SECONDS]

Simulated ranks, the real code: each makes its claims and dumps its message, rank 0 hears them all, finds the verdict
and makes the answers, and a rank works out its rows. Three states: every leaf sharded over all ranks (pure FSDP2), all
leaves the same on all of them (DDP), and eight shards of which many ranks hold copies (HSDP). Messages are made as rank
0 hears them, so that memory is what rank 0 needs: its peak over what the process had, as the kernel counts it. A fourth
state is as bad as can be: no two leaves have the same shape, and no two ranks hold the same content, which all hash.

`--before` runs the first version too (commit d2686d0, `tests/ranks/oracle.py`, JSON as it was), as far as one run of it
is expected to take less than that; the state of each case in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HERE), str(HERE / "src")]

CASES = ("sharded", "copies", "mixed", "worst")
SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096), (4096,), (32000, 4096), (4096, 1024))
MIXED_SHARDS = 8


def leaves_of(case: str, rank: int, world: int, count: int) -> Iterator[tuple[str, tuple[int, ...], Any, str, str]]:
    """Name, whole shape, box, mesh and digest of what a rank holds: layers of a transformer, thrice for the moments."""
    from stepwell.storage.format.box import Box

    shards = {"sharded": world, "copies": 1, "mixed": MIXED_SHARDS, "worst": world}[case]
    index = rank % shards
    for number in range(count):
        layer, part = divmod(number, 12)
        kind = ("model", "optimizer/state/exp_avg", "optimizer/state/exp_avg_sq")[part % 3]
        name = f"{kind}/layers.{layer}.block.{part // 3}.weight"
        first, *rest = SHAPES[part % len(SHAPES)] if case != "worst" else (20_000 + number, 64)
        shape = (first, *rest)
        low, high = first * index // shards, first * (index + 1) // shards
        box = Box((low, *(0 for _ in rest)), (high - low, *rest))
        if high == low:
            box = Box((0,) * len(shape), (0,) * len(shape))
        yield name, shape, box, "" if shards == 1 else "0123456789abcdef", f"{number} of {index}"


def after(case: str, world: int, count: int) -> dict[str, Any]:
    """One round by the code as it is."""
    from stepwell.ranks.claims import NO_DIGEST, Claims, Form, Listener
    from stepwell.ranks.share_verdict import ShareVerdict
    from stepwell.ranks.sharing import share
    from stepwell.storage.format.checksum import block_digest

    def claims_of(rank: int) -> Claims:
        found = {}
        for name, shape, box, mesh, content in leaves_of(case, rank, world, count):
            digest = NO_DIGEST if case == "sharded" else bytes.fromhex(block_digest(content.encode()))
            found[name] = Form("float32", shape, box, mesh), digest
        return Claims.of(found)

    clock, listener, heard, told_bytes, said = Clock(), Listener(), [], 0, 0.0
    for rank in range(world):
        claims = claims_of(rank)
        body = json.dumps({"type": "claims", "round": 256, **clock.run("said", claims.dump)}).encode()
        told_bytes += len(body)
        heard.append(clock.run("heard", lambda body=body: listener.hear(json.loads(body))))
    said = clock.seconds.pop("said") / world
    verdicts = clock.run("verdict", lambda: share(heard))
    made: dict[int, bytes] = {}

    def answer() -> int:
        total = 0
        for verdict in verdicts:
            if id(verdict) not in made:
                made[id(verdict)] = json.dumps({"type": "shares", "round": 256, **verdict.dump()}).encode()
            total += len(made[id(verdict)])
        return total

    answer_bytes = clock.run("answers", answer)
    mine = claims_of(world - 1)
    body = json.loads(made[id(verdicts[-1])])
    started = time.process_time()
    rows = ShareVerdict.load(body).rows(mine, world - 1)
    each = said + time.process_time() - started
    return clock.result(told_bytes, answer_bytes, each) | {"different": len(made), "rows": len(rows)}


def before(case: str, world: int, count: int) -> dict[str, Any]:
    """One round by the first version: a list for each leaf, and the holders' numbers with each leaf of each rank."""
    from stepwell.storage.format.box import Box
    from tests.ranks.oracle import Claim, share

    clock, heard, told_bytes, said = Clock(), [], 0, 0.0
    for rank in range(world):
        held = list(leaves_of(case, rank, world, count))

        def dump(held: list[Any] = held) -> bytes:
            leaves = {
                name: ["float32", shape, box.offsets, box.shape, f"{content:0>16.16} ", mesh, False]
                for name, shape, box, mesh, content in held
            }
            return json.dumps({"type": "claims", "round": 256, "leaves": leaves}).encode()

        def load(body: bytes) -> dict[str, Claim]:
            return {
                name: Claim(dtype, tuple(shape), Box(tuple(offsets), tuple(size)), *rest)
                for name, (dtype, shape, offsets, size, *rest) in json.loads(body)["leaves"].items()
            }

        body = clock.run("said", dump)
        told_bytes += len(body)
        heard.append(clock.run("heard", lambda body=body: load(body)))
    said = clock.seconds.pop("said") / world
    verdicts = clock.run("verdict", lambda: share(heard))
    answers = lambda: [json.dumps({"type": "shares", "round": 256, "rows": rows}).encode() for rows in verdicts]  # noqa: E731
    bodies = clock.run("answers", answers)  # all of them wait for the line's thread
    return clock.result(told_bytes, sum(map(len, bodies)), said) | {"different": len(bodies)}


class Clock:
    """CPU seconds of rank 0 by part, and its memory."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start_bytes = _resident()

    def run(self, part: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        found = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - started
        return found

    def result(self, told_bytes: int, answer_bytes: int, each: float) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {
            "seconds": self.seconds,
            "rank 0": sum(self.seconds.values()),
            "each": each,
            "memory": peak - self._start_bytes,
            "told": told_bytes,
            "answered": answer_bytes,
        }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _in_child(pipe: Any, which: str, case: str, world: int, count: int) -> None:
    pipe.send({"after": after, "before": before}[which](case, world, count))


def measure(which: str, case: str, world: int, count: int) -> dict[str, Any]:
    """One case in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(theirs, which, case, world, count))
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        child.join()
        return {"error": f"ended with {child.exitcode}"}
    child.join()
    return found


def line(which: str, case: str, world: int, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {which} | {case} | {world} | {found['error']} | | | | |"
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["seconds"].items())
    return (
        f"| {which} | {case} | {world} | {found['rank 0']:.2f} ({parts}) | {found['memory'] / 1e6:.0f} | "
        f"{found['told'] / 1e6:.1f} | {found['answered'] / 1e6:.2f} | {1e3 * found['each']:.1f} |"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024,4096,10240")
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--before", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    print(f"{options.leaves} leaves on each rank\n")
    print("| version | state | ranks | CPU s of rank 0 | memory MB | told MB | answered MB | CPU ms of each rank |")
    print("|---|---|---|---|---|---|---|---|")
    for which in ("before", "after"):
        for case in options.cases.split(","):
            taken = 0.0
            for world in map(int, options.ranks.split(",")):
                if which == "before" and 5 * taken > options.before:
                    continue  # four times the ranks, and more than four times the time
                started = time.monotonic()
                if which == "before" and not options.before:
                    continue
                found = measure(which, case, world, options.leaves)
                taken = time.monotonic() - started
                rows.append({"version": which, "state": case, "ranks": world, **found})
                print(line(which, case, world, found), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
