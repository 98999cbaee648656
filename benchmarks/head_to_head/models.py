"""A small ViT, a small convolutional net and a small GPT, each with the data that it learns."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.head_to_head.data import BYTES, LETTERS, SIDE, Batch, images, text

HEAD_WIDTH = 16
PATCH = 4


class Block(nn.Module):
    """A transformer block with separate weights of queries, keys and values."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width), of the same."""
        normed = self.norm1(x)
        heads = (
            layer(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A GPT for bytes, or a ViT for images: four blocks."""

    def __init__(self, width: int, of_images: bool) -> None:
        super().__init__()
        self.of_images = of_images
        if of_images:
            self.patch_embed = nn.Conv2d(1, width, PATCH, stride=PATCH)
        else:
            self.embed = nn.Embedding(256, width)
        self.positions = nn.Embedding((SIDE // PATCH) ** 2 if of_images else BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, not of_images) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(LETTERS) if of_images else 256)
        for table in (layer for layer in self.modules() if isinstance(layer, nn.Embedding)):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits: (batch, labels) of images, (batch, tokens, 256) of bytes."""
        x = self.patch_embed(x).flatten(2).mT if self.of_images else self.embed(x)
        x = self.norm(self.blocks(x + self.positions.weight))
        return self.head(x.mean(1) if self.of_images else x)


class ConvNet(nn.Sequential):
    """Four convolutions, a hidden linear layer and a head."""

    def __init__(self, width: int) -> None:
        half, double = width // 2, 2 * width
        sides = ((1, half, 1), (half, width, 2), (width, width, 1), (width, double, 2))
        super().__init__()
        for number, (inputs, outputs, stride) in enumerate(sides, start=1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, 3, stride, padding=1))
            self.add_module(f"norm{number}", nn.GroupNorm(4, outputs))
            self.add_module(f"relu{number}", nn.ReLU())
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(double * (SIDE // 4) ** 2, double)
        self.relu = nn.ReLU()
        self.head = nn.Linear(double, len(LETTERS))


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        title: Name in tables.
        model: Makes the model of a width.
        batch: Draws (inputs, targets) from a split.
        batch_size: Images or sequences of a step.
        held_out: Images or sequences of an evaluation.
    """

    title: str
    model: Callable[[int], nn.Module]
    batch: Callable[[str, int, Generator], Batch]
    batch_size: int
    held_out: int


TASKS = {
    "vit": Task("ViT", lambda width: Transformer(width, True), images, 64, 512),
    "convnet": Task("Convolutional net", ConvNet, images, 64, 512),
    "gpt": Task("GPT", lambda width: Transformer(width, False), text, 16, 128),
}


def made(task: Task, width: int, seed: int) -> nn.Module:
    """Return a model with the initial weights of a seed."""
    torch.manual_seed(seed)
    return task.model(width)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy in nats per image or byte."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
