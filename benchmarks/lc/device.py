"""How fast parameters are quantised and packed on a GPU, beside copying them in the same run, and by torch.compile.

Times are those that the training stream waits (events around `encode` and `guard`), and those until the symbols are on
the host; best of several runs. Differences are normal, with a scale for each leaf. GB/s are of the float32 that goes
in. The part of the copy's bandwidth counts the bytes that have to move: 12 for each entry and its symbol with known
tables, 8 more where a pass before that makes them. By torch.compile: lc with known tables over one leaf, without
digest, error and outcome.

On the host (`--device cpu`) Triton's interpreter runs the kernels: that shows only that the script works.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import rows, save, wait_while_quiet

from stepwell.storage.codecs.assignment import CodedLeaf, Deltas, arrange
from stepwell.storage.codecs.codec_spec import Uniform, parse
from stepwell.storage.codecs.tables import stored_bits

SCHEMES = ("lc(bits=2)", "lc(bits=3)", "ternary", "uniform(step=1)")


class Clock:
    """Milliseconds on the device, or of the host where there is none."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"

    def best(self, call: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> float:
        found = []
        for _ in range(repeats):
            wait_while_quiet()
            prepare()
            found.append(self.once(call))
        return min(found)

    def once(self, call: Callable[[], object]) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


class Model:
    """Tensors of equal size that drift."""

    def __init__(self, leaves: int, entries: int, device: str) -> None:
        count = max(16, entries // leaves // 64 * 64)
        self.tensors = [0.02 * torch.randn(count, device=device) for _ in range(leaves)]
        self.leaves = [CodedLeaf(str(number), "float32", (count,), "parameter") for number in range(leaves)]
        self.noise = torch.randn(count, device=device)
        self.nbytes, self.entries = 4 * count * leaves, count * leaves

    def drift(self) -> None:
        for number, tensor in enumerate(self.tensors):
            tensor.add_(self.noise.roll(number), alpha=1e-4 * (1 + number % 4))


def copying(model: Model, clock: Clock, repeats: int) -> float:
    """GB/s read and written by a copy on the device."""
    source = torch.cat(model.tensors)
    room = torch.empty_like(source)
    milliseconds = clock.best(lambda: room.copy_(source), repeats)
    return 2 * source.nbytes / milliseconds / 1e6


def measure(scheme: str, model: Model, clock: Clock, repeats: int, copy: float) -> dict[str, Any]:
    from stepwell.storage.codecs.device.device_coder import DeviceCoder

    spec = parse(scheme)
    (part,) = arrange(model.leaves, Deltas(parameters=spec, small="pool"))
    coder = DeviceCoder.start(part, model.tensors, skip=Uniform(0.25))
    host: list[float] = []

    def encode(reuse: bool) -> None:
        begin = time.perf_counter()
        coder.encode(model.tensors, reuse=reuse)
        coder.guard()
        host.append(begin)

    def finish() -> None:
        if host:
            coder.finish()
            host[-1] = 1e3 * (time.perf_counter() - host[-1])

    found: dict[str, Any] = {"scheme": scheme, "leaves": len(model.leaves), "entries": model.entries}
    bits = stored_bits(spec)
    for name, reuse, nbytes in (("fresh", False, 20 + bits / 8), ("cached", True, 12 + bits / 8)):
        times = []
        for _ in range(repeats + 1):  # the first one compiles, or makes the tables
            wait_while_quiet()
            model.drift()
            times.append(clock.once(lambda reuse=reuse: encode(reuse)))
            finish()
        found[f"{name}_ms"], found[f"{name}_host_ms"] = min(times[1:]), min(host[-repeats:])
        found[name] = model.nbytes / found[f"{name}_ms"] / 1e6
        found[f"{name}_of_copy"] = nbytes * model.entries / found[f"{name}_ms"] / 1e6 / copy
    return found


def compiled(model: Model, clock: Clock, repeats: int) -> dict[str, Any]:
    """lc(bits=3) with known tables as torch.compile makes it, over all entries as one leaf."""
    values = torch.cat(model.tensors)
    reference = values - 1e-4 * torch.randn_like(values)
    keys = torch.tensor([113, 369, 112, 368, 111, 367, 110], dtype=torch.int32, device=values.device)
    table = torch.randn(8, device=values.device) * 1e-4

    def quantise(values: torch.Tensor, reference: torch.Tensor, packed: torch.Tensor) -> None:
        key = ((values - reference).view(torch.int32) >> 23) & 511
        symbols = torch.zeros_like(key)
        for number in range(7):
            symbols = torch.where(key == keys[number], number + 1, symbols)
        pairs = symbols.view(-1, 2)
        packed.copy_((pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8))
        reference.add_(table[symbols])

    packed = torch.empty(values.numel() // 2, dtype=torch.uint8, device=values.device)
    call = torch.compile(quantise)
    call(values, reference, packed)
    milliseconds = clock.best(lambda: call(values, reference, packed), repeats)
    return {"milliseconds": milliseconds, "speed": values.nbytes / milliseconds / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--entries", type=int, default=1_000_000_000)
    parser.add_argument("--leaves", default="16,400", help="how many tensors they are in, one table row each")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true", help="without the version by torch.compile")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    clock, found, copies = Clock(options.device), [], []
    for leaves in map(int, options.leaves.split(",")):
        model = Model(leaves, options.entries, options.device)
        copies.append(copying(model, clock, options.repeats))
        for scheme in SCHEMES:
            found.append(measure(scheme, model, clock, options.repeats, copies[-1]))
            print(found[-1], flush=True)
    other = None if options.no_compile else compiled(model, clock, options.repeats)
    cell = lambda row, name: f"{row[name]:.0f} ({row[f'{name}_of_copy']:.2f})"  # noqa: E731
    table = rows(
        ["codec", "tensors", "tables made, GB/s (x copy)", "known tables", "ms waited", "ms, known", "ms to the host"],
        [[r["scheme"], r["leaves"], cell(r, "fresh"), cell(r, "cached"), f"{r['fresh_ms']:.2f}",
          f"{r['cached_ms']:.2f}", f"{r['cached_host_ms']:.2f}"] for r in found],
    )  # fmt: skip
    beside = f"Copy on the device: {', '.join(f'{speed:.0f}' for speed in copies)} GB/s read and written."
    if other:
        beside += f" torch.compile, lc(bits=3) with known tables: {other['speed']:.0f} GB/s."
    result = {"codecs": found, "copy": copies, "compiled": other}
    save("device", "Quantising on the device", result, f"{beside}\n\n{table}", None, options.out, options.device)


if __name__ == "__main__":
    main()
