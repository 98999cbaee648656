"""What a draw's training does, by one process on whole matrices in float64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from emerging_optimizers.soap import SOAP

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.matrices import Split, matrix_rows
from tests.functional.random_layouts.draws import TRAINERS, Draw, Parameter, parameters, values
from tests.reference.adaptive_muon import AdaptiveReference
from tests.reference.muon import Matrix, newton_schulz

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


class Judge:
    """Steps whole weights.

    Attributes:
        weights: By name, in float64; nan where rounding decides what is right.
        norms: The norm of the gradients of each step.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw, self._config = draw, config_of(draw)
        self._params = {p.name: p for p in parameters(draw)}
        self._own_loop = draw.layouts[0].storage in TRAINERS[1]
        self._exact = {name: values(draw, p).double().numpy() for name, p in self._params.items()}
        self._unclear = {name: np.zeros(p.shape, bool) for name, p in self._params.items()}
        self._state: dict[Any, Any] = {}
        self.norms: list[float] = []

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        masked = {n: np.where(self._unclear[n], np.nan, w) for n, w in self._exact.items()}
        return {name: torch.from_numpy(weight) for name, weight in masked.items()}

    def step(self, number: int) -> None:
        """Take a step."""
        grads = {
            name: values(self._draw, param, number).double().numpy()
            for name, param in self._params.items()
            if name not in self._draw.frozen
        }
        self.norms.append(math.sqrt(sum(float((grad**2).sum()) for grad in grads.values())))
        clip = 0.0 if self._own_loop else self._config.clip_grad
        factor = min(1.0, clip / (self.norms[-1] + 1e-6)) if clip else 1.0
        for name, grad in grads.items():
            # where an optimizer has no gradient, a buffer has one of zeros
            if not (self._own_loop and name in self._draw.without_gradient[number]):
                self._step_one(self._params[name], factor * grad)
                self._round(name)

    def _round(self, name: str) -> None:
        """Round a weight as an own loop does, which has no main weights."""
        if self._own_loop and self._draw.dtype == "bfloat16":
            rounded = torch.from_numpy(self._exact[name]).bfloat16()
            self._exact[name] = rounded.double().numpy()

    def _step_one(self, param: Parameter, grad: Matrix) -> None:
        config, weight = self._config, self._exact[param.name]
        is_scalar = param.split is None and config.optimizer != "adam"
        name = config.muon_scalar_optimizer if "muon" in config.optimizer else "adam"
        name = name if is_scalar else config.optimizer
        decay = config.weight_decay if weight.ndim > 1 else 0.0
        if name == "soap":
            self._soap(param, grad, decay)
            return
        update = getattr(self, f"_{name.removeprefix('adaptive_')}")(param, grad)
        self._exact[param.name] = weight - config.lr * decay * weight - config.lr * update

    def _of(self, *key: Any) -> dict[str, Any]:
        return self._state.setdefault(key, {})

    def _adam(self, param: Parameter, grad: Matrix) -> Matrix:
        config, state = self._config, self._of(param.name)
        b1, b2 = config.adam_beta1, config.adam_beta2
        state["t"] = state.get("t", 0) + 1
        state["m"] = b1 * state.get("m", 0) + (1 - b1) * grad
        state["v"] = b2 * state.get("v", 0) + (1 - b2) * grad**2
        m, v = state["m"] / (1 - b1 ** state["t"]), state["v"] / (1 - b2 ** state["t"])
        return m / (np.sqrt(v) + config.adam_eps)

    def _lion(self, param: Parameter, grad: Matrix) -> Matrix:
        config, state = self._config, self._of(param.name)
        b1, b2 = config.lion_beta1, config.lion_beta2
        mixed = b1 * state.get("m", 0) + (1 - b1) * grad
        state["m"] = b2 * state.get("m", 0) + (1 - b2) * grad
        self._unclear[param.name] |= _near_zero(mixed)
        return np.sign(mixed)

    def _muon(self, param: Parameter, grad: Matrix) -> Matrix:
        config, state = self._config, self._of(param.name)
        momentum = config.muon_momentum
        state["m"] = momentum * state.get("m", 0) + (1 - momentum) * grad
        direction = state["m"]
        if config.muon_nesterov:
            direction = momentum * direction + (1 - momentum) * grad
        flat = (-1, grad.shape[-1])
        grad, direction = grad.reshape(flat), direction.reshape(flat)
        update, unclear = np.zeros_like(direction), np.zeros(direction.shape, bool)
        for number, rows in enumerate(rows_of(param.split)):
            orthogonal = newton_schulz(direction[rows])
            if config.optimizer == "adaptive_muon":
                if config.adaptive_muon_moment2_method == "adamuon":
                    unclear[rows] = _near_zero(orthogonal)
                orthogonal = self._adapted(param, number, grad[rows], direction[rows])
            scale = 1.0 if config.muon_scale_mode == "spectral" else 0.2
            update[rows] = scale * math.sqrt(max(orthogonal.shape)) * orthogonal
        self._unclear[param.name] |= unclear.reshape(param.shape)
        return update.reshape(param.shape)

    def _adapted(self, param: Parameter, number: int, grad: Matrix, direction: Matrix) -> Matrix:
        config, state = self._config, self._of(param.name, number)
        if not state:
            state["reference"] = AdaptiveReference(
                np.zeros((1, 1)),
                config.adaptive_muon_moment2_method,
                beta2=config.adaptive_muon_beta2,
                eps=config.adaptive_muon_eps,
                bias_correction=config.adaptive_muon_bias_correction,
            )
        state["reference"].steps += 1
        return state["reference"]._normalized(0, grad, direction)

    def _soap(self, param: Parameter, grad: Matrix, decay: float) -> None:
        """Step each matrix by the class of emerging-optimizers, which computes in float32."""
        config, flat = self._config, (-1, grad.shape[-1])
        weight = self._exact[param.name].reshape(flat)
        for number, rows in enumerate(rows_of(param.split)):
            state = self._of(param.name, number)
            if not state:
                tensor = torch.nn.Parameter(torch.tensor(weight[rows], dtype=torch.float32))
                betas = config.adam_beta1, config.adam_beta2
                state["tensor"], state["soap"] = (
                    tensor,
                    SOAP(
                        [tensor],
                        config.lr,
                        betas,
                        config.soap_shampoo_beta,
                        config.soap_eps,
                        decay,
                        use_kl_shampoo=config.soap_use_kl_shampoo,
                    ),
                )
            state["tensor"].grad = torch.tensor(grad.reshape(flat)[rows], dtype=torch.float32)
            state["soap"].step()
            weight[rows] = state["tensor"].detach().double().numpy()
        self._exact[param.name] = weight.reshape(param.shape)


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
