"""(b) What each stage of LC-Checkpoint saves: E (exponent buckets), E+P (the largest buckets only), E+P+H (Huffman).

(c) How much of a difference the largest buckets hold: what is left of it, and of the loss it brings, with n of them.

Both on the trajectories of `rework.py`, with buckets over the whole model as in the paper. E+P+H is measured on the
files of a chain, heads and tables included; beside it the same symbols packed and compressed with zstd.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from report import rows, save, wait_while_quiet
from schemes import _flat, _shaped, run
from workloads import KINDS, State, Workload


def trajectory(work: Workload, count: int) -> list[State]:
    states = [work.state()]
    for iteration in range(1, count * work.kind.interval + 1):
        work.step(iteration)
        if iteration % work.kind.interval == 0:
            states.append(work.state())
            wait_while_quiet()
    return states


def buckets(delta: np.ndarray) -> dict[int, np.ndarray]:
    """Members of each bucket, by key, the most significant first; zeros are in none."""
    keys = delta.view(np.uint32) >> 23
    order = sorted((int(k) for k in np.unique(keys) if k & 255), key=lambda k: (-(k & 255), -(keys == k).sum(), k))
    return {key: np.flatnonzero(keys == key) for key in order}


def quantise(delta: np.ndarray, most: int | None = None) -> np.ndarray:
    found = np.zeros_like(delta)
    for members in list(buckets(delta).values())[:most]:
        values = delta[members]
        found[members] = values.min() / 2 + values.max() / 2
    return found


def exponents_only(states: list[State]) -> tuple[float, float]:
    """Stage E along a chain: bits of an index of fixed length, and the entropy of the indices."""
    saved, fixed, entropies = _flat(states[0]), [], []
    for state in states[1:]:
        delta = _flat(state) - saved
        counts = np.array([len(members) for members in buckets(delta).values()])
        zeros = delta.size - counts.sum()
        shares = np.append(counts, zeros)[np.append(counts, zeros) > 0] / delta.size
        fixed.append(math.ceil(math.log2(len(shares))) + 32 * len(counts) / delta.size)
        entropies.append(float(-(shares * np.log2(shares)).sum()))
        saved = saved + quantise(delta)
    return float(np.mean(fixed)), float(np.mean(entropies))


def significance(work: Workload, states: list[State]) -> dict:
    """For each number of buckets kept: what is left of one difference, and the loss with it."""
    before, after = _flat(states[-2]), _flat(states[-1])
    delta = after - before
    found, total = {}, len(buckets(delta))
    for kept in sorted({1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 31, total}):
        if kept <= total:
            there = quantise(delta, kept)
            work.load(_shaped(before + there, states[-1]))
            left = float(np.linalg.norm(delta - there) / np.linalg.norm(delta))
            found[kept] = {"error": left, "energy": 1 - left**2, "loss": work.loss()}
    by_tensor = {}
    for kept in (3, 7):
        leaves = [(states[-1][name] - states[-2][name]).reshape(-1) for name in states[-1]]
        left = sum(float(np.square(leaf - quantise(leaf, kept)).sum()) for leaf in leaves)
        by_tensor[kept] = 1 - left / float(np.square(delta).sum())
    work.load(states[-2])
    before_loss = work.loss()
    work.load(states[-1])
    return {
        "buckets": total,
        "kept": found,
        "energy_by_tensor": by_tensor,
        "loss_before": before_loss,
        "loss_after": work.loss(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--records", type=int, default=20)
    parser.add_argument("--only", default=",".join(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    stages, curves = {}, {}
    for name in options.only.split(","):
        work = Workload(KINDS[name], options.data, 0)
        states = trajectory(work, options.records)
        fixed, entropy = exponents_only(states)
        own = {"E": fixed, "E entropy": entropy}
        for bits in (2, 3):
            own[f"E+P{bits}"] = float(bits)
            for entropy_code in ("huffman", "zstd"):
                scheme = f"lc(bits={bits},scope=global,entropy={entropy_code})"
                own[f"E+P{bits}+{entropy_code}"] = 32 * run(scheme, states).share
        stages[name], curves[name] = own, significance(work, states)
        print(f"{name}: done", flush=True)
    report_stages(stages, options.out)
    report_curves(curves, options.out)


def report_stages(stages: dict, out: Path) -> None:
    mean = {stage: float(np.mean([own[stage] for own in stages.values()])) for stage in next(iter(stages.values()))}
    names = list(mean)
    cut = lambda bits: f"{1 - bits / 32:.1%} ({bits:.2f})"  # noqa: E731
    lines = [[name, *(cut(own[stage]) for stage in names)] for name, own in {**stages, "mean": mean}.items()]
    paper = ["the paper", "85 % (4.8)", "", "+9.3 points", "96.3 % (1.18)", "", "+6.2 points", "92.8 % (2.3)", ""]
    table = rows(["workload", *names], [*lines, paper])
    points = "\n".join(
        f"{bits} bit: P adds {100 * (mean['E'] - bits) / 32:+.2f} points to E, "
        f"Huffman {100 * (bits - mean[f'E+P{bits}+huffman']) / 32:+.2f}, "
        f"zstd over packed symbols instead {100 * (bits - mean[f'E+P{bits}+zstd']) / 32:+.2f}."
        for bits in (2, 3)
    )

    def draw(pyplot) -> None:
        _, axis = pyplot.subplots(figsize=(9, 4))
        shown = ["E", "E+P2", "E+P2+huffman", "E+P2+zstd", "E+P3", "E+P3+huffman", "E+P3+zstd"]
        for number, (name, own) in enumerate(stages.items()):
            places = np.arange(len(shown)) + number * 0.8 / len(stages)
            axis.bar(places, [own[stage] for stage in shown], 0.8 / len(stages), label=name)
        axis.set_xticks(np.arange(len(shown)) + 0.35, shown)
        axis.set_ylabel("bits per parameter (of 32)")
        axis.legend(fontsize=7)

    save("breakdown", "What each stage of LC-Checkpoint saves", {"bits": stages, "mean": mean},
         f"Bytes saved, and bits per parameter; mean over a chain.\n\n{table}\n{points}\n", draw, out)  # fmt: skip


def report_curves(curves: dict, out: Path) -> None:
    lines = []
    for name, own in curves.items():
        kept = own["kept"]
        way = own["loss_before"] - own["loss_after"]
        share = lambda n: f"{(own['loss_before'] - kept[n]['loss']) / way:.0%}" if n in kept and way else "-"  # noqa: B023, E731
        tensors = [f"{own['energy_by_tensor'][n]:.1%}" for n in (3, 7)]
        energy = [f"{kept[n]['energy']:.1%}" if n in kept else "-" for n in (1, 3, 7, 15)]
        lines.append([name, own["buckets"], *energy, *tensors, *(share(n) for n in (1, 3, 7, 15)), f"{way:.4f}"])
    header = ["workload", "buckets", *(f"energy in {n}" for n in (1, 3, 7, 15)),
              "energy in 3 of each tensor", "7 of each", *(f"loss gained with {n}" for n in (1, 3, 7, 15)),
              "loss gained with all"]  # fmt: skip

    def draw(pyplot) -> None:
        _, axes = pyplot.subplots(1, 2, figsize=(10, 4))
        for name, own in curves.items():
            removed = [own["buckets"] - n for n in own["kept"]]
            axes[0].plot(removed, [kept["error"] for kept in own["kept"].values()], marker=".", label=name)
            axes[1].plot(list(own["kept"]), [kept["error"] for kept in own["kept"].values()], marker=".", label=name)
        axes[0].set(xlabel="buckets removed, smallest exponents first", ylabel="error / difference")
        axes[1].set(xlabel="buckets kept", ylabel="error / difference", xlim=(0, 16))
        for n in (3, 7):
            axes[1].axvline(n, color="grey", lw=0.7, ls=":")
        axes[1].legend(fontsize=7)

    save(
        "buckets", "What the largest buckets hold of one difference", {"curves": curves}, rows(header, lines), draw, out
    )


if __name__ == "__main__":
    main()
