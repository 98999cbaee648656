"""Build the optimizer of a wrapped model from a configuration: the main entry point."""

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from megatron.core.optimizer import get_megatron_optimizer as megatrons_own_factory
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import (
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)
from megatron.core.utils import get_pg_size
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.weak import WeakIdKeyDictionary

from megatron_eopt import qk_clip
from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import any_rank, gather_unique, raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import CAUTIOUS_DECAY
from megatron_eopt.base.place import refuse_part
from megatron_eopt.checkpoint.local_state import refuse_rank_files
from megatron_eopt.config.checks import check_alike, refuse_for_matrices
from megatron_eopt.config.registry import (
    Overrides,
)
from megatron_eopt.config.settings import Settings, resolve
from megatron_eopt.fsdp2.dtensors import settings_for_dtensors
from megatron_eopt.megatron_core.upstream import (
    find_upstream,
    require_upstream,
    warn_of_untested_releases,
)
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers.specs import OptimizerSpec, optimizer_specs
from megatron_eopt.optimizers.warnings import log_differences
from megatron_eopt.routing.global_names import name_parameters, names_of
from megatron_eopt.routing.groups import Group
from megatron_eopt.routing.model import Routing, log_routing, route_model
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.routing.routes import read_overrides
from megatron_eopt.storage.uneven import prepare
from megatron_eopt.wrappers import megatron_fsdp, torch_fsdp2
from megatron_eopt.wrappers.builders import (
    BUILDERS,
    OptimizerBuildContext,
    check_chunks,
    check_ddp,
    fused_classes,
    is_megatron_fsdp,
    register_storage,
)
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.config import check_config
from megatron_eopt.wrappers.gradients import make_scaler
from megatron_eopt.wrappers.grouping import with_callers_grouping
from megatron_eopt.wrappers.layer_wise import LayerWiseDistributedOptimizer
from megatron_eopt.wrappers.replicated import build_replicated
from megatron_eopt.wrappers.zero1.buffers import buffer_sets, check_model_chunks, has_frozen
from megatron_eopt.wrappers.zero1.build import Sharding, unmixed_storages

logger = logging.getLogger(__name__)

# equal on all ranks, which build in one order; the maps keep neither optimizers nor models alive
_numbers = itertools.count()
_owners = WeakIdKeyDictionary()  # parameter -> number of the optimizer that owns it
_optimizers: WeakValueDictionary[int, Any] = WeakValueDictionary()

