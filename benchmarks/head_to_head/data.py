"""Training and held-out data that need no network: letters in Matplotlib's fonts, and source code.

A batch is drawn anew from a generator, so training never sees a batch twice.
"""

import math
import string
import sysconfig
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample

from scripts.prepare_corpus import deal, find_files

LETTERS = string.ascii_uppercase + string.digits
FONTS = ("DejaVuSans", "DejaVuSans-Oblique", "DejaVuSansMono-Bold", "DejaVuSerif", "STIXGeneral")
DRAWN, SIDE = 40, 20
"""Pixels of the side of a letter as it is drawn, and of an image."""

NOISE = 0.3
"""Standard deviation of what is added to each pixel; paper is 0, and ink is 1."""

BYTES = 64
"""Bytes of a sequence."""

type Batch = tuple[Tensor, Tensor]


@cache
def _glyphs() -> Tensor:
    """Return each letter in each font, (fonts x letters, 1, DRAWN, DRAWN)."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    drawn = []
    for name in FONTS:
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), size=28)
        for letter in LETTERS:
            image = Image.new("L", (DRAWN, DRAWN))
            ImageDraw.Draw(image).text((DRAWN / 2, 30), letter, fill=255, font=font, anchor="ms")
            drawn.append(torch.from_numpy(np.array(image)))
    return torch.stack(drawn)[:, None].float() / 255


def images(_: str, count: int, generator: Generator) -> Batch:
    """Return turned, scaled and shifted letters with noise, and which letters they are.

    Args:
        _: The split; both have the same fonts and other draws.
        count: Number of images.
        generator: Source of all random numbers.

    Returns:
        Images (count, 1, SIDE, SIDE) and labels (count,).
    """
    chosen = torch.randint(len(FONTS) * len(LETTERS), (count,), generator=generator)
    turn, size, x, y = torch.rand(4, count, generator=generator) * 2 - 1
    angle, zoom = turn * math.pi / 12, 1 + 0.2 * size
    cosine, sine = zoom * angle.cos(), zoom * angle.sin()
    rows = (torch.stack([cosine, -sine, 0.1 * x], 1), torch.stack([sine, cosine, 0.1 * y], 1))
    grid = affine_grid(torch.stack(rows, 1), [count, 1, SIDE, SIDE], align_corners=False)
    clean = grid_sample(_glyphs()[chosen], grid, align_corners=False)
    noise = NOISE * torch.randn(clean.shape, generator=generator)
    return clean + noise, chosen % len(LETTERS)


@cache
def _source(split: str) -> Tensor:
    """Return the bytes of the standard library's files in a split, one after another."""
    skipped = {"test", "tests", "site-packages", "idlelib", "__pycache__"}
    files = dict(find_files([Path(sysconfig.get_paths()["stdlib"])], ".py", skipped))
    splits = deal(list(files), valid_percent=5, test_percent=5)
    text = b"".join(path.read_bytes() for name, path in files.items() if splits[name] == split)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def text(split: str, count: int, generator: Generator) -> Batch:
    """Return sequences of the standard library's source code, and the byte after each byte.

    Args:
        split: ``train`` or ``test``, which have different files.
        count: Number of sequences.
        generator: Source of all random numbers.

    Returns:
        Bytes and next bytes, both (count, BYTES).
    """
    source = _source(split)
    starts = torch.randint(len(source) - BYTES, (count, 1), generator=generator)
    drawn = source[starts + torch.arange(BYTES + 1)].long()
    return drawn[:, :-1], drawn[:, 1:]
