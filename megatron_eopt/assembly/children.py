"""One optimizer of the chain: a torch optimizer for some groups, inside megatron-core's wrapper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_eopt.assembly.chain import SharedGradScaler
from megatron_eopt.assembly.process_groups import OptimizerGroups
from megatron_eopt.assembly.tags import copy_tags
from megatron_eopt.assembly.wrappers import (
    Float32Optimizer,
    MainParamsOptimizer,
    OffloadedOptimizer,
)
from megatron_eopt.base.names import SCALAR_OPTIMIZERS
from megatron_eopt.base.versions import megatron_name
from megatron_eopt.optimizers.entries import create
from megatron_eopt.optimizers.group_settings import check_group_settings
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.scalar import build_scalar_optimizer
from megatron_eopt.routing.groups import Group, param_group
from megatron_eopt.storage.fragment_optimizer import FragmentOptimizer


@dataclass(frozen=True)
class Child:
    """What one optimizer of the chain is made of.

    Attributes:
        optimizer: Name of the torch optimizer.
        is_expert: Whether it holds experts' parameters.
        groups: Its parameter groups.
        chunks: Indices of the model chunks that its parameters come from.
    """

    optimizer: str
    is_expert: bool
    groups: tuple[Group, ...]
    chunks: tuple[int, ...]


def plan_children(
    groups: Sequence[Group], main: str, n_chunks: int, *, first_chunk_apart: bool = False
) -> list[Child]:
    """Return the optimizers of the chain in their order: the main one first, dense before experts.

    Order and number are part of checkpoint formats, so they follow from what all ranks know.

    Args:
        groups: All groups.
        main: Name of the main optimizer, whose dense child always exists.
        n_chunks: Number of model chunks.
        first_chunk_apart: Whether the first chunk's dense parameters get an optimizer of their own,
            so that their gather can overlap with the next optimizer's step.
    """
    everything = tuple(range(n_chunks))
    names = sorted({main} | {group.key.optimizer for group in groups}, key=lambda n: (n != main, n))
    children = []
    for name in names:
        dense_parts = (
            (everything[:1], everything[1:])
            if first_chunk_apart and n_chunks > 1
            else (everything,)
        )
        parts = [(False, chunks) for chunks in dense_parts] + [(True, everything)]
        for is_expert, chunks in parts:
            mine = tuple(
                group
                for group in groups
                if (group.key.optimizer, group.key.is_expert) == (name, is_expert)
                and group.chunks & set(chunks)
            )
            if mine or (not groups and name == main and not is_expert):
                children.append(Child(name, is_expert, mine, chunks))
    return children


def torch_param_groups(child: Child, config: Any) -> list[dict[str, Any]]:
    """Return the parameter groups that the torch optimizer of ``child`` is made of."""
    return [
        param_group(
            group,
            [m.parameter.param for m in group.members if m.parameter.chunk in child.chunks],
            lr=config.lr,
            min_lr=config.min_lr,
        )
        for group in child.groups
    ]


def build_child(
    child: Child,
    config: Any,
    model_chunks: Sequence[Any],
    groups: OptimizerGroups,
    scaler: SharedGradScaler | None,
    number: int = 0,
) -> Any:
    """Return the wrapped optimizer of ``child``.

    Args:
        child: What to build.
        config: The caller's configuration; every child refers to this one object.
        model_chunks: The whole wrapped model.
        groups: Process groups.
        scaler: The loss scale of the chain.
        number: Its place in the chain.
    """
    inner, init_state_fn = build_torch_optimizer(child, config, model_chunks, groups)
    if isinstance(inner, TensorParallelMuon):
        # the chain has looked at the gradient norm when its members step
        inner.check_finite = False
    chunks = [model_chunks[index] for index in child.chunks]
    if groups.dense is not None:
        wrapper = _fragment_optimizer(child, inner, config, scaler, init_state_fn, chunks, groups)
        wrapper.number = number
    else:
        made_early = bool(getattr(inner, "state", None))
        if inner is not None and made_early:
            # State made for the model's parameters: the wrapper may replace them by main ones.
            inner.state.clear()
        if config.bf16 or config.fp16:
            wrapper = MainParamsOptimizer(inner, config, scaler, init_state_fn)
        else:
            wrapper = Float32Optimizer(inner, config, init_state_fn)
        copy_tags(wrapper)
        if made_early and init_state_fn is not None:
            init_state_fn(inner, config)
        wrapper.grad_stats_parallel_group = groups.expert_model if child.is_expert else groups.model
    wrapper.tp_group = groups.tensor
    wrapper.expert_tp_group = groups.expert_tensor
    return wrapper


def make_scaler(config: Any) -> SharedGradScaler | None:
    """Return the loss scale that ``config`` asks for: constant, dynamic (fp16) or none."""
    if config.loss_scale:
        return SharedGradScaler(megatron_name("ConstantGradScaler")(config.loss_scale))
    if not config.fp16:
        return None
    dynamic = megatron_name("DynamicGradScaler")(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
    return SharedGradScaler(dynamic)


def build_torch_optimizer(
    child: Child, config: Any, model_chunks: Sequence[Any], groups: OptimizerGroups
) -> tuple[torch.optim.Optimizer | None, Callable[..., None] | None]:
    """Return the torch optimizer of ``child`` (None without groups) and what makes its state."""
    param_groups = torch_param_groups(child, config)
    if not param_groups:
        return None, None
    optimizer: torch.optim.Optimizer
    init_state_fn: Callable[..., None] | None
    if child.optimizer in SCALAR_OPTIMIZERS:
        optimizer, init_state_fn = build_scalar_optimizer(child.optimizer, param_groups, config)
    else:
        collection = groups.collection
        optimizer, init_state_fn = create(
            child.optimizer, param_groups, config, model_chunks, collection
        )
    check_group_settings(optimizer)
    return optimizer, init_state_fn


def _fragment_optimizer(
    child: Child,
    inner: torch.optim.Optimizer | None,
    config: Any,
    scaler: SharedGradScaler | None,
    init_state_fn: Callable[..., None] | None,
    chunks: list[Any],
    groups: OptimizerGroups,
) -> FragmentOptimizer | OffloadedOptimizer:
    sharding = groups.expert if child.is_expert else groups.dense
    assert sharding is not None
    kind = "expert_parallel_buffers" if child.is_expert else "buffers"
    wrapper_cls = OffloadedOptimizer if config.optimizer_cpu_offload else FragmentOptimizer
    wrapper = wrapper_cls(
        inner,
        config,
        scaler,
        init_state_fn,
        model_chunks=chunks,
        per_model_buffers={
            index: getattr(chunk, kind) for index, chunk in zip(child.chunks, chunks, strict=True)
        },
        data_parallel_group=sharding.data_parallel,
        data_parallel_group_gloo=sharding.data_parallel_gloo,
        data_parallel_group_idx=sharding.model_parallel_rank,
        distributed_optimizer_instance_id=groups.instance,
    )
    # Instances hold copies of the same gradients, so statistics add up within one instance.
    wrapper.grad_stats_parallel_group = groups.stats
    return wrapper
