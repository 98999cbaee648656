"""Models that have a draw's parameters, and what all runs of them have in common."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.functional.random_layouts.draws import STEPS, TRAINERS, Draw, Layout, Parameter, values

TOLERANCE = {"muon": 1e-4, "soap": 1e-3}
"""Of how far a parameter has moved; that of Muon is also that of others.

Newton-Schulz multiplies float32's rounding, 2^-24, by up to 490. SOAP does by about the ratio of
its gradients' singular values, squared. A wrong matrix, rank or step leaves more than 1e-2.
"""

ROUNDING = {torch.float32: sum(STEPS) * 2.0**-24, torch.bfloat16: 2.0**-8}
"""Relative to a weight: float32 ones are rounded in each step, bfloat16 ones are rounded copies."""

type Weights = dict[str, Tensor]


class Run:
    """A model at a layout, and its optimizer.

    Attributes:
        params: By their names in the whole model, what they are and what this rank has.
    """

    params: dict[str, tuple[Parameter, Any]]

    def __init__(self, draw: Draw, layout: Layout) -> None:
        self.draw, self.layout = draw, layout

    def set_gradients(self, step: int) -> None:
        """Set the gradients of a step."""
        raise NotImplementedError

    def step(self) -> float | None:
        """Take a step; return the norm of the gradients, if the optimizer has it."""
        raise NotImplementedError

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return what this rank's parameter has of a whole tensor."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Save weights and state; collective."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Load weights and state; collective."""
        raise NotImplementedError

    def mains(self, expected: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield names, what is stepped here in place of a parameter, and what it should be."""
        return iter(())

    def differences(self, expected: Weights) -> list[str]:
        """Return a line for each weight that is not as expected, and not nan there."""
        found = [(f"main weight {name}", name, *pair) for name, *pair in self.mains(expected)]
        for name, (_, param) in self.params.items():
            local = getattr(param, "_local_tensor", param)
            found.append((f"weight {name}", name, local, self.part(name, expected[name])))
        moved = {
            name: float((expected[name] - values(self.draw, param)).nan_to_num().norm())
            for name, (param, _) in self.params.items()
        }
        problems = []
        tolerance = TOLERANCE.get(self.draw.optimizer, TOLERANCE["muon"])
        for what, name, have, want in found:
            known = ~want.isnan()
            far = float((have.detach().double() - want)[known].norm())
            rounding = ROUNDING[have.dtype] * float(want[known].norm())
            # no comparison is true of nan
            if not far <= tolerance * moved[name] + rounding:
                of_move = far / (moved[name] or 1.0)
                problems.append(f"rank {dist.get_rank()}: {what} is {of_move:.2g} of its move off")
        return problems


def mark(tensor: Any, param: Parameter, draw: Draw) -> None:
    """Set what megatron-core and this package read of a parameter."""
    tensor.requires_grad = param.name not in draw.frozen
    if param.split is not None and (len(param.shape) == 3 or len(param.split.matrices) > 1):
        tensor.eopt_split = param.split
    if draw.layouts[0].storage in TRAINERS[1]:
        return
    tensor.allreduce = param.expert is None
    if param.cut != -1:
        tensor.tensor_model_parallel, tensor.partition_dim = True, param.cut
        tensor.partition_stride = 1


class Experts(nn.Module):
    """A stack of matrices."""


def modules(tensors: dict[str, nn.Parameter]) -> nn.Module:
    """Return a model that has these parameters; nothing that can be run."""
    model = nn.Module()
    for path, tensor in tensors.items():
        *above, name, leaf = path.split(".")
        owner = model
        for part in above:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if name not in owner._modules:
            owner.add_module(name, _module(name))
        setattr(owner.get_submodule(name), leaf, tensor)
    return model


def _module(name: str) -> nn.Module:
    """Return a module whose class says what its weight is."""
    if name == "experts":
        return Experts()
    if name == "norm":
        return nn.LayerNorm(1, bias=False)
    return nn.Embedding(1, 1) if name == "table" else nn.Linear(1, 1, bias=False)
