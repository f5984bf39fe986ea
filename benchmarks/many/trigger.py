"""What a trigger that follows a trigger costs the training thread, for each tensor of the state.

    python -m benchmarks.many.trigger [--leaves 1200]

CPU time of one thread, medians: taking the state apart, cutting it to what one of two ranks stores, the layout, and the
samples by which copies are compared. Of a plain module with AdamW, of the same under FSDP2 on a mesh of one rank, and
of a state whose tensors are others each time. Then what the first step costs: the look at all that the ranks may share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HERE), str(HERE / "src")]
ROUNDS, WARM = 12, 3

Made = tuple[dict[str, Any], Callable[[], object]]


def plain(leaves: int, *, is_sharded: bool = False) -> Made:
    """Linear layers: each has two parameters, and four moments and two counters of AdamW."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(leaves // 8)))
    if is_sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    return {"model": model, "optimizer": optimizer}, train


def sharded(leaves: int) -> Made:
    """The same as parts of distributed tensors."""
    return plain(leaves, is_sharded=True)


def changing(leaves: int) -> Made:
    """A dictionary of tensors that are made anew."""
    import torch

    state = {f"tensor{number}": torch.randn(8, 8) for number in range(leaves)}

    def change() -> None:
        for name in state:
            state[name] = state[name] + 1

    return {"state": state}, change


def trigger(objects: dict[str, Any], change: Callable[[], object]) -> dict[str, float]:
    """Microseconds for a leaf, by part."""
    from itertools import count

    from stepwell.training.snapshot.arrange import Arranger
    from stepwell.training.snapshot.guard import Copies
    from stepwell.training.state.capture import Capture
    from stepwell.training.state.share import Cutter, held_box
    from stepwell.training.state.tracked import track

    tracked = track(objects)
    numbers = count(1)
    capture, arranger, copies = Capture(tracked), Arranger(tracked, lambda: next(numbers)), Copies()
    boxes = {leaf.name: held_box(leaf)[1] for leaf in capture.flatten().leaves}
    cutter = Cutter({name: (0, -(-box.row_count // 2), "0-1") for name, box in boxes.items()})
    found: dict[str, list[float]] = {"flatten": [], "cut": [], "arrange": [], "samples": []}
    for _ in range(ROUNDS):
        change()
        marks = [time.thread_time()]
        flat = capture.flatten({"step": 1})
        marks.append(time.thread_time())
        cut = cutter.cut(flat)
        marks.append(time.thread_time())
        arranger.arrange(cut)
        marks.append(time.thread_time())
        copies.take(cut)
        marks.append(time.thread_time())
        for part, start, end in zip(found, marks, marks[1:], strict=False):
            found[part].append(1e6 * (end - start) / len(boxes))
    return {part: statistics.median(values[WARM:]) for part, values in found.items()}


def first_look(megabytes: int) -> str:
    """What the look at a whole state takes from the training thread, and until the digests are there."""
    import torch
    from torch import nn

    from stepwell.training.snapshot.digests import Reading
    from stepwell.training.state.capture import Capture
    from stepwell.training.state.fingerprint import content_digest
    from stepwell.training.state.tracked import track

    model = nn.ParameterList(torch.randn(1 << 20) for _ in range(megabytes // 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(track({"model": model, "optimizer": optimizer}))
    leaves, is_read = capture.flatten().leaves, threading.Event()
    started = time.monotonic()
    for leaf in leaves:
        content_digest(leaf.local)
    before = time.monotonic() - started
    reading = Reading(lambda found, changed: is_read.set())
    started = time.monotonic()
    reading.begin(list(zip(leaves, capture.find_roles(leaves), strict=True)), set())
    begun = time.monotonic() - started
    while not is_read.wait(0.001):
        pass
    ended = time.monotonic() - started
    reading.close()
    return (
        f"{megabytes} MB on the CPU: hashing it takes {1e3 * before:.0f} ms; the training thread goes on after "
        f"{1e3 * begun:.1f} ms, the digests are there after {1e3 * ended:.0f} ms"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table. Returns 0."""
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=1200)
    parser.add_argument("--megabytes", type=int, default=1024)
    options = parser.parse_args(argv)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| state | us for each of its tensors | flatten | cut | arrange | samples |")
    print("|---|---|---|---|---|---|")
    for make in (plain, sharded, changing):
        found = trigger(*make(options.leaves))
        parts = " | ".join(f"{value:.2f}" for value in found.values())
        print(f"| {make.__name__} | {sum(found.values()):.2f} | {parts} |", flush=True)
    print(f"\n{first_look(options.megabytes)}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
