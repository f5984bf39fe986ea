"""One training run of `live.py`: a byte-level transformer on the sources of Python's standard library.

Writes one line for each step: number, seconds, loss, and the newest step that is durable. The host reads a loss when
the next step is queued, as loops do that do not hold the device up; with `--sync` at once, so that a line means that
the step is over.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn import functional

EPOCHS = 1000


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attend, self.mix = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(size, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(found.transpose(1, 2).reshape(size, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class Network(torch.nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(256, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Text(torch.utils.data.Dataset):
    """Pieces of one long text, which do not overlap."""

    def __init__(self, length: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        count = len(data) // (length + 1)
        whole = torch.frombuffer(bytearray(data[: count * (length + 1)]), dtype=torch.uint8)
        self.pieces = whole.view(count, length + 1)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pieces[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="", help="a run directory; empty: without stepwell")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--deltas", default="", help="codec of the parameters, such as lc(bits=3)")
    parser.add_argument("--base-seconds", type=float, default=20.0)
    parser.add_argument("--prefer", default=None)
    parser.add_argument("--steps", type=int, default=60)
    for name, usual in (("width", 256), ("layers", 4), ("length", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hold", action="store_true", help="records have parameters, coded on the device, no moments")
    parser.add_argument("--sync", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    is_cuda = options.device == "cuda"
    with torch.device(options.device):
        model = Network(options.width, options.layers, options.length)
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=is_cuda)
    loader = torch.utils.data.DataLoader(Text(options.length), batch_size=options.batch, shuffle=True)
    log = os.open(options.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    ckpt, batches, step = None, (batch for _ in range(EPOCHS) for batch in loader), 0
    if options.run:
        ckpt = open_run(options, model, optimizer, loader)
        step, batches = ckpt.status().step, (batch for _ in ckpt.epochs(EPOCHS) for batch in ckpt.data)
    before, waiting = time.perf_counter(), []

    def note() -> None:
        nonlocal before
        number, told, ready = waiting.pop(0)
        if ready is not None:
            ready.synchronize()
        value, now = told.item(), time.perf_counter()
        reached = 0 if ckpt is None else max(ckpt.status().delta_step or 0, ckpt.status().committed_step or 0)
        os.write(log, f"{number} {now - before:.6f} {value:.6f} {reached}\n".encode())
        before = now

    for text in batches:
        text = text.to(options.device).long()
        with torch.autocast(options.device, torch.bfloat16, enabled=is_cuda):
            loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        waiting.append((step, *send(loss.detach())))
        if options.sync or len(waiting) > 1:
            note()
        if step >= options.steps:
            break
    while waiting:
        note()
    if ckpt is not None:
        ckpt.close(save=False)


def send(loss: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """To the host, without waiting: `item` would wait for all that is queued, the next step too."""
    if not loss.is_cuda:
        return loss, None
    told, ready = torch.empty((), pin_memory=True), torch.cuda.Event()
    told.copy_(loss, non_blocking=True)
    ready.record()
    return told, ready


def open_run(options: argparse.Namespace, model, optimizer, loader):
    import stepwell
    from stepwell.storage.codecs.codec_spec import parse

    held = {"device": True, "first_moments": stepwell.Hold(), "second_moments": stepwell.Hold()}
    deltas = stepwell.Deltas(parameters=parse(options.deltas or "raw"), **(held if options.hold else {}))
    deltas = deltas if options.deltas else None
    policy = stepwell.Every(seconds=options.base_seconds) if options.base_seconds else stepwell.Never()
    ckpt = stepwell.Checkpointer(
        options.run, model=model, optimizer=optimizer, data=loader, seed=1, policy=policy, deltas=deltas
    )
    ckpt.restore(prefer=options.prefer)
    return ckpt


if __name__ == "__main__":
    main()
