"""AdaMuon, NorMuon and NAMO in float64, matrix by matrix, straight from their definitions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.reference.muon import Matrix, newton_schulz, spectral_scale


@dataclass
class AdaptiveReference:
    """Steps one parameter of shape (rows, cols) with decoupled weight decay."""

    weight: Matrix
    method: str
    parts: Sequence[np.ndarray] | None = None  # row indices of each logical matrix
    lr: float = 0.02
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.1
    beta2: float = 0.95
    eps: float = 1e-8
    bias_correction: bool = False
    steps: int = 0
    moments: dict[int, Matrix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = self.weight.astype(np.float64)
        self.buffer = np.zeros_like(self.weight)

    def step(self, grad: Matrix) -> None:
        grad = grad.astype(np.float64)
        self.steps += 1
        self.weight = self.weight - self.lr * self.weight_decay * self.weight
        self.buffer = self.momentum * self.buffer + (1 - self.momentum) * grad
        direction = self.buffer
        if self.nesterov:
            direction = self.momentum * self.buffer + (1 - self.momentum) * grad
        for number, rows in enumerate(self.parts or [np.arange(len(grad))]):
            update = self._normalized(number, grad[rows], direction[rows])
            self.weight[rows] -= self.lr * spectral_scale(update) * update

    def _normalized(self, number: int, grad: Matrix, direction: Matrix) -> Matrix:
        orthogonal = newton_schulz(direction)
        if self.method == "adamuon":
            return orthogonal / (np.sqrt(self._running(number, orthogonal**2)) + self.eps)
        if self.method == "namo":
            running = self._running(number, np.sum(grad**2))
            return orthogonal * np.linalg.norm(direction) / (np.sqrt(running) + self.eps)
        axis = 1 if orthogonal.shape[0] >= orthogonal.shape[1] else 0
        mean = np.mean(orthogonal**2, axis=axis, keepdims=True)
        update = orthogonal / np.sqrt(np.maximum(self._running(number, mean), self.eps))
        return update * np.linalg.norm(orthogonal) / max(np.linalg.norm(update), self.eps)

    def _running(self, number: int, value: Matrix) -> Matrix:
        before = self.moments.get(number, np.zeros_like(value))
        self.moments[number] = self.beta2 * before + (1 - self.beta2) * value
        correction = 1 - self.beta2**self.steps if self.bias_correction else 1
        return self.moments[number] / correction
