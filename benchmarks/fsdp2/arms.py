"""What is compared: the same matrices, cut by rows, with the Muon of three packages."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer

OURS, TORCH, OTHER = "ours", "torch.optim.Muon", "muon_fsdp2 0.3.0"
ARMS = (OURS, TORCH, OTHER)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LR, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.95, 5

EVEN = ((768, 256), (256, 256), (1024, 256), (256, 1024)) * 4
"""Shapes of four GPT layers: query-key-value, projection, up, down."""
UNEVEN = ((257, 64), (3, 64), (131, 67))


def has_other() -> bool:
    """Whether muon_fsdp2 can be imported; it is no dependency."""
    return importlib.util.find_spec("muon_fsdp2") is not None


class Matrices(nn.Module):
    """Weights without a forward pass: gradients are injected."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, shape in enumerate(shapes):
            weight = nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
            self.register_parameter(f"matrix{number}", weight)


class Contestant:
    """A model of its own with its optimizer; all start from the same weights."""

    def __init__(self, arm: str, shapes: Sequence[tuple[int, int]]) -> None:
        self.arm = arm
        self.model = Matrices(shapes)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = _optimizer(arm, self.model)

    def set_gradients(self, step: int) -> None:
        """Write the gradients of a step, cut like the weights."""
        for param, grad in zip(
            self.model.parameters(), gradients(self._shapes(), step), strict=True
        ):
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(
                grad, param.device_mesh, param.placements, src_data_rank=None
            )

    def weights(self) -> list[torch.Tensor]:
        """Return the whole weights; collective."""
        return [param.detach().full_tensor() for param in self.model.parameters()]  # type: ignore[attr-defined]

    def _shapes(self) -> list[torch.Size]:
        return [param.shape for param in self.model.parameters()]


def gradients(shapes: Sequence[Any], step: int) -> list[torch.Tensor]:
    """Return whole gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


def reference(shapes: Sequence[tuple[int, int]], steps: int) -> list[torch.Tensor]:
    """Return the weights after some steps of the same Muon, in float32, without any package."""
    weights = [param.detach().clone() for param in Matrices(shapes).parameters()]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        for weight, momentum, grad in zip(weights, momenta, gradients(shapes, step), strict=True):
            momentum.lerp_(grad, 1 - MOMENTUM)
            update = _orthogonal(grad.lerp(momentum, MOMENTUM))
            weight.mul_(1 - LR * DECAY).sub_(LR * 0.2 * max(weight.shape) ** 0.5 * update)
    return weights


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _optimizer(arm: str, model: nn.Module) -> Any:
    params = list(model.parameters())
    if arm == OURS:
        config = EmergingOptimizerConfig(
            optimizer="muon",
            lr=LR,
            weight_decay=DECAY,
            clip_grad=0.0,
            muon_momentum=MOMENTUM,
            muon_nesterov=True,
            muon_coefficient_type="simple",
            muon_num_ns_steps=STEPS,
            muon_scale_mode="spectral",
            muon_extra_scale_factor=0.2,
        )
        return build_optimizer(model, config)
    if arm == TORCH:
        return torch.optim.Muon(
            params,
            lr=LR,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            ns_coefficients=COEFFICIENTS,
            ns_steps=STEPS,
            adjust_lr_fn="match_rms_adamw",
        )
    muon = importlib.import_module("muon_fsdp2").Muon
    group = {"params": params, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return muon([{**group, "ns_steps": STEPS, "rms_scale": True, "use_muon": True}])
