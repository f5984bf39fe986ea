"""The seven networks of the talk, with inputs of their shape made on the device, and a small stand-in for each.

Owns:    model, optimizer and one iteration of each network, and what the talk said of it.
Not:     checkpoints, clocks.

On CUDA: bf16 autocast over fp32 weights by default (`tf32`: fp32 with TF32 products), channels last for images, no
cudnn.benchmark (it would lengthen every restart). `--quick` trains the stand-ins: a few million parameters, any device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

IMAGENET, CLASSES, VOCABULARY, SEQUENCE = 1_281_167, 1000, 30522, 512
Precision = Literal["bf16", "tf32"]


class Missing(Exception):
    """The library a network comes from is not installed."""


@dataclass(frozen=True)
class Network:
    """One of the seven. `weight`: its share of a time budget, by the size of its state."""

    name: str
    label: str
    batch: int
    small_batch: int
    """What fits into 11 GiB."""
    size: int
    talk_recovery: float
    talk_epoch_recovery: float
    weight: float = 1.0
    width: int = 24

    @property
    def is_text(self) -> bool:
        return self.name == "bert-large"

    @property
    def iterations_per_epoch(self) -> int:
        """Of ImageNet's size; for BERT-Large, whose talk figure has another data set, as many sequences."""
        return IMAGENET // self.batch


_ALL = (
    Network("resnet18", "ResNet18", 256, 64, 224, 5, 840),
    Network("resnet50", "ResNet50", 256, 64, 224, 24, 2100),
    Network("resnext101", "ResNeXt101", 128, 32, 224, 32, 7080, weight=1.5),
    Network("densenet121", "DenseNet121", 128, 32, 224, 7, 2340),
    Network("vgg16", "VGG16", 256, 64, 224, 25, 5700, weight=2, width=32),
    Network("inception", "InceptionV3", 256, 64, 299, 27, 3000),
    Network("bert-large", "BERT-Large", 32, 4, SEQUENCE, 85, 4920, weight=3.5),
)
NETWORKS = {network.name: network for network in _ALL}
SHORT = Network("short", "8 linear layers, AdamW", 8192, 256, 2048, 0, 0, width=1024)
"""Not of the talk: iterations of milliseconds. On CUDA `size` and `batch`, elsewhere `width` and `small_batch`."""


class SmallImages(nn.Module):
    """Stands in for the six: convolutions, batch norms, one wide layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2)
        self.wide, self.head = nn.Linear(2 * width * 49, 24 * width), nn.Linear(24 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
        return self.head(F.relu(self.wide(x.flatten(1))))


class SmallText(nn.Module):
    """Stands in for BERT-Large."""

    def __init__(self, width: int = 128, vocabulary: int = 4000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Work:
    """A network in training."""

    def __init__(self, network: Network, *, device: str, quick: bool, precision: Precision, batch: int | None) -> None:
        self.network, self.device, self.quick, self.precision = network, torch.device(device), quick, precision
        self.batch = batch or (4 if quick else network.batch)
        if network is SHORT and device == "cpu":
            self.batch = batch or network.small_batch
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # all cores: two runs alone differ by half
        torch.manual_seed(7)
        if quick and self.device.type == "cpu":
            torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        with torch.device(device):
            self.model: nn.Module = self._small() if quick else self._whole()
        if network is not SHORT and not network.is_text:
            self.model = self.model.to(memory_format=torch.channels_last)
        parameters = self.model.parameters()
        if network is SHORT or network.is_text:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
        self._step: Callable[[], torch.Tensor] = self._text_loss if network.is_text else self._image_loss
        if network is SHORT:
            self._step = self._short_loss

    def _small(self) -> nn.Module:
        if self.network is SHORT:
            return _layers(128)
        return SmallText() if self.network.is_text else SmallImages(self.network.width)

    def _whole(self) -> nn.Module:
        if self.network is SHORT:
            return _layers(SHORT.size if self.device.type == "cuda" else SHORT.width)
        return _full(self.network)

    def iterate(self) -> None:
        """Input, forward, backward, optimizer step."""
        self.optimizer.zero_grad()
        with self._autocast():
            loss = self._step()
        loss.backward()
        self.optimizer.step()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cuda" and self.precision == "bf16":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _image_loss(self) -> torch.Tensor:
        side = 32 if self.quick else self.network.size
        images = torch.randn(self.batch, 3, side, side, device=self.device).to(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (self.batch,), device=self.device)
        found = self.model(images)
        if not isinstance(found, torch.Tensor):  # Inception: two heads
            return F.cross_entropy(found.logits, labels) + 0.4 * F.cross_entropy(found.aux_logits, labels)
        return F.cross_entropy(found, labels)

    def _short_loss(self) -> torch.Tensor:
        return self.model(torch.randn(self.batch, self.model[0].in_features, device=self.device)).pow(2).mean()

    def _text_loss(self) -> torch.Tensor:
        if self.quick:
            tokens = torch.randint(4000, (self.batch, 16), device=self.device)
            return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        tokens = torch.randint(VOCABULARY, (self.batch, SEQUENCE), device=self.device)
        return self.model(input_ids=tokens, labels=tokens).loss

    def state_bytes(self) -> int:
        """Of what a checkpoint holds, once the optimizer has stepped; tied weights once."""
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in (*self.model.state_dict().values(), *held) if isinstance(value, torch.Tensor)]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _layers(width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])


def _full(network: Network) -> nn.Module:
    if network.is_text:
        try:
            from transformers import BertConfig, BertForMaskedLM
        except ImportError as error:
            raise Missing(f"transformers is not installed ({error})") from None
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        return BertForMaskedLM(BertConfig(**sizes))
    try:
        from torchvision import models
    except ImportError as error:
        raise Missing(f"torchvision is not installed ({error})") from None
    if network.name == "inception":
        return models.inception_v3(weights=None, init_weights=False)
    name = {"resnext101": "resnext101_32x8d"}.get(network.name, network.name)
    return getattr(models, name)(weights=None)


def build(name: str, *, device: str, quick: bool, precision: Precision = "bf16", batch: int | None = None) -> Work:
    """A fresh network. Raises Missing."""
    return Work({**NETWORKS, "short": SHORT}[name], device=device, quick=quick, precision=precision, batch=batch)
