"""From a configuration and a model of DTensors to one torch optimizer."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_eopt.base.agreement import agreed, agreed_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import TpModeT
from megatron_eopt.build.bases import Base, Share, build_base, driver_over, shares_of
from megatron_eopt.build.managed import refuse_modes, refuse_tensor_parallelism
from megatron_eopt.build.model_marks import OUTPUT_LAYERS, mark_parameters
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import whole
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers.driver import Driver, ParamGroup
from megatron_eopt.optimizers.element_wise import ElementWiseDriver
from megatron_eopt.optimizers.engine import Means
from megatron_eopt.optimizers.megatron_fsdp import MegatronFSDPOptimizer
from megatron_eopt.optimizers.modes import plan_work
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.routing.model import Routing, overrides_for, route_parameters, with_splits
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.settings.checks import check_alike, check_config, refuse_for_dtensors
from megatron_eopt.settings.registry import Overrides
from megatron_eopt.settings.settings import Settings, resolve
from megatron_eopt.stores.dtensors import (
    MeshGroups,
    check_parameters,
    dtensor_shards,
    is_sharded,
    local_of,
)
from megatron_eopt.stores.megatron_fsdp import (
    fsdp_modules,
    shards_of_parameters,
    whole_parameters,
)

logger = logging.getLogger(__name__)


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    config_overrides: Overrides | None = None,
    *,
    output_layers: Sequence[str] = OUTPUT_LAYERS,
) -> ShardedOptimizer:
    """Return the optimizer of a model that ``fully_shard`` has sharded, or of an unsharded one.

    Call it after torch's ``fully_shard`` (and after ``parallelize_module``) or Megatron-FSDP's
    ``fully_shard_model``, between passes. Nothing that is passed in is changed, apart from
    attributes that optimizers read from parameters. All ranks must call this together.

    Args:
        model: The model. Its parameters are DTensors on meshes of any number of dimensions, or
            plain tensors where nothing is sharded; or it is a ``MegatronFSDP``.
        config: What ``get_megatron_optimizer`` takes, usually an ``EmergingOptimizerConfig``.
            Gradients are clipped by the training loop, not here.
        config_overrides: Settings for some of the parameters; the key ``optimizer`` routes them.
            None means megatron-core's standard overrides, an empty dictionary none.
        output_layers: Shell-style patterns of the paths of output layers, whose weights go to the
            scalar optimizer as those of ``nn.Embedding`` do.

    Returns:
        An ordinary torch optimizer.

    Raises:
        ConfigurationError: If a value, a combination or a parameter cannot be honoured.
        ConfigurationTypeError: If a value has the wrong type.
    """

    def checked() -> tuple[Settings, Overrides]:
        check_config(config)
        settings = resolve_for_dtensors(config, own_loop=True)
        if managing:
            refuse_modes(managing)
            refuse_tensor_parallelism(managing)
        else:
            check_parameters(trainable_parameters([model]))
        mark_parameters(named, output_layers)
        return settings, overrides_for(settings, config_overrides)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the root still has whole parameters
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    managing = fsdp_modules([model])
    # names are those that users gave
    named: Any = model.module if model in managing else model
    with whole_parameters([model]):
        settings, overrides = agreed(checked)
        check_alike(config)
        routing = route_parameters(settings, trainable_parameters([named]), overrides)
        routing = with_splits(routing, settings, [named])
    if settings.clip_grad:
        clip = "optimizer.clip_grad_norm" if managing else "torch.nn.utils.clip_grad_norm_"
        logger.info("clip_grad is for the training loop: %s", clip)
    if managing:
        routing = routing.over(shards_of_parameters([model]))
    shares = shares_of(routing.groups, settings.optimizer, 1)
    cls = partial(MegatronFSDPOptimizer, managing) if managing else ShardedOptimizer
    return agreed(lambda: build_routed(settings, routing, shares, cls))


def resolve_for_dtensors(config: Any, *, own_loop: bool = False) -> Settings:
    """Return what a configuration means for DTensors, in Megatron's training loop or another.

    Raises:
        ConfigurationError: If a field has no meaning for them, or as for any configuration.
        ConfigurationTypeError: If a value has the wrong type.
    """
    refuse_for_dtensors(config, own_loop=own_loop)
    settings = replace(resolve(config), of_dtensors=True)
    if settings.exempt_from_clipping:
        rule = "is not supported: all sharded parameters are in one optimizer"
        way_out = "Leave it off, or clip the other parameters' gradients only, in your own loop"
        raise ConfigurationError("muon_exempt_from_clipping", True, rule, way_out)
    if "muon" in settings.prefixes and settings.tp_mode == "blockwise":
        rule = "would orthogonalize each rank's rows by themselves, which is another update"
        way_out = "Use 'auto', the default of EmergingOptimizerConfig"
        raise ConfigurationError("muon_tp_mode", settings.tp_mode, rule, way_out)
    return settings


def build_routed(
    settings: Settings,
    routing: Routing,
    shares: Iterable[Share],
    cls: Callable[..., ShardedOptimizer] = ShardedOptimizer,
) -> ShardedOptimizer:
    """Return the optimizer, of a class, of parameters whose routes are known; collective.

    Raises:
        ConfigurationError: If a setting of the optimizer or of a group cannot be honoured.
    """
    builder = _Builder(settings, routing)
    for share in shares:
        builder.add(share)
    return cls(builder.groups, builder.served, routing.names)


class _Builder:
    """Collects parameter groups and the drivers that step them."""

    def __init__(self, settings: Settings, routing: Routing) -> None:
        self.groups: list[ParamGroup] = []
        self.served: list[tuple[Driver, slice, list[Tensor]]] = []
        self._settings = settings
        self._names, self._splits = routing.names, routing.matrices
        self._order = {param: number for number, param in enumerate(self._names)}
        self._meshes = MeshGroups()

    def add(self, share: Share) -> None:
        """Add the groups of one optimizer, and drivers that step them."""
        # sizes of fused weights come with the parameters here, not with the model's configuration
        chunks = [SimpleNamespace(config=None)]
        # what one rank refuses, the others would go on to exchange
        base = agreed(
            lambda: build_base(share, self._settings, chunks, None, stand_ins=True, plain=True)
        )
        if base is None:
            return
        places = slice(len(self.groups), len(self.groups) + len(base.groups))
        self.groups += [{**group, **self._numbers(group)} for group in base.groups]
        params = [param for group in base.groups for param in group["params"]]
        params.sort(key=self._order.__getitem__)
        if base.layout == "element_wise":
            driver = ElementWiseDriver(base.optimizer, base.init_state_fn, self._settings.config)
            self.served.append((driver, places, params))
            return
        # those that the same ranks store, cut ones and replicated ones apart
        together: dict[tuple[Any, bool], list[Tensor]] = {}
        for param in params:
            key = (self._meshes.of(param), is_sharded(param))
            together.setdefault(key, []).append(param)
        for members in together.values():
            self.served.append((self._driver(base, members), places, members))

    def _numbers(self, group: ParamGroup) -> ParamGroup:
        """Return a group's learning rate and weight decay, which no scheduler may ever write."""
        largest = self._settings.lr if group.get("max_lr") is None else group["max_lr"]
        return {
            "lr": None if largest is None else largest * group.get("lr_mult", 1.0),
            "weight_decay": self._settings.weight_decay * group.get("wd_mult", 1.0),
        }

    def _driver(self, base: Base, params: list[Tensor]) -> Driver:
        group = self._meshes.of(params[0])
        size = 1 if group is None else group.size()
        mode: TpModeT = self._settings.tp_mode
        if base.layout == "matrix_state" or (mode == "auto" and is_sharded(params[0])):
            # what is cut has to travel, and at one owner the work is done once
            mode = "exchange"

        device = local_of(params[0]).device
        means = Means(mode, wave_mb=self._settings.wave_mb, device=device)

        def computed_by(layouts: Sequence[Layout]) -> list[int]:
            work = plan_work(layouts, size, mode, means.wave_bytes)
            return [int(matrix.compute.boxes.rank[0]) for matrix in work.matrices]

        named = {self._names[param]: param for param in params}
        splits = [self._splits[param] or whole(tuple(param.shape)) for param in params]
        found = agreed_in(group, lambda: dtensor_shards(named, splits, group, computed_by))
        shards = dict(zip(params, found, strict=True))
        return driver_over(base, base.groups, shards, means, self._settings.config)
