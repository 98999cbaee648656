"""What a draw's training does, by one process on whole matrices in float64."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.matrices import Split, matrix_rows
from tests.functional.random_layouts.draws import TRAINERS, Draw, parameters, values
from tests.reference.muon import Matrix, newton_schulz
from tests.unit.wrappers.by_hand import ByHand, norm_of

AMBIGUOUS = 1e-3
"""A sign is not compared where it depends on less than this part of what is usual: float32 may have
the other one. Newton-Schulz with five quintic steps multiplies errors by up to 3.45^5 = 490, so its
results are known to about 490 x 2^-24 = 3e-5."""


@dataclass
class DrawConfig(EmergingOptimizerConfig):
    """With an argument of SOAP that has no field of its own."""

    soap_eps: float = 1.0
    """Some rows and columns of a gradient in SOAP's eigenbasis are zero but for rounding, of which
    a small ``eps`` would make updates of full size."""


def config_of(draw: Draw, **fields: Any) -> DrawConfig:
    """Return the configuration of a draw; ``fields`` are those of its storage."""
    given = {"bf16": draw.dtype == "bfloat16", **dict(draw.config), **fields}
    return DrawConfig(optimizer=draw.optimizer, muon_fp32_matmul_prec="highest", **given)


class Judge(ByHand):
    """Steps whole weights, a stack of matrices as one below another.

    Attributes:
        norms: The norm of the gradients of each step.
    """

    of_soap: ClassVar = {"eps": DrawConfig.soap_eps}

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._params = {p.name: p for p in parameters(draw)}
        exact = {name: self._values(name) for name in self._params}
        super().__init__("own loop", {"optimizer": draw.optimizer}, exact)
        self._own_loop = draw.layouts[0].storage in TRAINERS[1]
        self.config = config_of(draw, **({"clip_grad": 0.0} if self._own_loop else {}))
        self._unclear = {name: np.zeros(weight.shape, bool) for name, weight in exact.items()}
        self.norms: list[float] = []

    def _values(self, name: str, *step: int) -> Matrix:
        found = values(self._draw, self._params[name], *step).double().numpy()
        return found.reshape(-1, found.shape[-1]) if found.ndim > 2 else found

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """The weights in float64; nan where rounding decides what is right."""
        masked = {n: np.where(self._unclear[n], np.nan, w) for n, w in self.weights.items()}
        return {n: torch.from_numpy(w).view(self._params[n].shape) for n, w in masked.items()}

    def is_main(self, name: str) -> bool:
        return self._params[name].split is not None or self.config.optimizer == "adam"

    def parts(self, name: str, rows: int) -> list[np.ndarray]:
        return rows_of(self._params[name].split)

    def take(self, number: int) -> None:
        """Take a step."""
        # where an optimizer has no gradient, a buffer has one of zeros
        absent = self._draw.without_gradient[number] if self._own_loop else ()
        names = self._params.keys() - {*self._draw.frozen, *absent}
        grads = {name: self._values(name, number) for name in names}
        self.norms.append(norm_of(grads))
        self.step(number, grads)
        if self._own_loop and self._draw.dtype == "bfloat16":
            # it has no main weights
            for name in names:
                rounded = torch.from_numpy(self.weights[name]).bfloat16()
                self.weights[name] = rounded.double().numpy()

    def _lion(self, name: str, grad: Matrix, lr: float, decay: float) -> None:
        beta = self.config.lion_beta1
        mixed = beta * self.state[name].get("mean", 0) + (1 - beta) * grad
        self._unclear[name] |= _near_zero(mixed)
        super()._lion(name, grad, lr, decay)

    def _adapted(self, name: str, number: int, grad: Matrix, direction: Matrix) -> Matrix:
        if self.config.adaptive_muon_moment2_method == "adamuon":
            rows = self.parts(name, len(grad))[number]
            self._unclear[name][rows] |= _near_zero(newton_schulz(direction))
        return super()._adapted(name, number, grad, direction)


def rows_of(split: Split | None) -> list[np.ndarray]:
    """Return the rows of each logical matrix, those of a stack one below another."""
    assert split is not None
    return [
        np.concatenate([np.arange(first, first + count) for first, _, count in runs.triples()])
        for runs in matrix_rows(split)
    ]


def _near_zero(found: Matrix) -> np.ndarray:
    usual = math.sqrt(np.mean(found**2))
    return (np.abs(found) < AMBIGUOUS * usual) & (found != 0)
