"""From a configuration and a sharded model to one torch optimizer."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn

from megatron_eopt.assembly.checks import check_values
from megatron_eopt.assembly.children import Child, plan_children, torch_param_groups
from megatron_eopt.assembly.gathering import gather_groups
from megatron_eopt.assembly.meaning import Meaning, resolve, rules_of
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.base.names import SCALAR_OPTIMIZERS, TpModeT
from megatron_eopt.fsdp2.adaptive import AdaptivePart
from megatron_eopt.fsdp2.model import OUTPUT_LAYERS, check_parameters, mark_parameters
from megatron_eopt.fsdp2.optimizer import ShardedOptimizer, ShardedPart
from megatron_eopt.fsdp2.owned_state import OwnedState
from megatron_eopt.fsdp2.shards import Groups, is_sharded, local_of, placed_parameters
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.config_kwargs import first_field
from megatron_eopt.optimizers.entries import create
from megatron_eopt.optimizers.group_settings import check_group_settings
from megatron_eopt.optimizers.scalar import adam_numbers, build_scalar_optimizer
from megatron_eopt.routing.overrides import Overrides, check_overrides
from megatron_eopt.routing.parameters import ModelParameter, trainable_parameters
from megatron_eopt.routing.routes import route_all
from megatron_eopt.routing.splits import find_splits
from megatron_eopt.storage.composite import ParamGroup
from megatron_eopt.storage.element_wise import ElementWisePart
from megatron_eopt.storage.matrix_state import MatrixStatePart
from megatron_eopt.storage.matrix_update import MatrixUpdatePart
from megatron_eopt.storage.parts import state_layout

__all__ = ["build_optimizer", "build_routed", "check_supported"]

logger = logging.getLogger(__name__)

_UNSUPPORTED = {
    "fp16": "needs a loss scale, which the training loop has: torch.amp.GradScaler",
    "loss_scale": "belongs to the training loop: torch.amp.GradScaler",
    "use_precision_aware_optimizer": "keeps main weights in Megatron's buffers",
    "optimizer_cpu_offload": "is not supported for DTensors",
    "optimizer_cuda_graph": "is not supported for DTensors",
    "overlap_param_gather_with_optimizer_step": "is about Megatron's buffers",
}


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    config_overrides: Overrides | None = None,
    *,
    output_layers: Sequence[str] = OUTPUT_LAYERS,
) -> ShardedOptimizer:
    """Return the optimizer of a model that ``fully_shard`` has sharded, or of an unsharded one.

    Call it after ``fully_shard`` (and after ``parallelize_module``), before the first forward pass.
    Nothing that is passed in is changed, apart from attributes that optimizers read from
    parameters. All ranks must call this together.

    Args:
        model: The model. Its parameters are DTensors on meshes of any number of dimensions, or
            plain tensors where nothing is sharded.
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
    if not isinstance(config, OptimizerConfig):
        way_out = "Pass an EmergingOptimizerConfig"
        raise ConfigurationTypeError("config", config, "must be an OptimizerConfig", way_out)
    if config_overrides is None:
        config_overrides = megatron_optimizer.get_standard_config_overrides(config)
    meaning = resolve(config)
    mode = check_supported(config, meaning)
    if config.clip_grad:
        logger.info("clip_grad is for the training loop: torch.nn.utils.clip_grad_norm_")
    check_values(config, meaning)
    check_overrides(config_overrides, config)
    parameters = trainable_parameters([model])
    check_parameters(parameters)
    mark_parameters(model, output_layers)
    # once more: they are marked now
    parameters = trainable_parameters([model])
    routes = route_all(parameters, config_overrides, rules_of(meaning))
    groups = gather_groups(routes, parameters, config_overrides, meaning)
    splits = find_splits([model], which=meaning.splits)
    return build_routed(
        config, mode, parameters, plan_children(groups, meaning.optimizer, 1), splits
    )


def build_routed(
    config: Any,
    mode: TpModeT,
    parameters: Iterable[ModelParameter],
    children: Iterable[Child],
    splits: Mapping[nn.Parameter, Split],
) -> ShardedOptimizer:
    """Return the optimizer of parameters whose routes are known; collective.

    Args:
        config: The configuration, checked.
        mode: Where the work on matrices happens, as :func:`check_supported` returned it.
        parameters: All trainable parameters in model order.
        children: What steps which groups.
        splits: Logical matrices of fused weights.
    """
    names: dict[Tensor, str] = {item.param: item.name for item in parameters}
    builder = _Builder(config, mode, names, splits)
    for child in children:
        builder.add(child)
    return ShardedOptimizer(builder.groups, builder.parts, names)


