"""Every data-parallel rank stores and steps whole parameters, or whole tensor-parallel shards."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.utils import get_pg_size
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import gather_objects, raise_together_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import TpModeT
from megatron_eopt.base.place import refuse_part
from megatron_eopt.config.fields import constructor_parameters
from megatron_eopt.config.registry import arguments_cls_of
from megatron_eopt.matrices import Split, whole
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.build import build_over, element_wise_rule
from megatron_eopt.optimizers.element_wise import LocalShardRule
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.sharded_optimizer import Served, ShardedOptimizer
from megatron_eopt.optimizers.specs import OptimizerSpec, optimizer_specs, refuse_own_step
from megatron_eopt.optimizers.update_rule import ParamGroup, fixed, refuse_group
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.storage.slabs import Slabs
from megatron_eopt.wrappers.builders import OptimizerBuildContext, fused_classes
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.gradients import make_scaler

_SAMPLED = 64
"""About so many elements of a weight are compared between ranks."""


class Replicated(StoredWeights):
    """What wrappers of whole parameters have in common; a mixin for megatron-core's."""

    def common_state(self, steps: Sequence[int], main_optimizer: str | None) -> dict[str, Any]:
        """Return what checkpoints store once for all ranks."""
        groups = [
            {
                k: v
                for k, v in group.items()
                if k != "params" and (k, v) != ("optimizer", main_optimizer)
            }
            for group in self.optimizer.param_groups
        ]
        done = max(steps, default=-1)
        counted = {"state": {"common_step": torch.tensor(float(done))}} if done >= 0 else {}
        return {"param_groups": groups, **counted}

    def collect_gradients(self) -> None:
        """Hand this step's gradients to the stepped tensors, in their dtype.

        Raises:
            ConfigurationError: If a group has a parameter that came after this was built.
        """
        # before any optimizer of the chain changes anything
        if self.assigned:
            refuse_new(self.optimizer.param_groups, self.shards)
        for rule in self.update_rules:
            rule.check_shapes()
        super().collect_gradients()


def refuse_new(groups: Iterable[ParamGroup], shards: Iterable[ParamShard]) -> None:
    """Raise a ConfigurationError if a group has a parameter that no rule steps."""
    stepped = {shard.main for shard in shards}
    for param in (param for group in groups for param in group["params"]):
        if param not in stepped:
            raise fixed("param_groups", f"a new parameter of shape {tuple(param.shape)}")


class MainParamsOptimizer(Replicated, Float16OptimizerWithFloat16Params):
    """For bf16 and fp16: steps float32 copies of the parameters."""

    def common_state(self, steps: Sequence[int], main_optimizer: str | None) -> dict[str, Any]:
        """Return the same in the format of megatron-core's wrapper, with the loss scale."""
        scale = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": super().common_state(steps, main_optimizer), **scale}

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's main weights with its parts of the parameters."""
        return [
            (local_of(shard.main), local_of(shard.param).detach())
            for shard in self.shards
            if shard.main is not shard.param
        ]

    def _copy_model_grads_to_main_grads(self) -> None:
        """Hand gradients to the stepped tensors; a model without DDP has only torch's own."""
        for item in self.shards:
            grad = getattr(item.param, "main_grad", item.param.grad)
            if item.main is item.param:
                item.main.grad = grad
            else:
                # the main copy needs a gradient of its own dtype; the model's is freed, unless
                # DDP's buffer holds it
                item.main.grad = None if grad is None else grad.float()
                item.param.grad = None

    def _copy_main_params_to_model_params(self) -> None:
        self.copy_mains()

    def mains(self) -> dict[Tensor, Tensor]:
        """Return the main weights of 16-bit parameters."""
        groups = zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
        return {param: main for pair in groups for param, main in zip(*pair, strict=True)}


class Float32Optimizer(Replicated, FP32Optimizer):
    """For float32: steps the parameters themselves."""

    def _copy_model_grads_to_main_grads(self) -> None:
        # for float32, megatron-core does no more here than this
        self.prepare_grads()


