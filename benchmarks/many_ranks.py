"""How stepwell grows with the number of ranks: the real code, with many ranks in a few processes on this machine.

    python benchmarks/many_ranks.py exchange [--ranks 64,256,1024] [--processes 4] [--node-size 8] [--out DIRECTORY]
    python benchmarks/many_ranks.py line
    python benchmarks/many_ranks.py commit [--leaves 1000]                # rank 0's agent
    python benchmarks/many_ranks.py restart [--leaves 1000]               # what each rank reads
    python -m benchmarks.many.agreement                                   # who stores what
    python benchmarks/many_ranks.py processes                             # 2 to 32 real ranks with gloo
    PYTHONPATH=CHECKOUT/src python benchmarks/many_ranks.py exchange      # another version, with this harness

Each rank is a thread. All of them share this machine's cores, which a real job does not do: the seconds are those of
all ranks' work together, so they have to grow in proportion to the ranks, and not faster. Requests, connections and
descriptors are those of a real job. Each part is a module of `many/`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "src")]
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch's store may look up who connects, for its log

from many.report import fit, head, write  # noqa: E402

PARTS = ("exchange", "line", "commit", "restart", "processes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="part", required=True)
    parts = {name: importlib.import_module(f"many.{name}") for name in PARTS}
    for name, part in parts.items():
        its = parsers.add_parser(name, description=part.ABOUT)
        its.add_argument("--ranks", default=",".join(map(str, getattr(part, "RANKS", (64, 256, 1024)))))
        its.add_argument("--processes", type=int, default=4)
        its.add_argument("--node-size", type=int, default=8, help="ranks of a node")
        its.add_argument("--out", type=Path, default=HERE.parent / "build" / "many_ranks")
        part.add_arguments(its)
    options = parser.parse_args()
    part = parts[options.part]
    rows = []
    for size in map(int, options.ranks.split(",")):
        try:
            rows.append({"ranks": size, **part.measure(size, options)})
        except RuntimeError as error:  # a row that says why, beside those that went well
            rows.append({"ranks": size, "error": str(error)})
        print(rows[-1], file=sys.stderr, flush=True)
    result = {"head": head(options.part), "rows": rows, "fits": {name: fit(rows, name) for name in part.FIT}}
    print(write(result, part.COLUMNS, options.out))


if __name__ == "__main__":
    main()
