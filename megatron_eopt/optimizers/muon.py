"""Muon as a torch optimizer, for parameters that tensor parallelism may shard."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch import Tensor

from megatron_eopt.base.agreement import raise_together_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import TpModeT
from megatron_eopt.matrices import whole
from megatron_eopt.optimizers.exchange import MatrixExchange
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.muon_settings import MuonSettings
from megatron_eopt.optimizers.update_rule import ids_of, loss_of
from megatron_eopt.storage.shard import ParamShard, Ranks, group_by_ranks
from megatron_eopt.storage.slabs import Slabs, row_group

_OF_ROWS = (
    "is_gtp_weight_remat",
    "gtp_remat_size",
    "pad_length",
    "group",
    "allreduce",
    "expert_tp",
)
"""Attributes of a parameter that say how weight rematerialization has cut its rows."""

_NOT_CALLED = (
    "orthogonalize",
    "scaled_orthogonalize_fn",
    "scaled_orthogonalize_fn_with_gtp_remat",
    "pre_weight_update_fn_inplace",
    "post_weight_update_fn_inplace",
    "_init_group",
)
"""Methods that other classes call in a step, with whole parameters."""


class TensorParallelMuon(MuonSettings, OrthogonalizedOptimizer):
    """Muon: momentum that is orthogonalized matrix by matrix with a Newton-Schulz iteration.

    The method is Keller Jordan's (https://kellerjordan.github.io/posts/muon/). A parameter of shape
    (out, in) may be a tensor-parallel shard of a larger matrix. Its attribute ``partition_dim``
    then gives the sharded dimension (-1 or absent: none). Matrices of equal shape are computed in
    one batch.

    A step is collective over the groups that shard parameters. As in other torch optimizers, all
    state is in ``state`` and ``param_groups``, and parameters may come and go.

    The arguments are those of :class:`MuonSettings`. ``params`` may also be parameters, or pairs
    (name, parameter); names appear in messages.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds, or a subclass overrides a method
            that no step calls.
    """

    @property
    def called(self) -> str:  # type: ignore[override]
        """Name of the class, for messages."""
        return type(self).__name__

    # the tensors of each group, by their ids, for which rules were made, the rules, and what
    # computes single parameters
    _planned: list[list[int]] | None = None
    _update_rules: Sequence[MuonRule] = ()
    _alone: dict[Tensor, MatrixExchange]

    def _take_groups(self, params: Any) -> None:
        for name in _NOT_CALLED:
            if getattr(type(self), name) is not getattr(TensorParallelMuon, name):
                rule = f"is overridden by {type(self).__name__}, but no step calls it"
                hint = (
                    "Derive a rule from MuonRule, whose init, _update and _apply are called, and "
                    "set it as update_rule_class"
                )
                raise ConfigurationError(name, "overridden", rule, hint)
        # not super(), because other bases have other arguments
        torch.optim.Optimizer.__init__(self, params, self.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; collective over the groups that shard them.

        Args:
            closure: Computes the loss again, with gradients enabled.

        Returns:
            The closure's loss.
        """
        loss = loss_of(closure)
        for update_rule in self._rules():
            update_rule.step(self.param_groups, self.state)
        return loss

    def _rules(self) -> Sequence[MuonRule]:
        """Return the rules that update the groups; collective if there are new parameters."""
        now = ids_of(self.param_groups)
        if now == self._planned:
            return self._update_rules
        stepped = {id(param) for rule in self._update_rules for param in rule.params}
        if self._planned is not None and stepped.issuperset(chain(*now)):
            # they have only moved or left
            for update_rule in self._update_rules:
                update_rule.attach(self.param_groups)
        else:
            dense, experts = (getattr(self.pg_collection, name, None) for name in ("tp", "expt_tp"))
            # a rank that raises alone would leave the others waiting
            shards = raise_together_in(dense, lambda: raise_together_in(experts, self._shards))
            self._update_rules = [self._rule_of(members) for members in group_by_ranks(shards)]
            self._alone = {}
        self._planned = now
        return self._update_rules

    def _shards(self) -> list[ParamShard]:
        """Return the shards of all parameters, each with a name of its own."""
        shards: dict[str, ParamShard] = {}
        for group in self.param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            for name, param in zip(given, group["params"], strict=True):
                numbered = (f"{name or 'parameter'} {n}" for n in count(len(shards)))
                own = next(n for n in chain([name] * bool(name), numbered) if n not in shards)
                shards[own] = self._shard(own, param)
        return list(shards.values())

    def _shard(self, name: str, param: Tensor) -> ParamShard:
        return self._slabs.shard(name, param, functools.partial(self.split_of, name=name))

    def _rule_of(self, shards: list[ParamShard]) -> MuonRule:
        config = replace(self._exchange_config, device=shards[0].main.device)
        update_rule = self.update_rule_over(shards, config)
        update_rule.attach(self.param_groups)
        return update_rule

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the scaled update of one parameter; collective over the group that shards it.

        Args:
            p: The parameter; its attributes say how it is sharded and fused.
            grad: The direction to orthogonalize, of the same shape.
            **kwargs: Settings of its parameter group, which are ignored.
        """
        shards = {shard.main: shard for rule in self._rules() for shard in rule.shards}
        if p not in self._alone:
            shard = shards.get(p) or self._shard("parameter", p)
            self._alone[p] = self._exchange_alone(shard, self.tp_mode, p.device)
        return self._alone[p].updates([grad.detach()])[0].to(grad.dtype)

    def scaled_orthogonalize_fn(
        self,
        grad: Tensor,
        tp_group: dist.ProcessGroup | None = None,
        partition_dim: int | None = None,
    ) -> Tensor:
        """Return the scaled update of one matrix whose rows are all here; collective."""
        part = grad.detach()
        if partition_dim is not None:
            return self.scaled_orthogonalize_fn_with_gtp_remat(part, part, tp_group, partition_dim)
        scales = self.orthogonalization.scales((grad.shape[0], grad.shape[1]))
        return self.orthogonalization(part, scale=scales)

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
        shard = self._slabs.shard_cut(
            "matrix", part, lambda _, shape: whole(shape), partition_dim, tp_group
        )
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
            for update_rule in self._rules():
                for _, param, number in update_rule.numbered(self.param_groups):
                    if (key := key_of[param]) in state:
                        state[key] = update_rule.saved_form(number, state[key])
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; collective if momentum is stored in 8 bits."""
        super().load_state_dict(state_dict)
        if self.state and self.momentum_dtype != "fp32":
            for update_rule in self._rules():
                update_rule.pack(self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies contain: no plan and, as in all torch optimizers, no hooks."""
        # torch keeps hooks in attributes with this prefix
        own = {k: v for k, v in vars(self).items() if not k.startswith("_optimizer_")}
        # a scheduler wraps `step` in an attribute of the instance (torch/optim/lr_scheduler.py)
        plan = ("_planned", "_update_rules", "_alone", "_slabs", "step")
        return {k: v for k, v in own.items() if k not in plan}

    @functools.cached_property
    def _slabs(self) -> Slabs:
        """Knows the groups over which tensor parallelism and weight rematerialization cut."""
        return Slabs(self.pg_collection, self.tp_mode)

    @classmethod
    def steps_in_pieces(cls) -> bool:
        """Whether a storage may step shards of parameters, because ``step`` is this class's."""
        return _unhooked(cls.step) is _unhooked(TensorParallelMuon.step)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Create the state of all parameters, which loading needs."""
        for update_rule in self._rules():
            update_rule.init(self.param_groups, self.state)


def _unhooked(method: Any) -> Any:
    """Return a method without the wrapper that torch puts around ``step``."""
    return method.__wrapped__ if getattr(method, "hooked", False) else method
