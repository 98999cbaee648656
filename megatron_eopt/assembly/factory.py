"""From a configuration and a wrapped model to one optimizer: this package's front door."""

import logging
from collections.abc import Sequence
from typing import Any

from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import get_megatron_optimizer as megatrons_own_factory
from megatron.core.utils import get_pg_size, log_single_rank
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_eopt.assembly.chain import OneScaleChain, exempt_from_clipping
from megatron_eopt.assembly.checks import check_ddp, check_storage, check_values
from megatron_eopt.assembly.children import (
    Child,
    build_child,
    build_torch_optimizer,
    make_scaler,
    plan_children,
)
from megatron_eopt.assembly.differences import (
    differences,
    log_differences,
    warn_if_inexact,
    warn_if_too_long,
)
from megatron_eopt.assembly.meaning import Meaning, resolve
from megatron_eopt.assembly.process_groups import OptimizerGroups, optimizer_groups
from megatron_eopt.assembly.routing import Routing, format_routing, route_model
from megatron_eopt.assembly.torch_fsdp2 import assemble_sharded, is_torch_fsdp2
from megatron_eopt.base.versions import check_megatron, megatron_name
from megatron_eopt.routing.groups import Group
from megatron_eopt.routing.overrides import Overrides, check_overrides
from megatron_eopt.storage import LayerWiseDistributedOptimizer

logger = logging.getLogger(__name__)


def get_megatron_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Return the optimizer of a wrapped model, with megatron-core's parameters in its order.

    Nothing that is passed in is changed, apart from attributes that optimizers read from
    parameters. All ranks must call this together.

    Args:
        config: An ``OptimizerConfig``, whose fields then mean what they mean to megatron-core, or
            an ``EmergingOptimizerConfig`` with the defaults recommended here.
        model_chunks: The model's chunks on this rank, wrapped in Megatron's DDP.
        config_overrides: Settings for some of the parameters; the key ``optimizer`` routes them.
            None means megatron-core's standard overrides, an empty dictionary none.
        use_gloo_process_groups: Whether gloo groups may be used where a checkpoint format asks for
            them.
        pg_collection: Process groups; None means Megatron's global ones.
        dump_param_to_param_group_map: Folder to write the number of each parameter's group to.

    Returns:
        A ``ChainedOptimizer`` of megatron-core.

    Raises:
        ConfigurationError: If a value, or a combination, cannot be honoured.
        ConfigurationTypeError: If a value has the wrong type.
    """
    check_megatron()
    if isinstance(model_chunks[0], megatron_name("MimoModel")):
        return megatrons_own_factory(config, model_chunks)
    if config_overrides is None:
        config_overrides = megatron_optimizer.get_standard_config_overrides(config)
    meaning = resolve(config)
    check_values(config, meaning)
    check_ddp(meaning, config, model_chunks)
    if _is_megatron_fsdp(model_chunks):
        check_overrides(config_overrides, config)
        return megatrons_own_factory(
            config,
            model_chunks,
            dict(config_overrides),
            use_gloo_process_groups,
            pg_collection,
            dump_param_to_param_group_map,
        )
    routing = route_model(config, meaning, model_chunks, config_overrides)
    check_storage(meaning, {group.key.optimizer for group in routing.groups})
    _report(config, meaning, routing)
    optimizer: Any
    if is_torch_fsdp2(model_chunks) and not meaning.is_standard:
        process_groups = optimizer_groups(meaning, model_chunks, False, pg_collection)
        optimizer = assemble_sharded(config, model_chunks, meaning, routing, process_groups)
    else:
        optimizer = _assemble(
            config, model_chunks, meaning, routing.groups, use_gloo_process_groups, pg_collection
        )
    if dump_param_to_param_group_map is not None:
        _dump(routing.groups, model_chunks, dump_param_to_param_group_map)
    return optimizer


def _assemble(
    config: Any,
    model_chunks: list[Any],
    meaning: Meaning,
    groups: Sequence[Group],
    use_gloo: bool,
    pg_collection: Any,
) -> OneScaleChain | LayerWiseDistributedOptimizer:
    early_gather = config.overlap_param_gather_with_optimizer_step
    children = plan_children(
        groups, meaning.optimizer, len(model_chunks), first_chunk_apart=early_gather
    )
    process_groups = optimizer_groups(meaning, model_chunks, use_gloo, pg_collection)
    warn_if_inexact(config, meaning, get_pg_size(process_groups.tensor))
    if meaning.storage == "layer_wise":
        return _layer_wise(children, config, model_chunks, process_groups)
    scaler = make_scaler(config)
    optimizers = [
        build_child(child, config, model_chunks, process_groups, scaler, number)
        for number, child in enumerate(children)
    ]
    for index, chunk in enumerate(model_chunks):
        # The wrapped model asks for this when it gathers parameters.
        chunk.overlap_param_gather_with_optimizer_step = early_gather and index == 0
    chain = OneScaleChain(optimizers, scaler, model_chunks)
    if meaning.exempt_from_clipping:
        exempt_from_clipping(
            optimizer
            for child, optimizer in zip(children, optimizers, strict=True)
            if child.optimizer == meaning.optimizer
        )
    return chain


def _layer_wise(
    children: Sequence[Child],
    config: Any,
    model_chunks: list[Any],
    process_groups: OptimizerGroups,
) -> LayerWiseDistributedOptimizer:
    """Hand the torch optimizers to the storage that keeps their state in fragments."""
    pairs = [
        build_torch_optimizer(child, config, model_chunks, process_groups)
        for child in children
        if child.groups
    ]
    return LayerWiseDistributedOptimizer(
        [optimizer for optimizer, _ in pairs if optimizer is not None],
        config,
        process_groups.collection,
        init_state_fn_list=[init_state_fn for _, init_state_fn in pairs],
        model_chunks=model_chunks,
    )


def _report(config: Any, meaning: Meaning, routing: Routing) -> None:
    warn_if_too_long(config, meaning)
    log_differences(differences(config, meaning, routing.routes, routing.splits))
    for group in routing.groups:
        numel = sum(member.parameter.param.numel() for member in group.members)
        log_single_rank(
            logger,
            logging.INFO,
            f"group {group.identity}: {len(group.members)} parameters, {numel} elements here",
        )
    if getattr(config, "print_optimizer_routing", False):
        table = format_routing(config, routing)
        log_single_rank(logger, logging.WARNING, f"optimizer routing\n{table}")


def _is_megatron_fsdp(model_chunks: Sequence[Any]) -> bool:
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(ddp_config, "use_megatron_fsdp", False))


def _dump(groups: Sequence[Group], model_chunks: list[Any], folder: str) -> None:
    unique_name = megatron_name("get_global_unique_param_name")
    numbers = {
        unique_name(model_chunks, member.parameter.param): number
        for number, group in enumerate(groups)
        for member in group.members
    }
    save(state_dict=numbers, checkpoint_id=folder)
