"""Turns a learning rate between scale modes and between tensor-parallel modes.

A rate is carried over if updates keep their root mean square. An orthogonal ``(m, n)`` matrix has
the root mean square ``1 / sqrt(max(m, n))``, and a scale mode multiplies it by a factor of the
shape. In mode ``blockwise``, each tensor-parallel rank orthogonalizes and scales its own block.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from megatron_eopt.base.errors import check_choice, check_number
from megatron_eopt.base.names import TpModeT
from megatron_eopt.math.orthogonalize import SCALE_MODES, scale_factor
from megatron_eopt.tools.dry_run import dry_world, schedules_of
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.model import ParallelLayout, build_stage, stage_kinds
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from megatron_eopt.wrappers.factory import get_megatron_optimizer

ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates at rate 1, as https://arxiv.org/abs/2502.16982 found it."""

NAMES = {
    "match_rms_adamw": "adamw_rms",
    "match_rms": "adamw_rms",
    "original": "shape_scaling",
    "spectral_unclamped": "unit_rms_norm",
    "moonlight": "adamw_rms",
    "keller_jordan": "shape_scaling",
    "scion": "unit_rms_norm",
}
"""What torch.optim.Muon and papers call the scale modes."""

TP_MODES: tuple[str, ...] = get_args(TpModeT)

MODES = ("adamw", *SCALE_MODES, *NAMES)
"""What a rate can be converted from and to; ``adamw`` is AdamW's own rate."""

type Shape = tuple[int, int]


@dataclass(frozen=True)
class Scale:
    """How updates are scaled.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds.
    """

    mode: str = "spectral"  # one of :data:`MODES`
    extra: float = 1.0  # ``muon_extra_scale_factor``

    def __post_init__(self) -> None:
        check_choice("scale mode", self.mode, MODES)
        check_number("extra scale factor", self.extra, above=0)

    def rms(self, block: Shape) -> float:
        """Return the root mean square of updates at rate 1 of matrices that are computed so."""
        if self.mode == "adamw":
            return ADAMW_RMS * self.extra
        factor = scale_factor(*block, NAMES.get(self.mode, self.mode), self.extra)
        return factor / math.sqrt(max(block))


def carried(rate: float, old: Scale, new: Scale, block: Shape, new_block: Shape) -> float:
    """Return the rate with which ``new`` updates a matrix as much as ``old`` does with ``rate``.

    Args:
        rate: The learning rate to convert.
        old: The scale that it belongs to.
        new: The other scale.
        block: Rows and columns that ``old`` orthogonalizes at a time.
        new_block: Rows and columns that ``new`` orthogonalizes at a time.
    """
    return rate * old.rms(block) / new.rms(new_block)


def factor_of_all(old: Scale, new: Scale, *, same: bool) -> float | None:
    """Return what multiplies the rate of matrices of any shape; None if it depends on the shape.

    Args:
        old: The scale that rates belong to.
        new: The other scale.
        same: Whether both orthogonalize the same blocks.
    """
    shapes = ((1, 1), (1, 4), (4, 1))
    pairs = zip(shapes, shapes, strict=True) if same else itertools.product(shapes, shapes)
    factors = [carried(1.0, old, new, *pair) for pair in pairs]
    return factors[0] if max(factors) < (1 + 1e-9) * min(factors) else None


@dataclass(frozen=True)
class Weights:
    """Matrices of one kind of weight."""

    block: Shape  # rows and columns that one rank orthogonalizes at a time
    elements: int  # of all these matrices in the model's layers of one kind


def weights_of(architecture: Architecture, tensor: int, mode: str) -> dict[str, Weights]:
    """Return the matrices that Muon updates, by the kind of weight.

    The real optimizer is built, without memory, for one layer of each kind.

    Raises:
        ConfigurationError: If the model does not fit the tensor-parallel size, or the mode is
            unknown.
    """
    check_choice("tp mode", mode, TP_MODES)
    # an expert-parallel size that divides the experts, so that a rank builds few of them
    share = math.gcd(architecture.fields.get("num_moe_experts", 1), 32)
    # a stage for each layer, of which those of one kind are built once
    layout = ParallelLayout(tensor, architecture.fields["num_layers"], share, share)
    how: Any = {"muon_tp_mode": mode, "use_distributed_optimizer": True}
    config = EmergingOptimizerConfig(optimizer="muon", lr=1.0, bf16=True, **how)
    found: dict[str, Weights] = {}
    for kind in stage_kinds(architecture, layout):
        with dry_world(layout.first_rank(kind[0]), layout.world_size):
            optimizer = get_megatron_optimizer(config, [build_stage(architecture, layout)])
            for _, schedule in schedules_of(optimizer):
                for name, stored in zip(schedule.names, schedule.storage, strict=True):
                    plain = re.sub(r"\.\d+(?=\.|$)|(?<=experts)\.\d+", ".*", name)
                    before = found[plain].elements if plain in found else 0
                    # a rank has its share of the experts, and every other weight
                    alike = len(kind) * (share if ".experts." in name else 1)
                    found[plain] = Weights(stored.shape, before + alike * math.prod(stored.shape))
    return found


def suggested(rates: Mapping[str, float], weights: Mapping[str, Weights]) -> float:
    """Return one rate for all weights: the geometric mean, by the elements of ``weights``."""
    total = sum(item.elements for item in weights.values())
    return math.exp(sum(math.log(rates[name]) * weights[name].elements for name in rates) / total)
