"""Makes the golden chain: a base and a few records, committed once, that every later version must read.

`python -m tests.golden.make_chain DIRECTORY` writes it as today's code would. tests/golden/chain1 was made so and is
never made again; `zstd.json` and `huffman.json` hold what is in it, by number of the last record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import LC, Hold, Top

LEAVES = (
    CodedLeaf("weight", "float32", (20, 15), "parameter"),
    CodedLeaf("half", "bfloat16", (20,), "parameter"),
    CodedLeaf("m", "float32", (30,), "moment1"),
    CodedLeaf("v", "float32", (30,), "moment2"),
    CodedLeaf("steps", "int64", (), "value"),
)
RECORDS = 7


def main(directory: Path) -> None:
    rng = np.random.default_rng(1)
    weight, v = rng.standard_normal((20, 15)).astype(np.float32), np.ones(30, np.float32)
    for entropy in ("zstd", "huffman"):
        moments = Hold() if entropy == "huffman" else Top(0)
        deltas = Deltas(parameters=LC(bits=3, entropy=entropy), first_moments=moments, small="pool", skip_every=4,
                        keep_segments=9)  # fmt: skip
        state = {"weight": weight, "half": np.arange(20, dtype=np.uint16), "m": v - 2, "v": v, "steps": np.array(0)}
        known, held = {}, {"m": state["m"]} if entropy == "huffman" else {}
        with ChainWriter.start(directory / entropy, LEAVES, state, step=0, deltas=deltas) as chain:
            for number in range(1, RECORDS + 1):
                state = {name: value + value.dtype.type(1) for name, value in state.items()}
                state["weight"] = state["weight"] + rng.standard_normal((20, 15)).astype(np.float32)
                if number == 6:
                    state["weight"][3, 3] = np.nan
                chain.append(number, state, note=b"note %d" % number)
                readers = {**held, **chain.state()}
                known[number] = {name: value.tobytes().hex() for name, value in readers.items()}
        (directory / f"{entropy}.json").write_text(json.dumps(known))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
