"""Muon's update in float64, matrix by matrix, straight from its definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from emerging_optimizers.orthogonalized_optimizers.muon_utils import _COEFFICIENT_SETS

Matrix = np.ndarray


def newton_schulz(matrix: Matrix, steps: int = 5, coefficients: Any = "quintic") -> Matrix:
    """Orthogonalize by X <- a X + b (X X^T) X + c (X X^T)^2 X from X = G / |G|.

    ``coefficients`` are the name of a set, or triples.
    """
    named = isinstance(coefficients, str)
    triples = _COEFFICIENT_SETS[coefficients] if named else coefficients
    x = matrix.astype(np.float64)
    x = x / max(np.linalg.norm(x), 1e-7)
    for step in range(steps):
        a, b, c = triples[step % len(triples)]
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x


def spectral_scale(matrix: Matrix) -> float:
    return max(matrix.shape) ** 0.5


def muon_step(
    weight: Matrix,
    grad: Matrix,
    momentum_buffer: Matrix,
    *,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    parts: Sequence[np.ndarray] | None = None,
    steps: int = 5,
    coefficients: str = "quintic",
) -> tuple[Matrix, Matrix]:
    """Return (weight, momentum buffer) after one step with decoupled weight decay.

    ``parts`` are the row indices of each logical matrix of a fused weight.
    """
    weight, grad = weight.astype(np.float64), grad.astype(np.float64)
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * grad
    direction = momentum_buffer
    if nesterov:
        direction = momentum * momentum_buffer + (1 - momentum) * grad
    update = np.zeros_like(direction)
    for rows in parts or [np.arange(len(weight))]:
        orthogonal = newton_schulz(direction[rows], steps, coefficients)
        update[rows] = orthogonal * spectral_scale(orthogonal)
    return weight - lr * weight_decay * weight - lr * update, momentum_buffer
