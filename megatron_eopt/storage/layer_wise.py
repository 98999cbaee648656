"""The layer-wise distributed optimizer: state in fragments, matrices whole while they step.

1. Gradients arrive in fragments, as Megatron's distributed optimizer leaves them.
2. They are unscaled, checked and clipped, once for all parameters.
3. Each buffer set steps its composite; matrices travel to their owners and back.
4. When all have stepped, the parameters are gathered, once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.storage.buffer_set import BufferSetOptimizer
from megatron_eopt.storage.buffer_sets import BufferSet, buffer_sets
from megatron_eopt.storage.checkpoint.rank_files import load_rank_file, save_rank_file
from megatron_eopt.storage.checkpoint.saved_groups import check_structure, parts_of
from megatron_eopt.storage.composite import bind
from megatron_eopt.storage.loss_scale import UnscaledOnce, make_scaler, overflowed, unscale_
from megatron_eopt.storage.non_finite import FiniteNormChain
from megatron_eopt.storage.parts import Base, build_composite
from megatron_eopt.storage.refusals import (
    check_base_optimizers,
    check_buffers,
    check_config,
    check_model_chunks,
)

__all__ = ["LayerWiseDistributedOptimizer"]


class LayerWiseDistributedOptimizer(FiniteNormChain):
    """Keeps every optimizer's state in fragments of Megatron's buffers, or whole at an owner.

    Takes base torch optimizers and wraps them itself: those that update each number by itself step
    on fragments, Muon keeps momentum in fragments and brings matrices to their owners, all others
    get whole matrices. Works on any model that is wrapped in Megatron's DDP, best with
    ``use_distributed_optimizer=True``. All ranks must construct it together.

    Args:
        optimizers: Base torch optimizers over the model's parameters; every trainable parameter in
            exactly one of them.
        config: An ``OptimizerConfig``.
        pg_collection: Process groups; None means Megatron's global ones.
        init_state_fn_list: For each optimizer a function ``(optimizer, config)`` that makes its
            state exist, or None.
        model_chunks: The wrapped model chunks of this rank.

    Raises:
        ConfigurationTypeError: If an optimizer is wrapped already, or the model is not.
        ConfigurationError: If a mode, a group or a parameter cannot be served.
    """

    # Callers ask this class how DDP is to lay parameters out: as for Adam, without padding.
    compute_full_param_layout = staticmethod(DistributedOptimizer.compute_full_param_layout)

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: Sequence[Callable[..., None] | None] | None = None,
        model_chunks: Sequence[Any] | None = None,
    ) -> None:
        check_config(config)
        check_base_optimizers(optimizers)
        check_model_chunks(model_chunks)
        chunks = list(model_chunks or ())
        self.pg_collection = pg_collection
        self._scaler = make_scaler(config)
        self._unscaled = UnscaledOnce(chunks)
        bases = _bases(optimizers, init_state_fn_list)
        children = _children(bases, config, pg_collection, chunks, self._scaler)
        super().__init__(children)
        self._names = _names(chunks)
        self.model_chunks = self.watched_chunks = chunks
        self.is_stub_optimizer = False
        self._clipped = self._clipped_params()

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Copy all gradients to the main parameters and unscale them, at most once.

        Returns:
            Whether any gradient on any rank overflowed; the loss scale has then been told.
        """
        if self._scaler is not None and (known := self._unscaled.recall()) is not None:
            return known
        for child in self.chained_optimizers:
            child._copy_model_grads_to_main_grads()
        if self._scaler is None:
            return False
        found = unscale_([p.grad for p in self.get_parameters()], self._scaler.inv_scale)
        found_inf = overflowed(found, self.get_grad_stats_parallel_group())
        self._scaler.update(found_inf)
        self._unscaled.remember(found_inf)
        return found_inf

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the main parameters' gradients."""
        self._unscaled.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Update all parameters.

        Returns:
            Whether they were updated, the gradient norm before clipping, and the number of zeros in
            the gradients if the configuration asks for it.

        Raises:
            NonFiniteError: If a gradient is inf or nan and no loss scale lets the step be skipped;
                on every rank, with the same names, before anything has changed.
        """
        self.grad_norms_by_group: dict[str, float] = {}
        if self.prepare_grads():
            return False, None, None
        grad_norm = self.get_grad_norm()
        self._clip(grad_norm)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        if self.is_above_skip_threshold(grad_norm):
            return False, grad_norm, zeros
        return self.step_with_ready_grads(), grad_norm, zeros

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step all buffer sets, then gather parameters unless the forward pass will."""
        self._unscaled.forget()
        for child in self.chained_optimizers:
            child.step_with_ready_grads()
        for chunk in self.model_chunks:
            # with overlap the hooks of the next forward pass do it
            ddp_config = chunk.ddp_config
            if ddp_config.use_distributed_optimizer and not ddp_config.overlap_param_gather:
                chunk.start_param_sync()
        for child in self.chained_optimizers:
            child.gather_replicated_params()
        return True

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> dict[Any, Any]:
        """Return what ``dist_checkpointing`` saves or loads.

        State is saved by parameter, so it loads at any layout; no name depends on this chain.

        Args:
            model_sharded_state_dict: The model's, with its parameters themselves as data.
            is_loading: Whether to load.
            **kwargs: ``metadata``, the trainer's choice of a form.
        """
        states = [
            child.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
            for child in self.chained_optimizers
        ]
        return states[0] if len(states) == 1 else dict(enumerate(states))

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Load what :meth:`sharded_state_dict` asked for, or :meth:`state_dict` returned.

        What is common to all parameters is found wherever another chain of optimizers has put it.

        Raises:
            ConfigurationTypeError: If it is not built like one of these.
        """
        check_structure(state_dict)
        parts = parts_of(state_dict, len(self.chained_optimizers))
        for child, part in zip(self.chained_optimizers, parts, strict=True):
            child.load_state_dict(part)

    def save_state_dict_to_file(self, filename: str) -> None:
        """Write this rank's state, for checkpoints of format ``torch``; see :mod:`.rank_files`."""
        save_rank_file(filename, self.chained_optimizers, self._names)

    def load_state_dict_from_file(self, filename: str) -> None:
        """Read what :meth:`save_state_dict_to_file` wrote at the same layout.

        Raises:
            ConfigurationError: On every rank, if a file is missing, broken or of another layout.
        """
        load_rank_file(filename, self.chained_optimizers, self._names)

    def _clip(self, grad_norm: float) -> None:
        if self.config.clip_grad <= 0:
            return
        norms = {None: grad_norm, **self._compute_grad_norms_by_group()}
        for name, params in self._clipped.items():
            clip_grad_by_total_norm_fp32(params, self.config.clip_grad, norms[name])

    def _clipped_params(self) -> dict[str | None, list[Tensor]]:
        """Return the main parameters whose gradients are clipped, by the norm that bounds them."""
        exempt = getattr(self.config, "muon_exempt_from_clipping", False)
        clipped: dict[str | None, list[Tensor]] = {}
        for child in self.chained_optimizers:
            for part in child.optimizer.parts:
                if exempt and part.needs_matrices:
                    continue
                for group in child.optimizer.groups_of(part):
                    for param in group["params"]:
                        name = getattr(param, GRAD_NORM_GROUP_ATTR, None)
                        clipped.setdefault(name, []).append(param)
        return clipped