def build_replicated(
    context: OptimizerBuildContext, storage_of: Callable[..., StoredWeights] | None = None
) -> OptimizerChain | None:
    """Return the chain that steps whole parameters, or whole tensor-parallel shards; collective.

    All data-parallel ranks must have the same parameters and gradients. For parameters that are cut
    over them, use :func:`~megatron_eopt.contrib.declared_boxes.build_sharded`: here, each rank
    would take its part for a matrix, and compute a gradient norm of its own.

    Args:
        context: Settings, routing and model. Without ``storage_of``, the result is None unless the
            settings ask for this storage.
        storage_of: StoredWeights class to use instead of the built-in ones; called as
            ``(optimizer, config, init_state_fn=...)``.

    Raises:
        ConfigurationError: If parameters are DTensors or declared parts or, with ``storage_of``, if
            shapes or sampled weights differ between data-parallel ranks.
    """
    settings, chunks = context.settings, context.model_chunks
    if storage_of is None and settings.storage != "replicated":
        return None
    _check_copies(context, compare=storage_of is not None)
    scaler = make_scaler(settings) if settings.half else None
    if storage_of is None:
        what = f"Mixed precision ({settings.half})" if settings.half else "Megatron's DDP"
        check_dtypes(context.routing.names, what, double=not settings.half)
        if settings.half:
            storage_of = functools.partial(MainParamsOptimizer, grad_scaler=scaler)
        else:
            check_half(context.routing)
            storage_of = Float32Optimizer
    specs = optimizer_specs(settings, context.routing, context.arguments, fused=fused_classes())
    storages = [_storage(spec, context, storage_of) for spec in specs]
    return OptimizerChain(storages, settings, scaler, chunks)


