"""Support for Megatron-FSDP's second version; see :mod:`megatron_eopt.storage.units`."""

from collections.abc import Mapping
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.storage.units import frozen_late, kept_back, units
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.dtensors import (
    Float32Shards,
    build_routed,
    chain_over,
    check_parameters,
    state_exists,
)
from megatron_eopt.wrappers.megatron_fsdp import UnevenOptimizer


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


# Megatron's training loop, from megatron-core 0.20 on


def build_units(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Return the chain for a model in units; one optimizer steps them all; collective."""
    if not units(context.routing.names):
        return None
    check_parameters(context.routing.names)
    for param in context.routing.names:
        # megatron-core then takes this rank's part of a gradient for norms and counts of zeros
        vars(param)["__fsdp_param__"] = True
    inner = build_routed(context.settings, context.routing, UnitsOptimizer)
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
