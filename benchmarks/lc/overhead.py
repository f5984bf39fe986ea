"""(d) What checkpoints at every iteration cost, and what they save at a failure in iteration 7.

The talk: an iteration takes 91 s; six are saved for less than 4 s. Here an iteration is `--steps` training steps of a
network of the LC-Checkpoint experiments; after each a record is made durable. In iteration 7 the model is lost and
restored from the chain. The cost is what the six records and the restore took; saved are six iterations.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from report import interval, rows, save, wait_while_quiet
from workloads import KINDS, Workload

from stepwell.storage.chain.chain_writer import ChainWriter
from stepwell.storage.chain.replay import restore
from stepwell.storage.codecs.assignment import CodedLeaf, Deltas
from stepwell.storage.codecs.codec_spec import parse


def measure(name: str, folder: Path, seed: int, steps: int, scheme: str) -> dict:
    work = Workload(KINDS[name], folder, seed)
    base = work.state()
    leaves = [CodedLeaf(key, "float32", value.shape, "parameter") for key, value in base.items()]
    iterations, saves, cpu = [], [], []
    with tempfile.TemporaryDirectory() as place:
        deltas = Deltas(parameters=parse(scheme), small="pool")
        with ChainWriter.start(Path(place) / "chain", leaves, base, step=0, deltas=deltas) as chain:
            for number in range(1, 7):
                wait_while_quiet()
                start = time.perf_counter()
                for step in range(steps):
                    work.step((number - 1) * steps + step + 1)
                middle, used = time.perf_counter(), time.process_time()
                chain.append(number, work.state())
                saves.append(time.perf_counter() - middle)
                cpu.append(time.process_time() - used)
                iterations.append(middle - start)
        loss = work.loss()
        for step in range(steps // 2):  # half of iteration 7, then the failure
            work.step(6 * steps + step + 1)
        start = time.perf_counter()
        found = restore(Path(place) / "chain")
        work.load(dict(found.leaves))
        back = time.perf_counter() - start
    assert found.number == 6 and found.stopped is None
    cost = sum(saves) + back
    return {"workload": name, "seed": seed, "iteration": float(np.mean(iterations)), "saves": sum(saves),
            "saves_cpu": sum(cpu), "restore": back, "cost": cost, "saved": sum(iterations),
            "overhead": cost / sum(iterations), "loss": loss, "loss_restored": work.loss()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--scheme", default="lc(bits=3)")
    parser.add_argument("--only", default="lenet/mnist,lenet/fashion,alexnet/fashion")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        measure(name, options.data, int(seed), options.steps, options.scheme)
        for name in options.only.split(",")
        for seed in options.seeds.split(",")
    ]
    lines = []
    for name in dict.fromkeys(row["workload"] for row in found):
        own = [row for row in found if row["workload"] == name]
        mean = {key: float(np.mean([row[key] for row in own])) for key in own[0] if key != "workload"}
        lines.append([name, f"{mean['iteration']:.2f} s", f"{mean['saved']:.2f} s", f"{1000 * mean['saves']:.0f} ms",
                      f"{1000 * mean['saves_cpu']:.0f} ms", f"{1000 * mean['restore']:.0f} ms",
                      f"{mean['overhead']:.2%} +- {interval([row['overhead'] for row in own]):.2%}",
                      f"{mean['loss']:.3f} / {mean['loss_restored']:.3f}"])  # fmt: skip
    header = ["workload", "an iteration", "6 iterations saved", "6 records", "of these CPU", "restore", "cost / saved",
              "loss at record 6 / restored"]  # fmt: skip

    def draw(pyplot) -> None:
        _, axis = pyplot.subplots(figsize=(7, 3.5))
        names = [f"{row['workload']} {row['seed']}" for row in found]
        axis.barh(names, [100 * row["overhead"] for row in found], color="#1b7837")
        axis.axvline(1, color="grey", ls=":")
        axis.set_xlabel("cost of six records and the restore, % of the time saved (wanted: under 1)")

    text = f"{options.scheme}, a record after every {options.steps} steps.\n\n{rows(header, lines)}"
    save("overhead", "Overhead, and a failure in iteration 7", {"runs": found}, text, draw, options.out)


if __name__ == "__main__":
    main()
