"""Matrices with named singular values, and a float64 oracle made from an SVD."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_eopt.math.coefficients import Triple, response


def gaussian(m: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def decaying(m: int, n: int, seed: int = 0) -> Tensor:
    """Singular values from 1 down to 1e-3, evenly spaced in their logarithm."""
    short = min(m, n)
    left = torch.linalg.qr(gaussian(m, short, seed).double())[0]
    right = torch.linalg.qr(gaussian(n, short, seed + 1).double())[0]
    result: Tensor = (left * torch.logspace(0, -3, short, dtype=torch.float64)) @ right.T
    return result.float()


def low_rank(m: int, n: int, seed: int = 0) -> Tensor:
    """Rank m/8 of norm 1 plus noise of norm 1e-3."""
    rank = max(1, min(m, n) // 8)
    signal = gaussian(m, rank, seed) @ gaussian(rank, n, seed + 1)
    noise = gaussian(m, n, seed + 2)
    result: Tensor = signal / signal.norm() + 1e-3 * noise / noise.norm()
    return result


def few_rows(m: int, n: int, seed: int = 0) -> Tensor:
    """Three rows with a gradient, the others all but silent: as after a step with few tokens."""
    x = 1e-4 * gaussian(m, n, seed)
    x[:3] = gaussian(3, n, seed + 1)
    return x


def one_column(m: int, n: int, seed: int = 0) -> Tensor:
    """One column holds nearly all: all singular values but one are near zero."""
    x = gaussian(m, n, seed)
    x[:, 1:] *= 1e-2 / (n - 1) ** 0.5
    return x


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return small integers, of which every sum of products is exact in float32."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=numbers).to(dtype)


NAMED = {"gaussian": gaussian, "decaying": decaying, "low_rank": low_rank}


def oracle(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """Send the singular values through the schedule one by one, in float64."""
    left, sigma, right = torch.linalg.svd(x.double(), full_matrices=False)
    norm = sigma.square().sum().sqrt()
    sent = torch.tensor([response(triples, float(s / norm)) for s in sigma], dtype=torch.float64)
    result: Tensor = (left * sent) @ right
    return result


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference.double()).norm() / reference.double().norm())