def _check_copies(context: OptimizerBuildContext, *, compare: bool) -> None:
    """Raise a ConfigurationError if data-parallel ranks have parts of parameters, not copies."""
    seen: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for route in context.routing.routes:
        name, param = route.parameter.name, route.parameter.param
        refuse_part(param, name)
        if isinstance(param, DTensor):
            rule = "is a DTensor, but this storage steps whole parameters"
            raise ConfigurationError(name, param.placements, rule, "Use build_sharded, or FSDP")
        # a few elements tell copies from parts of equal shape, and are cheap to send
        numbers = param.detach().reshape(-1)
        sample = numbers[:: max(1, numbers.numel() // _SAMPLED)].tolist() if compare else []
        seen[route.parameter.is_expert][name] = (tuple(param.shape), sample)
    for is_expert, kind in ((False, "dp_cp"), (True, "expt_dp")):
        group = getattr(context.collection, kind, None)
        if not compare or group is None or get_pg_size(group) == 1:
            continue
        for other_rank in gather_objects(seen[is_expert], group):
            odd = [
                name for name, sample in seen[is_expert].items() if other_rank.get(name) != sample
            ]
            if odd:
                rule = "has other values on another data-parallel rank, so it is not a copy"
                hint = "Use build_sharded for parts; broadcast copies before building the optimizer"
                raise ConfigurationError("model_chunks", odd[:8], rule, hint)


def check_half(routing: Routing) -> None:
    """Raise a ConfigurationError for 16-bit parameters, which need main weights."""
    for param, name in routing.names.items():
        if param.dtype in (torch.bfloat16, torch.float16):
            field = "bf16" if param.dtype == torch.bfloat16 else "fp16"
            rule = f"{name} is {param.dtype}, so the optimizer needs float32 main weights"
            raise ConfigurationError(field, False, rule, f"Set {field}=True")


def _check_whole(spec: OptimizerSpec, routing: Routing) -> None:
    """Raise if a parameter declares several matrices but its optimizer would step it as one."""
    if "splits" in constructor_parameters(arguments_cls_of(spec.name)):
        return
    for item in (route.parameter for route in routing.routes if route.optimizer == spec.name):
        declared = getattr(item.param, "eopt_split", None)
        split = routing.splits.get(item.param)
        several = split is not None and sum(part.count for part in split.parts) > 1
        folded = split is not None and len(split.shape) != item.param.dim()
        if folded or (declared is not None and several):
            rule = f"{spec.name} does not split parameters without use_distributed_optimizer"
            hint = "Set use_distributed_optimizer=True, or remove eopt_split"
            raise ConfigurationError(f"{item.name}.eopt_split", declared, rule, hint)


def _storage(
    spec: OptimizerSpec, context: OptimizerBuildContext, storage_of: Callable[..., StoredWeights]
) -> StoredWeights:
    collection, config = context.collection, context.settings.config
    optimizer, init_state_fn, made_early = spec.optimizer, spec.init_state_fn, False
    # how a weight is cut is on the model's parameter, not on its main copy, so rules come first
    assigned: Sequence[AssignedRule] = ()
    if optimizer is not None and spec.layout == "matrix_update":
        routing = context.routing
        source = SlabSource(collection, optimizer.tp_mode, routing.matrices)
        optimizer = build_over([spec], routing.names, source, config, WholeOptimizer)
        assigned, init_state_fn, made_early = optimizer.assigned, state_exists, True
    elif optimizer is not None:
        refuse_own_step(optimizer)
        if spec.layout == "matrix_state":
            _check_whole(spec, context.routing)
        made_early = bool(optimizer.state)
        # this state is for the model's parameters, which the wrapper may replace by main weights
        optimizer.state.clear()
        assigned = [_alone(spec, context)]
    storage = storage_of(optimizer, config, init_state_fn=init_state_fn)
    # data-parallel ranks have equal gradients, so the norm is summed over model-parallel ranks
    # only; older releases of megatron-core lack the first of these groups
    names = ("tp_ep_pp_with_egtp_remat", "tp_ep_pp") if spec.is_expert else ("mp",)
    groups = (getattr(collection, name, None) for name in (*names, "mp"))
    storage.count_in(next(group for group in groups if group is not None), collection)
    if optimizer is None:
        return storage
    storage.set_assigned(assigned)
    # other state is created by the first step, as in megatron-core, or by a save (``prepare``)
    for item in assigned if made_early else ():
        with item.groups_and_state() as (own_groups, state):
            item.rule.init(own_groups, state)
    if optimizer is spec.optimizer:
        optimizer.add_param_group = refuse_group
    return storage


def state_exists(*_: Any) -> None:
    """Do nothing, in place of a function that creates state, because it is there already."""


def _alone(spec: OptimizerSpec, context: OptimizerBuildContext) -> AssignedRule:
    """Return the rule of an optimizer that steps its own groups."""
    config, slabs = context.settings.config, Slabs(context.collection)
    params = (param for group in spec.optimizer.param_groups for param in group["params"])
    names = {param: context.routing.names[param] for param in params}
    if spec.layout == "element_wise":
        rule = element_wise_rule(spec, names, config)
    else:
        shards = [ParamShard(name, p, ranks=slabs.ranks_of(p)) for p, name in names.items()]
        rule = LocalShardRule(spec.optimizer, spec.init_state_fn, config, shards)
    rule.is_clipped = spec.is_clipped
    return AssignedRule(rule, spec.optimizer)


class WholeOptimizer(ShardedOptimizer):
    """Steps parameters that users may move between groups, as in torch's own optimizers.

    All ranks that store a part of a parameter have it in a group.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], served: Served, params: Iterable[Tensor]
    ) -> None:
        # of all groups, however many there will be
        super().__init__(groups, [(rule, slice(None)) for rule, _ in served], params)

    def _refuse_strangers(self, now: Sequence[Sequence[int]]) -> None:
        """Raise a ConfigurationError if a group has a parameter that came after the build."""
        refuse_new(self.param_groups, self.shards)


class SlabSource:
    """Knows which ranks store which slabs of parameters that tensor parallelism may cut.

    ``matrices`` are the logical matrices of each; None for a single one.
    """

    def __init__(
        self, collection: Any, mode: TpModeT, matrices: Mapping[Tensor, Split | None]
    ) -> None:
        self._slabs, self._mode, self._matrices = Slabs(collection, mode), mode, matrices

    def kind_of(self, param: Tensor) -> Any:
        """Return the ranks that store a part of a parameter; collective over them."""
        return self._slabs.ranks_of(param).group

    def shards(
        self, spec: OptimizerSpec, params: Mapping[str, Tensor]
    ) -> tuple[list[ParamShard], ExchangeConfig]:
        """Return the shards of some parameters, and how they are exchanged; collective."""
        first = next(iter(params.values()))
        shards = raise_together_in(
            self.kind_of(first),
            lambda: [self._slabs.shard(name, it, self._split_of) for name, it in params.items()],
        )
        return shards, ExchangeConfig(self._mode, device=first.device)

    def _split_of(self, param: Tensor, shape: tuple[int, ...]) -> Split:
        return self._matrices[param] or whole(shape)
