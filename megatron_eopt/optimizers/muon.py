"""Muon as a torch optimizer, for parameters that tensor parallelism may shard."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch import Tensor

from megatron_eopt.base.agreement import raise_together_in
from megatron_eopt.base.errors import (
    ConfigurationError,
)
from megatron_eopt.base.names import TpModeT
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.matrices import whole
from megatron_eopt.optimizers.exchange import MatrixExchange
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.muon_settings import MuonSettings
from megatron_eopt.optimizers.update_rule import ids_of, loss_of
from megatron_eopt.storage.shard import ParamShard, Ranks, group_by_ranks
from megatron_eopt.storage.slabs import SlabRanks, partition_dim_and_group, row_group, slab

_ARGUMENTS = {
    "coefficients": "coefficient_type",
    "steps": "num_ns_steps",
    "precision": "fp32_matmul_prec",
    "eps": "ns_eps",
}
"""Arguments of Muon, by their names in ``Orthogonalization``."""

_OF_ROWS = (
    "is_gtp_weight_remat",
    "gtp_remat_size",
    "pad_length",
    "group",
    "allreduce",
    "expert_tp",
)
"""Attributes of a parameter that say how weight rematerialization has cut its rows."""


class TensorParallelMuon(MuonSettings, OrthogonalizedOptimizer):
    """Muon: momentum that is orthogonalized matrix by matrix with a Newton-Schulz iteration.

    The method is Keller Jordan's (https://kellerjordan.github.io/posts/muon/). A parameter of shape
    (out, in) may be a tensor-parallel shard of a larger matrix. Its attribute ``partition_dim``
    then gives the sharded dimension (-1 or absent: none). Matrices of equal shape are computed in
    one batch.

    A step is collective over the groups that shard parameters, and makes a new plan if parameters
    or groups have changed. As in other torch optimizers, all state is in ``state`` and
    ``param_groups``. If a subclass overrides methods that get whole parameters, parameters are
    updated one by one, as in emerging-optimizers.

    The arguments are those of :class:`MuonSettings`. ``params`` may also be parameters, or pairs
    (name, parameter); names appear in messages.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds, or a subclass that updates
            whole parameters is used with ``momentum_dtype`` or ``cautious_weight_decay``.
    """

    @property
    def called(self) -> str:  # type: ignore[override]
        """Name of the class, for messages."""
        return type(self).__name__

    # planned shards of each group, their update rules, and what computes single ones
    _planned: Sequence[Sequence[ParamShard]] = ()
    _update_rules: Sequence[MuonRule] = ()
    _alone: dict[Tensor, MatrixExchange]

    def _take_groups(self, params: Any, defaults: dict[str, Any]) -> None:
        self._refuse_uncalled("scaled_orthogonalize_fn_with_gtp_remat", "orthogonalize")
        # not super(), because other bases of a subclass have other arguments
        OrthogonalizedOptimizer.__init__(
            self,
            params,
            **defaults,
            nesterov=self.nesterov,
            weight_decay_method=self.weight_decay_method,
            fp32_matmul_prec=self.fp32_matmul_prec,  # type: ignore[arg-type]
            scaled_orthogonalize_fn=self._orthogonalize_whole,
        )

    def _refuse_own_way(self, argument: str, value: object) -> None:
        """Raise a ConfigurationError for an option that a subclass's own step would not use."""
        if not self.steps_in_pieces():
            name = type(self).__name__
            rule = f"does not work with {name}, which overrides how parameters are updated"
            hint = "Leave it out, or do not override methods that a step calls"
            raise ConfigurationError(argument, value, rule, hint)

    def _refuse_uncalled(self, name: str, caller: str) -> None:
        """Raise a ConfigurationError if a subclass overrides a method that only upstream calls."""
        changed = [n for n in (name, caller) if not _is_same(type(self), n)]
        if changed == [name]:
            rule = f"is overridden by {type(self).__name__}, but no step calls it"
            raise ConfigurationError(name, "overridden", rule, f"Call it from your own {caller}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; collective over the groups that shard them.

        Args:
            closure: Computes the loss again, with gradients enabled.

        Returns:
            The closure's loss.
        """
        loss = loss_of(closure)
        if self.steps_in_pieces():
            for update_rule in self.plan():
                update_rule.step(self.param_groups, self.state)
        else:
            with matmul_precision():
                super().step()
        return loss

    def plan(self) -> Sequence[MuonRule]:
        """Return the rules that update the groups; collective if there are new parameters.

        Where parameters or groups have only moved or left, the rules stay, because a storage
        refers to them.
        """
        wanted = ids_of(self.param_groups)
        if self._planned and wanted == [[id(s.main) for s in group] for group in self._planned]:
            return self._update_rules
        by_id = {id(shard.main): shard for rule in self._update_rules for shard in rule.shards}
        if self._planned and by_id.keys() >= set(chain(*wanted)):
            self._planned = [[by_id[key] for key in group] for group in wanted]
            for update_rule in self._update_rules:
                update_rule.attach(self.param_groups)
            return self._update_rules
        dense, experts = (getattr(self.pg_collection, name, None) for name in ("tp", "expt_tp"))
        # a rank that raises alone would leave the others waiting
        self._planned = raise_together_in(dense, lambda: raise_together_in(experts, self._shards))
        update_rules: list[MuonRule] = []
        for shards in group_by_ranks(shard for group in self._planned for shard in group):
            exchange_config = replace(self._exchange_config, device=shards[0].main.device)
            update_rule = self.update_rule_over(shards, exchange_config)
            update_rule.attach(self.param_groups)
            update_rules.append(update_rule)
        self._update_rules, self._alone = update_rules, {}
        return self._update_rules

    def _shards(self) -> list[list[ParamShard]]:
        """Return the shards of each group's parameters, also of what stands for parameters."""
        model_of = {shard.main: shard.param for group in self._planned for shard in group}
        shards: list[list[ParamShard]] = []
        names: set[str] = set()
        for group in self.param_groups:
            shards.append([])
            given = group.get("param_names") or [None] * len(group["params"])
            for name, param in zip(given, group["params"], strict=True):
                own = name if name and name not in names else f"{name or 'parameter'} {len(names)}"
                names.add(own)
                shards[-1].append(self.shard(own, model_of.get(param, param)))
                shards[-1][-1].main = param
        return shards

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the scaled update of one parameter; collective over the group that shards it.

        Args:
            p: The parameter; its attributes say how it is sharded and fused.
            grad: The direction to orthogonalize, of the same shape.
            **kwargs: Settings of its parameter group, which are ignored.
        """
        self.plan()
        if p not in self._alone:
            matching = (shard for group in self._planned for shard in group if shard.main is p)
            shard = next(matching, None) or self.shard("parameter", p)
            self._alone[p] = self._exchange_alone(shard, self.tp_mode, p.device)
        return self._alone[p].updates([grad.detach()])[0].to(grad.dtype)

    def scaled_orthogonalize_fn_with_gtp_remat(
        self,
        p: Tensor,
        grad: Tensor,
        tp_group: dist.ProcessGroup | None,
        partition_dim: int | None,
    ) -> Tensor:
        """Return the scaled update of one matrix, as megatron-core's method; collective.

        Unlike :meth:`orthogonalize`, it takes this rank's part of a single matrix, such as that of
        the queries in a fused weight, and is told how tensor parallelism has cut it.

        Args:
            p: The parameter, whose attributes say how weight rematerialization has cut its rows.
            grad: The direction to orthogonalize.
            tp_group: The ranks that tensor parallelism has cut it over.
            partition_dim: The dimension in which it has; None if it has not.
        """
        part = grad.detach()
        for name in _OF_ROWS:
            if hasattr(p, name):
                setattr(part, name, getattr(p, name))
        rows = row_group(part, self.pg_collection, self.tp_mode)
        mode = self.tp_mode
        if mode == "blockwise" and rows is not None:
            partition_dim = None  # this rank's rows are a matrix
        elif mode == "blockwise":
            mode = "duplicated"  # the caller names a dimension, so the matrix is not this rank's
        if Ranks.of(tp_group).group is None or partition_dim is None:
            tp_group, partition_dim = None, -1
        cut = partition_dim, tp_group
        shard = slab("matrix", part, lambda _, shape: whole(shape), cut, rows, self._slab_ranks)
        return self._exchange_alone(shard, mode, grad.device).updates([part])[0].to(grad.dtype)

    def _exchange_alone(
        self, shard: ParamShard, mode: TpModeT, device: torch.device
    ) -> MatrixExchange:
        """Return what computes a single parameter."""
        exchange_config = replace(self._exchange_config, mode=mode, device=device)
        update = functools.partial(self._orthogonalize_stack, transposed=shard.split.transposed)
        return MatrixExchange([shard], update, exchange_config)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, with momentum that every ``momentum_dtype`` can load."""
        result: dict[str, Any] = super().state_dict()
        state = result["state"]
        if state and self.momentum_dtype != "fp32":
            keys = [key for group in result["param_groups"] for key in group["params"]]
            params = [param for group in self.param_groups for param in group["params"]]
            key_of = dict(zip(params, keys, strict=True))
            for update_rule in self.plan():
                for _, param, number in update_rule.numbered(self.param_groups):
                    if (key := key_of[param]) in state:
                        state[key] = update_rule.saved_form(number, state[key])
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; collective if momentum is stored in 8 bits."""
        super().load_state_dict(state_dict)
        if self.state and self.momentum_dtype != "fp32":
            for update_rule in self.plan():
                update_rule.pack(self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies contain: no plan and, as in all torch optimizers, no hooks."""
        # torch keeps hooks in attributes with this prefix
        own = {k: v for k, v in vars(self).items() if not k.startswith("_optimizer_")}
        # a scheduler wraps `step` in an attribute of the instance (torch/optim/lr_scheduler.py)
        plan = ("_planned", "_update_rules", "_alone", "_slab_ranks", "step")
        return {k: v for k, v in own.items() if k not in plan}

    @functools.cached_property
    def _slab_ranks(self) -> SlabRanks:
        """Keeps the groups over which tensor parallelism and weight rematerialization both cut."""
        return SlabRanks()

    @classmethod
    def steps_in_pieces(cls) -> bool:
        """Whether no method that a subclass overrides needs whole parameters."""
        hooks = ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")
        own = ("step", "orthogonalize", "_init_group", *hooks)
        return all(_is_same(cls, name) for name in own)

    def shard(self, name: str, param: Tensor) -> ParamShard:
        """Return this rank's shard of a parameter, with its logical matrices."""
        cut = partition_dim_and_group(param, self.pg_collection, self.tp_mode)
        rows = row_group(param, self.pg_collection, self.tp_mode)
        split_of = functools.partial(self.split_of, name=name)
        return slab(name, param, split_of, cut, rows, self._slab_ranks)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Create the state of all parameters, which loading needs."""
        if self.steps_in_pieces():
            for update_rule in self.plan():
                update_rule.init(self.param_groups, self.state)
        else:
            super()._init_group(group, skip_non_grad_params)

    def _orthogonalize_whole(
        self,
        grad: Tensor,
        tp_group: dist.ProcessGroup | None = None,
        partition_dim: int | None = None,
    ) -> Tensor:
        """Return the update of one matrix, for subclasses that update whole parameters."""
        if partition_dim is not None:
            # a tensor without attributes has all its rows here
            part = grad.detach()
            return self.scaled_orthogonalize_fn_with_gtp_remat(part, part, tp_group, partition_dim)
        scales = self.orthogonalization.scales((grad.shape[0], grad.shape[1]))
        return self.orthogonalization(grad.detach(), scale=scales)


def _is_same(cls: type, name: str) -> bool:
    """Return whether a subclass of TensorParallelMuon does not override a method."""
    return _unhooked(cls, name) is _unhooked(TensorParallelMuon, name)


def _unhooked(cls: type, name: str) -> Any:
    """Return a method of a class, without the wrapper that torch puts around ``step``."""
    method = getattr(cls, name)
    return method.__wrapped__ if getattr(method, "hooked", False) else method
