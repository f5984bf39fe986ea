"""What a resumable loader costs: beside torch's own, in one run, the two taking turns.

    python benchmarks/loader.py [--out build/loader] [--quick]

    capture        telling the position, as every checkpoint does
    per batch      the wrapped loader, without workers, whose batches cost next to nothing, less the bare one; and
                   `ckpt.data`, where each batch is also a step, with the trigger and the progress file
    throughput     both where a batch takes 1 ms to read: batches per second against the bare loader's
    keyed          seeding the three generators for a sample, and the throughput with it in a worker
    resume         from opening to the first batch, at position 0 and at 10^9, of 10^10 samples

Blocks of 512 batches of both loaders take turns, so that a busy neighbour hits both; differences and ratios are medians
over pairs of blocks, `best` is the difference of the fastest blocks. torch draws the order of a whole epoch when it
begins, stepwell as it goes: so there is also the mean over an epoch, its beginning included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "src"))

SIZE, BLOCK = 64, 512
"""Samples in a batch, and batches in a block: as many as the order is computed for at once."""


class Cheap(Dataset[int]):
    """Batches that are there at once, or after `seconds` of waiting, as for a disk."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        if self.seconds:
            time.sleep(self.seconds)
        return indices


def as_it_is(items: list[int]) -> list[int]:
    return items


def loader(blocks: int, seconds: float = 0.0, workers: int = 0) -> DataLoader[int]:
    data = Cheap((blocks + 2) * BLOCK * SIZE, seconds)
    return DataLoader(data, batch_size=SIZE, shuffle=True, collate_fn=as_it_is, num_workers=workers)


def checkpointed(given: Any, folder: str) -> Any:
    """A Checkpointer that never saves: what is left is the loader's own cost, and the trigger's."""
    import stepwell

    where = Path(tempfile.mkdtemp(dir=folder)) / "run"
    return stepwell.Checkpointer(where, policy=stepwell.Never(), data=given, seed=7, model=torch.nn.Linear(1, 1))


def wrapped(given: Any) -> Any:
    """What `ckpt.data` is, alone."""
    from stepwell.training.data.batches import Batches

    data = Batches(given)
    data.begin(7)
    return data


def against(bare: Iterable[Any], ours: Iterable[Any], pairs: int) -> dict[str, float]:
    """Blocks of batches of both, in turns, the order changing; the first pair starts everything and is left out."""
    iterators, times = (iter(bare), iter(ours)), []
    for number in range(pairs + 1):
        taken = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            for _ in range(BLOCK):
                next(iterators[which])
            taken[which] = (time.perf_counter() - started) / BLOCK
        times.append(taken)
    started, times = times[0], times[1:]
    epoch = [1e6 * statistics.fmean(taken[which] for taken in (started, *times)) for which in (0, 1)]
    return {
        "bare_us": 1e6 * statistics.median(left for left, _ in times),
        "ours_us": 1e6 * statistics.median(right for _, right in times),
        "added_over_epoch_us": epoch[1] - epoch[0],
        "added_us": 1e6 * statistics.median(right - left for left, right in times),
        "best_us": 1e6 * (min(right for _, right in times) - min(left for left, _ in times)),
        "rate": statistics.median(left / right for left, right in times),
        "pairs": pairs,
    }


def one_call(call: Callable[[], Any], count: int) -> dict[str, float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return {"median_us": 1e6 * statistics.median(times), "p99_us": 1e6 * sorted(times)[int(0.99 * count)]}


def resumes(rounds: int) -> dict[str, float]:
    """Seconds to the first batch, in turns."""
    from stepwell.training.data.cursor import Cursor
    from stepwell.training.data.source_choice import make_source

    source = make_source(DataLoader(Cheap(10**10), SIZE, shuffle=True, collate_fn=as_it_is), 7)
    times: dict[int, list[float]] = {0: [], 10**9: []}
    for _ in range(rounds):
        for position, found in times.items():
            started = time.perf_counter()
            next(source.open(Cursor(1, position // SIZE, position)))
            found.append(time.perf_counter() - started)
    first, late = (statistics.median(found[1:]) for found in times.values())
    return {"at_0_us": 1e6 * first, "at_1e9_us": 1e6 * late, "ratio": late / first}


def measure(folder: str, *, quick: bool) -> dict[str, Any]:
    from stepwell.training.data.augment import Ticket, seed_generators

    many, few = (4, 3) if quick else (40, 15)
    result: dict[str, Any] = {}
    bare = loader(many)
    result["per batch"] = against(bare, wrapped(loader(many)), many)
    given = checkpointed(loader(many), folder)
    result["per step"] = against(bare, given.data, many)
    at = given.data.at
    result["capture"] = one_call(lambda: given.data.saved(at), 10_000)
    result["capture"]["bytes"] = len(json.dumps(given.data.saved(at)))
    given.close(save=False)
    for workers in (0, 1):
        name, bare = f"1 ms per batch, {workers} workers", loader(few, 1e-3, workers)
        result[name] = against(bare, wrapped(loader(few, 1e-3, workers)), few)
        given = checkpointed(loader(few, 1e-3, workers), folder)
        result[f"{name}, with the trigger"] = against(bare, given.data, few)
        given.close(save=False)
    keys = iter(Ticket(list(range(10**6)), 3).each())
    result["keyed, per sample"] = one_call(lambda: seed_generators(b"secret", next(keys)), 10_000)
    result["resume"] = resumes(20 if quick else 150)
    return result


def markdown(result: dict[str, Any]) -> str:
    found = result["found"]
    batch, step, resume = found["per batch"], found["per step"], found["resume"]
    rows = [
        (
            "capture of the position",
            f"{found['capture']['median_us']:.1f} us, {found['capture']['bytes']} bytes",
            "50 us",
        ),
        ("added to a batch, over an epoch", f"{batch['added_over_epoch_us']:.1f} us", "10 us"),
        ("added to a batch, once it runs", f"{batch['added_us']:.1f} us, best {batch['best_us']:.1f} us", ""),
        ("added to a step, with its trigger", f"{step['added_us']:.1f} us, best {step['best_us']:.1f} us", ""),
    ]
    for name in found:
        if name.startswith("1 ms"):
            wanted = "" if "trigger" in name else "99 %"
            rows.append((f"batches per second, {name}", f"{100 * found[name]['rate']:.1f} % of bare", wanted))
    rows += [
        ("keyed randomness, for a sample", f"{found['keyed, per sample']['median_us']:.1f} us", ""),
        ("first batch at position 0", f"{resume['at_0_us']:.0f} us", ""),
        ("first batch at position 10^9", f"{resume['at_1e9_us']:.0f} us ({resume['ratio']:.2f} x)", ""),
    ]
    lines = [f"# stepwell: what a resumable loader costs, {result['date']}", "", f"Machine: {result['machine']}", ""]
    lines += ["| what | found | wanted |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "loader")
    parser.add_argument("--quick", action="store_true", help="a few rounds only, to try the script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": f"CPU, {os.cpu_count()} cores, torch {torch.__version__}",
            "load": os.getloadavg()[0],
            "found": measure(folder, quick=options.quick),
        }
    (options.out / "loader.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "loader.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
