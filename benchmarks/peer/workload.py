"""The training that is measured: a GPT, or a loop that does nothing but change every tensor a little.

Owns:    model, optimizer, the flat view of their state, and the stamps that make a torn checkpoint visible.
Holds:   after `update` three elements of every parameter and moment hold the number of the step (times `STAMP`); a
         loaded state whose stamps differ is torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

MOMENTS = ("exp_avg", "exp_avg_sq")
STAMP = 2.0**-20
"""What a step adds to the stamps: exact, and small enough for the training to stay finite."""


@dataclass(frozen=True)
class Shape:
    """A GPT and its batch."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    sequence: int


SIZES = {
    "tiny": Shape(layers=2, width=256, vocabulary=1024, batch=2, sequence=32),
    "cpu": Shape(layers=12, width=768, vocabulary=9984, batch=2, sequence=32),  # 100 M parameters, 1.2 GB of state
    "gpu": Shape(layers=24, width=1536, vocabulary=31872, batch=16, sequence=1024),  # 779 M, 9.35 GB
}
# The kill test takes about a quarter of the state: the copy must be able to end within 0.15 s, the write must not.
KILL_SIZES = {
    "tiny": SIZES["tiny"],
    "cpu": Shape(layers=3, width=768, vocabulary=1984, batch=2, sequence=32),
    "gpu": Shape(layers=6, width=1536, vocabulary=4096, batch=4, sequence=512),
}


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.before_feed(x))))


class GPT(nn.Module):
    """Decoder-only transformer; input and output tables are two tensors, since not every peer takes shared ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Touch(torch.optim.Optimizer):
    """An optimizer with AdamW's state whose step only runs `change`: the cheapest step that a gate has to hold."""

    def __init__(self, parameters: Iterable[torch.Tensor], change: Callable[[], None]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.change = change

    def step(self, closure: Any = None) -> None:
        self.change()


class Workload:
    """A model and its optimizer on one device, trained on random tokens."""

    def __init__(self, model: nn.Module, *, device: str, shape: Shape | None, dispatch: bool = False) -> None:
        self.model, self.device, self.shape, self.is_dispatch = model, torch.device(device), shape, dispatch
        self.steps_done = 0
        self._stamps: list[torch.Tensor] = []
        self._counters: list[torch.Tensor] = []
        parameters = [p for p in model.parameters() if p.requires_grad]
        if dispatch:
            self.optimizer: torch.optim.Optimizer = Touch(parameters, self._stamp)
            self._scratch = [torch.zeros(16, device=self.device) for _ in range(64)]
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def fill_optimizer(self) -> None:
        """Give the optimizer its state without a step, as loaders that fill live tensors in place need it."""
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the training state under a name of its own: the form that all peers take."""
        flat = {}
        for name, parameter in self.model.named_parameters():
            flat[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                flat[f"optim.{name}.{key}"] = value
        return flat

    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state().values())

    # -- one iteration ------------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Forward and backward."""
        if self.is_dispatch:
            for _ in range(4):
                for tensor in self._scratch:
                    tensor.add_(1.0)
            return
        assert self.shape is not None
        size = (self.shape.batch, self.shape.sequence)
        tokens = torch.randint(self.shape.vocabulary, size, device=self.device)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.is_cuda):
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, and the stamp of its number in every tensor."""
        self.steps_done += 1
        self.optimizer.step()
        if not self.is_dispatch:
            self._stamp()

    def iterate(self) -> None:
        self.compute()
        self.update()

    @torch.no_grad()
    def _stamp(self) -> None:
        if not self._stamps:
            state = self.state()
            self._stamps = stamp_views(state)
            self._counters = [tensor for name, tensor in state.items() if name.endswith(".step")]
        torch._foreach_zero_(self._stamps)
        torch._foreach_add_(self._stamps, self.steps_done * STAMP)
        if self.is_dispatch:
            torch._foreach_add_(self._counters, 1.0)

    # -- checking -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def wipe(self) -> None:
        """Forget everything, so that only a load can bring it back."""
        torch._foreach_zero_(list(self.state().values()))

    def is_finite(self) -> bool:
        """A training that diverged is another one: stepwell keeps, and restores, what came before."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters())

    def found_stamps(self) -> list[int]:
        """The step numbers found in the tensors, counters of the optimizer included. One number: consistent."""
        state = self.state()
        stamps = torch.cat([view.float().cpu() for view in stamp_views(state)]) / STAMP
        counters = torch.stack([value.float().cpu() for name, value in state.items() if name.endswith(".step")])
        return sorted(set(torch.cat([stamps, counters]).tolist()))


def stamp_views(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """First, middle and last element of every tensor that is not a counter."""
    tensors = [tensor.view(-1) for name, tensor in state.items() if not name.endswith(".step")]
    return [flat[at : at + 1] for flat in tensors for at in sorted({0, len(flat) // 2, len(flat) - 1})]


def build(size: str, *, loop: str, device: str, kill: bool = False) -> Workload:
    """A fresh workload; the same bits every time."""
    torch.manual_seed(7)
    shape = (KILL_SIZES if kill else SIZES)[size]
    with torch.device(device):
        model = GPT(shape)
    work = Workload(model, device=device, shape=shape, dispatch=loop == "dispatch")
    if work.is_dispatch:
        work.fill_optimizer()
        for parameter in model.parameters():
            for moment in MOMENTS:
                work.optimizer.state[parameter][moment].normal_()
    return work