_OF_PARTS = ("tp", "expt_tp", "gtp_remat", "expt_gtp_remat")
"""Groups whose ranks have parts of a weight."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Build the optimizer of a wrapped model; replaces megatron-core's function of this name.

    All ranks must call this together, and errors are raised on every rank. An optimizer that was
    built earlier for some of these parameters can no longer step. Arguments do not change, except
    that parameters get attributes that optimizers read, and the data of parameters outside DDP's
    buffers may move to new memory.

    Args:
        config: An ``EmergingOptimizerConfig``, which has the recommended defaults, or an
            ``OptimizerConfig``, whose fields have the same meaning as in megatron-core.
        model_chunks: This rank's model chunks, wrapped in Megatron's DDP or FSDP. Parameters are
            float32, bfloat16 or float16.
        config_overrides: Settings for some parameters, by ``ParamKey``; the setting ``optimizer``
            chooses their optimizer. None means megatron-core's standard overrides, ``{}`` none.
        use_gloo_process_groups: Whether checkpoint formats may use gloo groups if they need them.
        pg_collection: The process groups; None means Megatron's global ones.
        dump_param_to_param_group_map: Folder to which each parameter's group number is written.

    Returns:
        A ``ChainedOptimizer`` of megatron-core. ``step()`` returns whether parameters were updated,
        the gradient norm, and the number of zeros in the gradients if it is counted. For Adam or
        SGD in a mode that only megatron-core supports, this is megatron-core's own optimizer.

    Raises:
        ConfigurationError: If a value is invalid, or a combination is not supported.
        ConfigurationTypeError: If a value has the wrong type.
    """
    folder = dump_param_to_param_group_map
    raise_together(lambda: check_chunks(model_chunks))
    # it has one optimizer for each module, which megatron-core's function builds
    # (``get_mimo_optimizer``)
    if isinstance(model_chunks[0], find_upstream("MimoModel") or ()):
        return megatrons_own_factory(config, model_chunks)
    of_dtensors = torch_fsdp2.is_torch_fsdp2(model_chunks) or is_megatron_fsdp(model_chunks)
    settings = raise_together(lambda: _settings(config, model_chunks, of_dtensors=of_dtensors))
    check_alike(settings.config)
    cut = model_chunks if of_dtensors else []
    prepare(param for chunk in cut for param in chunk.parameters())
    overrides = raise_together(lambda: _overrides(settings, model_chunks, config_overrides))
    with megatron_fsdp.whole_parameters(cut):
        routing = route_model(settings, model_chunks, overrides)
    is_alone = settings.is_standard and not routing.optimizers - {settings.optimizer}
    if settings.in_rank_files and not is_alone:
        raise refuse_rank_files("--ckpt-format", "torch")
    if is_alone and (settings.in_rank_files or _is_megatron_cores(settings, model_chunks)):
        raise_together(lambda: _refuse_off_loading_on_cpu(settings, routing))
        if settings.config.cautious_weight_decay:
            rule = "is not supported in modes that only megatron-core's own Adam has"
            hint = f"Turn it off, or {' and '.join(settings.upstream_modes) or 'fp16'}"
            raise ConfigurationError(CAUTIOUS_DECAY, True, rule, hint)
        # refuses settings that Adam and SGD do not have
        raise_together(lambda: optimizer_specs(settings, routing, {}, plain=True))
        return megatrons_own_factory(
            settings.config,
            model_chunks,
            as_megatron_cores(routing.overrides),
            use_gloo_process_groups,
            pg_collection,
            folder,
        )
    raise_together(lambda: refuse_for_matrices(settings.config))
    context = OptimizerBuildContext(
        settings, routing, model_chunks, pg_collection, use_gloo_process_groups
    )
    log_routing(settings, routing)
    # the built-in builders support every configuration that gets here
    chains = (chain for build in reversed(BUILDERS) if (chain := build(context)) is not None)
    # all ranks raise together, even if only one pipeline stage has an error
    optimizer = raise_together(lambda: next(chains))
    raise_together(lambda: _refuse_unsaved(optimizer))
    groups = (getattr(context.collection, name, None) for name in _OF_PARTS)
    is_cut = any(get_pg_size(group) > 1 for group in groups)
    log_differences(settings, context.arguments, is_cut=is_cut)
    _register_owner(optimizer, routing.names)
    if folder is not None:
        with megatron_fsdp.whole_parameters(cut):
            _dump(routing.groups, model_chunks, str(folder))
    return optimizer


def _overrides(
    settings: Settings, model_chunks: Sequence[Any], given: Overrides | None
) -> Overrides:
    """Return checked overrides, or megatron-core's standard ones, as the caller groups them."""
    overrides = get_standard_config_overrides(settings.config) if given is None else given
    return with_callers_grouping(settings, model_chunks, read_overrides(overrides))


def as_megatron_cores(overrides: Overrides) -> dict[ParamKey, dict[str, Any]]:
    """Return overrides with keys of megatron-core's classes."""

    def converted(key: Any) -> ParamKey:
        if isinstance(key, ParamKey):
            return key
        functions = _each_as(ParamPredicate, key.predicate)
        with_names = _each_as(ParamWithNamePredicate, key.with_name_predicate)
        return ParamKey(key.name, key.attr, functions, with_names)

    return {converted(key): dict(values) for key, values in overrides.items()}


def _each_as(cls: type, part: Any) -> Any:
    """Return predicates, one or several, as objects of a class."""
    if isinstance(part, tuple):
        return tuple(cls(item.name, item.fn) for item in part)
    return cls(part.name, part.fn)


def _register_owner(optimizer: Any, params: Iterable[Tensor]) -> None:
    """Register an optimizer as the owner of its parameters; collective over the world.

    It gets a ``number``, in the order of creation. Earlier owners of any of these parameters become
    ``superseded``: they raise if they step again. Optimizers of other parameters are not affected.
    """
    number, own_params = next(_numbers), list(params)
    before = {_owners[param] for param in own_params if param in _owners}
    for param in own_params:
        _owners[param] = number
    # a rank may share no parameter with an earlier optimizer that other ranks share some with
    for earlier in gather_unique(sorted(before)):
        if earlier in _optimizers:
            _optimizers[earlier].superseded = True
    _optimizers[number] = optimizer
    optimizer.number = number