def check_supported(config: Any, meaning: Meaning) -> TpModeT:
    """Return where the work on matrices happens.

    Raises:
        ConfigurationError: If a field has no meaning for sharded parameters.
    """
    for name, rule in _UNSUPPORTED.items():
        if value := getattr(config, name, None):
            raise ConfigurationError(name, value, f"{rule}, not here", f"Leave {name} unset")
    if config.lr is None:
        raise ConfigurationError("lr", None, "must be given", "Give the largest learning rate")
    if meaning.exempt_from_clipping:
        rule = "is not supported: all sharded parameters are in one optimizer"
        way_out = "Leave it off, or clip the other parameters' gradients only, in your own loop"
        raise ConfigurationError("muon_exempt_from_clipping", True, rule, way_out)
    if "muon" not in meaning.prefixes:
        return "exchange"
    mode: TpModeT = first_field(config, "mode", ("muon",)) or config.muon_tp_mode
    if mode == "blockwise":
        rule = "would orthogonalize each rank's rows by themselves, which is another update"
        way_out = "Use 'auto', the default of EmergingOptimizerConfig"
        raise ConfigurationError("muon_tp_mode", mode, rule, way_out)
    return mode


class _Builder:
    """Collects parameter groups and what steps them.

    Args:
        config: The configuration.
        mode: Where the work on matrices happens.
        names: Names of the parameters, in model order.
        splits: Logical matrices of fused weights.
    """

    def __init__(
        self,
        config: Any,
        mode: TpModeT,
        names: Mapping[Tensor, str],
        splits: Mapping[nn.Parameter, Split],
    ) -> None:
        self.groups: list[ParamGroup] = []
        self.parts: list[ShardedPart] = []
        self._config = config
        self._mode = mode
        self._names = names
        self._splits: Mapping[Any, Split] = splits
        self._order = {param: number for number, param in enumerate(names)}
        self._meshes = Groups()

    def add(self, child: Child) -> None:
        """Add the groups of one optimizer, and parts that step them."""
        routed = torch_param_groups(child, self._config)
        base, init_state_fn = _base(child.optimizer, routed, self._config)
        check_group_settings(base)
        mine = [
            {**made, **_numbers(made, self._config), "params": group["params"]}
            for made, group in zip(base.param_groups, routed, strict=True)
        ]
        places = slice(len(self.groups), len(self.groups) + len(mine))
        self.groups += mine
        params = [param for group in mine for param in group["params"]]
        params.sort(key=self._order.__getitem__)
        if state_layout(base) == "element_wise":
            part = ElementWisePart(base, init_state_fn, self._config)
            self.parts.append(ShardedPart(part, places, params))
            return
        for members in self._by_ranks(params):
            self.parts.append(self._matrix_part(base, init_state_fn, mine, places, members))

    def _by_ranks(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """Put parameters together that the same ranks store, cut ones and replicated ones apart."""
        together: dict[tuple[Any, bool], list[Tensor]] = {}
        for param in params:
            key = (self._meshes.of(param), is_sharded(param))
            together.setdefault(key, []).append(param)
        return list(together.values())

    def _matrix_part(
        self,
        base: Any,
        init_state_fn: Callable[..., None] | None,
        groups: list[ParamGroup],
        places: slice,
        params: list[Tensor],
    ) -> ShardedPart:
        group = self._meshes.of(params[0])
        device = local_of(params[0]).device
        layout = "adaptive" if isinstance(base, TensorParallelAdaptiveMuon) else state_layout(base)
        mode = self._mode
        if layout == "matrix_state" or (mode == "auto" and is_sharded(params[0])):
            # what is cut has to travel, and at one owner the work is done once
            mode = "exchange"
        splits = [self._splits.get(param) or whole(tuple(param.shape)) for param in params]
        named = {self._names[param]: param for param in params}
        stored = placed_parameters(named, splits, group, mode)
        if layout == "adaptive":
            adaptive = AdaptivePart(base, stored, params, group, device, mode)
            return ShardedPart(adaptive, places, params)
        if layout == "matrix_update":
            update = MatrixUpdatePart(base, stored, params, group, device, mode)
            return ShardedPart(update, places, params)
        part = MatrixStatePart(
            base, stored, params, groups, group, init_state_fn, self._config, device
        )
        return ShardedPart(part, places, params, OwnedState(part, stored, params, group, device))


def _base(
    name: str, groups: list[ParamGroup], config: Any
) -> tuple[torch.optim.Optimizer, Callable[..., None] | None]:
    """Return an optimizer with the settings of every group, over placeholders."""
    stand_ins = [{**group, "params": [nn.Parameter(torch.zeros(1, 1))]} for group in groups]
    if name == "adam":
        cls = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        return cls(stand_ins, lr=config.lr, **adam_numbers(config)), None
    if name == "sgd":
        return torch.optim.SGD(stand_ins, lr=config.lr, momentum=config.sgd_momentum), None
    if name in SCALAR_OPTIMIZERS:
        return build_scalar_optimizer(name, stand_ins, config)
    # sizes of fused weights come with the parameters here, not with the model's configuration
    return create(name, stand_ins, config, [SimpleNamespace(config=None)], None)


def _numbers(group: ParamGroup, config: Any) -> ParamGroup:
    """Return a group's learning rate and weight decay, which no scheduler may ever write."""
    largest = config.lr if group.get("max_lr") is None else group["max_lr"]
    return {
        "lr": largest * group.get("lr_mult", 1.0),
        "weight_decay": config.weight_decay * group.get("wd_mult", 1.0),
    }