def _bases(
    optimizers: Sequence[torch.optim.Optimizer],
    init_state_fns: Sequence[Callable[..., None] | None] | None,
) -> list[Base]:
    functions = list(init_state_fns or [None] * len(optimizers))
    if len(functions) != len(optimizers):
        raise ConfigurationError(
            "init_state_fn_list",
            functions,
            f"must have one entry for each of the {len(optimizers)} optimizers",
            "Give None for an optimizer without one",
        )
    return [Base(*pair) for pair in zip(optimizers, functions, strict=True)]


def _children(
    bases: Sequence[Base], config: Any, pg_collection: Any, chunks: list[Any], scaler: Any
) -> list[BufferSetOptimizer]:
    names = _names(chunks)
    sets = buffer_sets(chunks, pg_collection)
    groups = [group for base in bases for group in base.optimizer.param_groups]
    check_buffers([buffer for item in sets for buffer in item.all_buffers], groups, names)
    children = []
    for item in sets:
        composite = build_composite(bases, item, names, config)
        children.append(_child(composite, item, config, chunks, scaler))
        children[-1].number = len(children) - 1
    for base in bases:
        # state that was made for the model's parameters would only take memory
        bind(base.optimizer, [], defaultdict(dict))
    return children


def _names(chunks: Sequence[Any]) -> dict[Tensor, str]:
    prefix = "chunk {}: {}" if len(chunks) > 1 else "{1}"
    return {
        param: prefix.format(number, name)
        for number, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


def _child(
    composite: Any, item: BufferSet, config: Any, chunks: list[Any], scaler: Any
) -> BufferSetOptimizer:
    child = BufferSetOptimizer(
        composite,
        config,
        scaler,
        model_chunks=chunks,
        per_model_buffers=item.buffers,
        data_parallel_group=item.data,
        data_parallel_group_gloo=item.data_gloo,
        data_parallel_group_idx=item.model_rank,
        distributed_optimizer_instance_id=item.instance,
    )
    # what the base class looks up to count every gradient once
    child.grad_stats_parallel_group = item.stats
    child.tp_group = item.tensor
    child.expert_tp_group = item.expert_tensor
    return child
