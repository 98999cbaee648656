"""Support for Megatron-FSDP's second version; see :mod:`megatron_eopt.contrib.units`.

Import this module before you build an optimizer, in Megatron's training loop or your own.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array
from megatron_eopt.contrib.units import (
    frozen_late,
    kept_back,
    layout_in_unit,
    own_rows,
    take_attributes,
    unit_of,
    units,
)
from megatron_eopt.fsdp2.dtensors import build_dtensors, check_parameters
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import Split
from megatron_eopt.storage.shard import box_layouts
from megatron_eopt.storage.uneven import UnevenKind, register_uneven
from megatron_eopt.wrappers.builders import OptimizerBuildContext, register_storage
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.megatron_fsdp import UnevenOptimizer
from megatron_eopt.wrappers.replicated import state_exists
from megatron_eopt.wrappers.torch_fsdp2 import Float32Shards, chain_over


class UnitsOptimizer(UnevenOptimizer):
    """Steps the units of a model; works with and without ``fully_shard_optimizer``."""

    def _step(self) -> None:
        self._refuse_faulty_units()
        super()._step()
        self.compute_with_main_weights()

    def _refuse_faulty_units(self) -> None:
        """Raise a ConfigurationError for units that are trained otherwise than they seem to be."""
        frozen = frozen_late(self.names)
        if frozen is not None:
            rule = "was set after fully_shard, whose unit goes on computing its gradient"
            hint = "Freeze parameters before fully_shard"
            raise ConfigurationError(f"{self.names[frozen]}.requires_grad", False, rule, hint)
        waiting, missing = kept_back(self.names)
        if waiting:
            names = ", ".join(self.names[p] for p in missing[:8] if p in self.names)
            rule = f"waits for gradients of other parameters of its unit, which have none: {names}"
            hint = "Untie shared weights, and freeze unused ones before fully_shard"
            raise ConfigurationError("gradient", self.names[waiting[0]], rule, hint)

    def compute_with_main_weights(self) -> None:
        """Copy main weights to the weights that the model computes with."""
        for unit in units(self.names):
            unit.sync_model_weight_from_main_weight()


class InUnits(UnevenKind):
    """DTensors of Megatron-FSDP's second version."""

    own_loop_cls = UnitsOptimizer

    def holds(self, param: DTensor) -> bool:
        """Return whether this version has cut a parameter."""
        return unit_of(param) is not None

    def prepare(self, params: Iterable[Tensor]) -> None:
        """Give DTensors what was set on the whole parameters, such as a declared split."""
        take_attributes(params)

    def part_of(self, param: DTensor, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor, cut like ``param``."""
        return whole[own_rows(param)]

    def layouts(
        self, name: str, param: DTensor, split: Split, mesh: Int64Array, sizes: Int64Array
    ) -> tuple[Layout, ...]:
        """Return the layouts of a parameter's logical matrices."""
        return box_layouts(split, layout_in_unit(param, mesh, split.cols, name))


register_uneven(InUnits())


# Megatron's training loop, from megatron-core 0.20 on


def build_units(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Return the chain for a model in units; one optimizer steps them all; collective."""
    if not units(context.routing.names):
        return None
    check_parameters(context.routing.names)
    for param in context.routing.names:
        # megatron-core then takes this rank's part of a gradient for norms and counts of zeros
        vars(param)["__fsdp_param__"] = True
    inner = build_dtensors(context.settings, context.routing, UnitsOptimizer)
    storage = UnitShards(inner, context.settings.config, state_exists)
    # experts are on some of these ranks, others on the others, so each element counts once
    storage.count_in(context.collection.dp_cp, context.collection)
    return chain_over(storage, context, UnitsChain)


class UnitShards(Float32Shards):
    """Steps the main weights of units, which are the model's parameters."""

    def gather_params(self, *, now: bool = False) -> None:
        """With ``now``, let the model compute with loaded weights; each step does so itself."""
        if now:
            self.optimizer.compute_with_main_weights()


class UnitsChain(OptimizerChain):
    """A chain over units."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Raise a ConfigurationError: megatron-core has no checkpoint format for units."""
        rule = "saves no optimizer state in Megatron's trainer"
        hint = "Train with --no-save-optim, or with --megatron-fsdp-version 1"
        raise ConfigurationError("megatron_fsdp_version", 2, rule, hint)


register_storage(build_units)
