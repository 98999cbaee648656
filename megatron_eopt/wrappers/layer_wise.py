"""megatron-core's layer-wise optimizer, by its name and arguments, with sharded state."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_eopt import qk_clip
from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.checkpoint.local_state import refuse_rank_files
from megatron_eopt.config.checks import check_alike
from megatron_eopt.config.settings import RunSettings, resolve_run
from megatron_eopt.megatron_core.process_groups import process_groups
from megatron_eopt.megatron_core.upstream import warn_of_untested_releases
from megatron_eopt.optimizers.specs import OptimizerSpec
from megatron_eopt.optimizers.update_rule import refuse_group, refuse_state
from megatron_eopt.routing.global_names import name_parameters, names_of
from megatron_eopt.routing.places import places_in
from megatron_eopt.wrappers.builders import check_chunks
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.config import check_config
from megatron_eopt.wrappers.gradients import make_scaler
from megatron_eopt.wrappers.zero1.all_reduced import AllReducedChunk
from megatron_eopt.wrappers.zero1.buffers import buffer_sets, check_model_chunks
from megatron_eopt.wrappers.zero1.build import Sharding, zero1_storages


class LayerWiseDistributedOptimizer(OptimizerChain):
    """Shards the state of torch optimizers over data-parallel ranks.

    Element-wise optimizers (Adam, SGD, Lion) step ZeRO-1 fragments of Megatron's buffers. Muon
    stores momentum in fragments and computes each matrix on an owner rank. All other optimizers get
    whole matrices, with their state, on owner ranks. The model must be wrapped in Megatron's DDP,
    best with ``use_distributed_optimizer=True``. All ranks must construct this together.

    Args:
        optimizers: Torch optimizers over the model's parameters, without megatron-core's wrappers.
            Each trainable parameter must be in exactly one of them.
        config: An ``OptimizerConfig``.
        pg_collection: The process groups; None means Megatron's global ones.
        init_state_fn_list: For each optimizer, a function ``(optimizer, config)`` that creates its
            state, or None.
        model_chunks: This rank's wrapped model chunks. If None, only the parameters in
            ``optimizers`` are known, and their gradients must be all-reduced before a step.

    Raises:
        ConfigurationTypeError: If an optimizer has a wrapper, or a model chunk has none.
        ConfigurationError: If a mode, a group or a parameter is not supported.
    """

    # callers ask this class for DDP's parameter layout; it is that of Adam, without padding
    compute_full_param_layout = staticmethod(DistributedOptimizer.compute_full_param_layout)

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: Sequence[Callable[..., None] | None] | None = None,
        model_chunks: Sequence[Any] | None = None,
    ) -> None:
        def checked() -> tuple[RunSettings, list[Any], list[OptimizerSpec]]:
            check_config(config)
            warn_of_untested_releases()
            settings = resolve_run(config)
            if model_chunks:
                check_chunks(model_chunks)
            chunks = list(model_chunks or ())
            if not chunks:
                params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
                trained = [param for param in params if param.requires_grad]
                chunks = [AllReducedChunk(trained, process_groups(pg_collection))]
            check_model_chunks(chunks, reuses=settings.config.reuse_grad_buf_for_mxfp8_param_ag)
            qk_clip.prepare(chunks)
            exempt = bool(settings.first_field("skip_grad_clip"))
            return settings, chunks, _bases(optimizers, init_state_fn_list, exempt=exempt)

        settings, chunks, specs = raise_together(checked)
        check_alike(settings.config)
        places = places_in(chunks)
        name_parameters(places)
        sets = buffer_sets(chunks, pg_collection, use_gloo=True, redistributed=True)
        scaler = make_scaler(settings)
        # the optimizers came without routing, so they say themselves how weights are split
        sharding = Sharding(settings, chunks, sets, names_of(places), scaler, {})
        self._build(specs, sharding, pg_collection)
        for optimizer in optimizers:
            # torch has hooks for state, but none for groups
            optimizer.add_param_group = refuse_group  # type: ignore[method-assign]
            optimizer.register_state_dict_pre_hook(refuse_state)
            optimizer.register_load_state_dict_pre_hook(refuse_state)

    @classmethod
    def of_specs(
        cls, specs: Sequence[OptimizerSpec], sharding: Sharding, pg_collection: Any
    ) -> Self:
        """Build the optimizer of a configuration that is already resolved and routed."""
        # without ``__init__``, whose arguments are a user's torch optimizers
        chain = cls.__new__(cls)
        chain._build(specs, sharding, pg_collection)
        return chain

    def _build(
        self, specs: Sequence[OptimizerSpec], sharding: Sharding, pg_collection: Any
    ) -> None:
        storages = zero1_storages(sharding, specs)
        chunks = sharding.chunks
        OptimizerChain.__init__(self, storages, sharding.settings, sharding.scaler, chunks)
        self.pg_collection = pg_collection
        # whether forward hooks gather parameters
        self.overlap_param_gather = any(chunk.ddp_config.overlap_param_gather for chunk in chunks)

    @torch.no_grad()
    def allgather_params(self) -> None:
        """Copy main weights to the model's weights on all ranks now; collective."""
        self.quantize_and_sync_model_params_from_main_params()

    broadcast_params = allgather_params  # megatron-core also uses this name

    def save_state_dict_to_file(self, filename: str) -> None:
        """Raise a ConfigurationError, because format ``torch`` cannot hold sharded state."""
        raise refuse_rank_files("save_state_dict_to_file", filename)

    def load_state_dict_from_file(self, filename: str) -> None:
        """Raise a ConfigurationError, because format ``torch`` cannot hold sharded state."""
        raise refuse_rank_files("load_state_dict_from_file", filename)


def _bases(
    optimizers: Sequence[Any], init_state_fns: Sequence[Any] | None, *, exempt: bool
) -> list[OptimizerSpec]:
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, MegatronOptimizer):
            rule = "has a megatron-core wrapper, but this class wraps torch optimizers itself"
            hint = "Pass the torch optimizer inside it"
            raise ConfigurationTypeError(f"optimizers[{number}]", optimizer, rule, hint)
    # orthogonalized updates do not depend on the size of gradients
    free = OrthogonalizedOptimizer if exempt else ()
    functions = init_state_fns or [None] * len(optimizers)
    return [
        OptimizerSpec(item, function, item.param_groups, is_clipped=not isinstance(item, free))
        for item, function in zip(optimizers, functions, strict=True)
    ]
