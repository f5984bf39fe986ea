"""Training loops for every optimizer and feature that issue 2 names, on the CPU or on CUDA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.training.snapshot.truth import Case

Make = Callable[[str], Case]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 48))


def loss_of(model: nn.Module, device: str) -> torch.Tensor:
    x = torch.randn(16, 48, device=device)
    return (model(x) - x).pow(2).mean()


def plain(make: Callable[[Any], torch.optim.Optimizer]) -> Make:
    """The common loop around one optimizer."""

    def build(device: str) -> Case:
        model = net().to(device)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

        def body(ckpt: Any, number: int) -> None:
            loss_of(model, device).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(number % 2))
            scheduler.step()

        return Case({"model": model, "optimizer": optimizer, "scheduler": scheduler}, body)

    return build


def several(device: str) -> Case:
    generator, critic = net().to(device), net().to(device)
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.RMSprop(critic.parameters(), momentum=0.5)

    def body(ckpt: Any, number: int) -> None:
        for model, optimizer in ((critic, second), (critic, second), (generator, first)):
            loss_of(model, device).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Case({"generator": generator, "critic": critic, "first": first, "second": second}, body)


def closure(device: str) -> Case:
    model = net().to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)

    def body(ckpt: Any, number: int) -> None:
        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, device)
            loss.backward()
            return loss

        optimizer.step(evaluate)

    return Case({"model": model, "optimizer": optimizer}, body)


def scaler_with_skipped_step(device: str) -> Case:
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)

    def body(ckpt: Any, number: int) -> None:
        loss = loss_of(model, device)
        scaler.scale(loss * (float("inf") if number % 3 == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Case({"model": model, "optimizer": optimizer, "scaler": scaler}, body)


def accumulation(device: str) -> Case:
    model = net().to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def body(ckpt: Any, number: int) -> None:
        for _ in range(3):
            loss_of(model, device).backward()
            if _ < 2:
                ckpt.step()  # no optimizer stepped: not a step, no trigger
        optimizer.step()
        optimizer.zero_grad()

    return Case({"model": model, "optimizer": optimizer}, body)


def averaged(device: str) -> Case:
    """An EMA in parameters without gradient: looks frozen, is not."""
    model = net().to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    def body(ckpt: Any, number: int) -> None:
        loss_of(model, device).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, value in zip(ema.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)

    return Case({"model": model, "ema": ema, "optimizer": optimizer}, body)


def averaged_through_data(device: str) -> Case:
    """The same EMA, changed so that no version shows it."""
    case = averaged(device)
    model, ema, optimizer = (case.tracked[name] for name in ("model", "ema", "optimizer"))

    def body(ckpt: Any, number: int) -> None:
        loss_of(model, device).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, value in zip(ema.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(value.data, 0.1)

    return Case(case.tracked, body)


def adapter_on_frozen_base(device: str) -> Case:
    """LoRA in small: most of the model is frozen and must be stored by reference."""
    model = net().to(device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    extra = nn.Linear(48, 48).to(device)
    optimizer = torch.optim.Adam(extra.parameters())

    def body(ckpt: Any, number: int) -> None:
        x = torch.randn(16, 48, device=device)
        (model(x) + extra(x) - x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Case({"model": model, "extra": extra, "optimizer": optimizer}, body)


def without_hook(device: str) -> Case:
    """A hand-written step, guarded by `updating()`."""
    model = net().to(device)

    def body(ckpt: Any, number: int) -> None:
        loss_of(model, device).backward()
        with ckpt.updating(), torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None

    return Case({"model": model}, body)


def spectral(device: str) -> Case:
    """Buffers that the forward pass itself changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(48, 64)), nn.Linear(64, 48)).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def body(ckpt: Any, number: int) -> None:
        loss_of(model, device).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Case({"model": model, "optimizer": optimizer}, body)


CASES: dict[str, Make] = {
    "sgd": plain(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "adam": plain(lambda p: torch.optim.Adam(p, foreach=False)),
    "adam-foreach": plain(lambda p: torch.optim.Adam(p, foreach=True)),
    "adamw-fused": plain(lambda p: torch.optim.AdamW(p, fused=True)),
    "adagrad": plain(lambda p: torch.optim.Adagrad(p)),
    "several": several,
    "closure": closure,
    "scaler": scaler_with_skipped_step,
    "accumulation": accumulation,
    "ema": averaged,
    "frozen-base": adapter_on_frozen_base,
    "no-hook": without_hook,
    "spectral": spectral,
}
CUDA_CASES: dict[str, Make] = {
    **CASES,
    "adam-capturable": plain(lambda p: torch.optim.Adam(p, capturable=True)),
}