def _settings(config: Any, model_chunks: Sequence[Any], *, of_dtensors: bool) -> Settings:
    check_config(config)
    warn_of_untested_releases()
    settings = replace(resolve(config), of_dtensors=of_dtensors)
    # with Megatron-FSDP, Adam and SGD have modes that this package has not
    has_own = bool(settings.upstream_modes) or is_megatron_fsdp(model_chunks)
    if of_dtensors and not (settings.is_standard and has_own):
        settings = settings_for_dtensors(settings)
    check_ddp(settings, model_chunks)
    qk_clip.prepare(model_chunks)
    return settings


def _is_megatron_cores(settings: Settings, model_chunks: Sequence[Any]) -> bool:
    """Return whether Adam or SGD alone uses a mode that only megatron-core's optimizer supports."""
    modules = megatron_fsdp.fsdp_modules(model_chunks)
    has_no_scaler = settings.half == "fp16" and is_megatron_fsdp(model_chunks)
    is_refused = has_no_scaler or any(megatron_fsdp.faults(modules))
    return bool(settings.upstream_modes) or is_refused


def _refuse_off_loading_on_cpu(settings: Settings, routing: Routing) -> None:
    """Raise a ConfigurationError if megatron-core's optimizer would off-load from a CPU.

    It makes no host copies of such parameters, and its first step ends in a KeyError.
    """
    if settings.config.optimizer_cpu_offload and not all(p.is_cuda for p in routing.names):
        raise gpu.needed_to_off_load("optimizer_cpu_offload", settings.optimizer)


def _sharded(context: OptimizerBuildContext) -> OptimizerChain | None:
    settings, routing, model_chunks = context.settings, context.routing, context.model_chunks
    if settings.storage != "sharded":
        return None
    # a model without parameters has no optimizer
    mixed = not settings.is_standard or routing.optimizers != {settings.optimizer}
    # megatron-core's own optimizer would also step the frozen parameters of its buffers. All ranks
    # decide alike, because only the other way creates process groups
    mixed = any_rank(any(map(has_frozen, model_chunks))) or mixed
    collection = context.collection

    def checked() -> list[OptimizerSpec]:
        reuses = settings.config.reuse_grad_buf_for_mxfp8_param_ag if mixed else None
        check_model_chunks(model_chunks, reuses=reuses)
        for param, name in routing.names.items():
            refuse_part(param, name)
        check_dtypes(routing.names, "The distributed optimizer")
        specs = optimizer_specs(
            settings, routing, context.arguments, stand_ins=True, fused=fused_classes()
        )
        kinds = {getattr(spec.optimizer, "momentum_dtype", "fp32") for spec in specs}
        if settings.config.muon_overlap_dp_comm and (rounded := kinds - {"fp32"}):
            rule = "needs momentum_dtype='fp32' for all parameters"
            hint = f"Remove momentum_dtype={min(rounded)!r}, or turn muon_overlap_dp_comm off"
            raise ConfigurationError("muon_overlap_dp_comm", True, rule, hint)
        return specs

    specs = raise_together(checked)
    sets = buffer_sets(
        model_chunks, context.pg_collection, use_gloo=context.use_gloo, redistributed=mixed
    )
    scaler, names = make_scaler(settings), names_of(routing.places)
    name_parameters(routing.places)
    sharding = Sharding(settings, model_chunks, sets, names, scaler, routing.matrices)
    if mixed:
        # a spec without groups is there if no rank trains anything
        specs = [spec for spec in specs if spec.groups]
        return LayerWiseDistributedOptimizer.of_specs(specs, sharding, collection)
    return OptimizerChain(unmixed_storages(sharding, specs), settings, scaler, model_chunks)


# the last one is tried first, so ``build_replicated`` serves what no other storage takes
for _builder in (
    build_replicated,
    _sharded,
    torch_fsdp2.build_torch_fsdp2,
    megatron_fsdp.build_megatron_fsdp,
):
    register_storage(_builder)


def _refuse_unsaved(chain: OptimizerChain) -> None:
    for storage in chain.chained_optimizers:
        for item in storage.assigned:
            with item.groups_and_state() as (groups, state):
                item.rule.refuse_unsaved(groups, state)


def _dump(groups: Sequence[Group], model_chunks: list[Any], folder: str) -> None:
    unique_name = require_upstream("get_global_unique_param_name")
    numbers = {
        unique_name(model_chunks, route.parameter.param): number
        for number, group in enumerate(groups)
        for route in group.routes
    }
    save(state_dict=numbers, checkpoint_id=folder)
