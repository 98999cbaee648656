"""Muon with second moments: AdaMuon, NorMuon and NAMO."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.base.errors import ConfigurationError, check_choice, check_number
from megatron_eopt.base.names import TpModeT
from megatron_eopt.math.moments import (
    MOMENT2_METHODS,
    Moment2MethodT,
    correction,
    statistic_shape,
)
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.adaptive import (
    Coefficients,
    NorMuonRule,
    Rule,
    Served,
    empty_statistics,
    make_rule,
    matrix_shapes,
)
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.muon import TensorParallelMuon

__all__ = ["TensorParallelAdaptiveMuon"]


class TensorParallelAdaptiveMuon(TensorParallelMuon, AdaptiveMuon):
    """Muon whose orthogonal factors are divided by a running second moment before they are scaled.

    The statistics are those of whole logical matrices, whatever is fused or cut by tensor
    parallelism; see Note [Where statistics live]. They are kept in the parameter's dtype.

    State of a parameter: ``momentum_buffer`` in its shape, and ``moment2_buffer``: AdaMuon's in its
    shape, NorMuon's ``(rows, 1)`` or ``(1, cols)`` of the whole matrix, NAMO's ``(1,)``. The
    statistics of several logical matrices lie one after another, flat, in the order of their split.

    Args:
        params: See :class:`TensorParallelMuon`, as for all arguments not listed here.
        lr: Learning rate.
        momentum: Decay of the moving average of gradients, in [0, 1).
        nesterov: Orthogonalize gradient and momentum mixed instead of the momentum alone.
        weight_decay: Weight decay, at least 0.
        use_decoupled_weight_decay: Decay the weights themselves instead of the gradient.
        split_qkv: Orthogonalize the Q, K and V parts of fused weights each by itself.
        is_qkv_fn: Tells which parameters are such fused weights.
        qkv_split_shapes: Rows of Q, K and V in one query group.
        fp32_matmul_prec: "highest", "high" or "medium".
        coefficient_type: Name of the iteration's coefficient set, or triples of your own.
        num_ns_steps: Steps of the Newton-Schulz iteration.
        scale_mode: How the update is scaled to the shape of the whole matrix.
        extra_scale_factor: A further factor on the update.
        pg_collection: Process groups; ``tp`` and, for experts, ``expt_tp`` are used.
        tp_mode: Where the work on a cut matrix happens.
        moment2_method: "adamuon" (arXiv:2507.11005), "normuon" (arXiv:2510.05491) or "namo"
            (arXiv:2602.17080).
        beta2: Decay of the second moments, in [0, 1); a parameter group may have its own.
        eps: Added to the divisor (AdaMuon, NAMO) or its smallest square (NorMuon), above 0; a
            parameter group may have its own.
        bias_correction: Divide statistics by ``1 - beta2^step``, so that the first steps are not
            ``1 / sqrt(1 - beta2)`` times as long (AdaMuon, NAMO); each parameter then has a state
            ``step``.
        **options: Keyword arguments of :class:`TensorParallelMuon` that come after ``tp_mode``.

    Raises:
        ConfigurationError: If a value is out of bounds, or for NAMO with l2 weight decay, which
            would enter the gradient norms it divides by.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: list[int] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: Any = None,
        tp_mode: TpModeT = "duplicated",
        moment2_method: Moment2MethodT = "adamuon",
        beta2: float = 0.95,
        eps: float = 1e-8,
        *,
        bias_correction: bool = False,
        **options: Any,
    ) -> None:
        check_choice("moment2_method", moment2_method, MOMENT2_METHODS)
        decoupled = "decoupled" if use_decoupled_weight_decay else "l2"
        if moment2_method == "namo" and (options.get("weight_decay_method") or decoupled) == "l2":
            raise ConfigurationError(
                "moment2_method",
                moment2_method,
                "does not work with l2 weight decay, which would enter the gradient norms",
                "Use decoupled weight decay",
            )
        self.moment2_method: Moment2MethodT = moment2_method
        self.bias_correction = bias_correction
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self._group_defaults = {"beta2": beta2, "eps": eps}
        self._rules: dict[MatrixEngine, Rule] = {}
        self._stepped_by: dict[Tensor, Rule] = {}
        self._running: Rule | None = None
        super().__init__(
            params,
            lr,
            momentum,
            nesterov,
            weight_decay,
            use_decoupled_weight_decay,
            split_qkv,
            is_qkv_fn,
            qkv_split_shapes,
            fp32_matmul_prec,
            coefficient_type,
            num_ns_steps,
            scale_mode,
            extra_scale_factor,
            pg_collection,
            tp_mode,
            **options,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get their state at once.

        Raises:
            ConfigurationError: If a setting of the group or a parameter cannot be honoured.
        """
        for name, value in self._group_defaults.items():
            param_group.setdefault(name, value)
        check_number("beta2", param_group["beta2"], at_least=0, below=1)
        check_number("eps", param_group["eps"], above=0)
        super().add_param_group(param_group)

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the orthogonal factors of one parameter's matrices; collective over its group.

        As in emerging-optimizers' class they are neither scaled nor divided by second moments,
        which a step does afterwards, also with what a subclass returns here.

        Args:
            p: The parameter; its attributes say how it is cut and fused.
            grad: What to orthogonalize, of the same shape.
            **kwargs: Settings of its parameter group; none is needed.
        """
        return super().orthogonalize(p, grad, **kwargs)

    @torch.no_grad()
    def complete_statistics(self) -> None:
        """Make every rank's statistics complete; collective over the groups that cut parameters.

        Between steps a rank is up to date only with what it computes itself (NorMuon in the modes
        that share work).
        """
        self._complete(self._stepped_by)

    def statistics_of(self, param: Tensor) -> list[Tensor]:
        """Return views of a parameter's second moments, one for each of its logical matrices.

        They have the shapes of whole matrices' statistics, blockwise those of this rank's pieces;
        AdaMuon's is one view in the parameter's shape.
        """
        moment = self.state[param]["moment2_buffer"]
        if self.moment2_method == "adamuon":
            return [moment]
        sizes = [statistic_shape(self.moment2_method, *shape) for shape in self._shapes_of(param)]
        parts = torch.split(moment.view(-1), [math.prod(shape) for shape in sizes])
        return [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            state = self.state[param]
            if len(state) or (skip_non_grad_params and param.grad is None):
                continue
            state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
            state["moment2_buffer"] = self._empty_statistics(param)
            if self.bias_correction:
                # on the host, so that reading it makes nobody wait
                state["step"] = torch.zeros((), dtype=torch.float32)

    def _empty_statistics(self, param: Tensor) -> Tensor:
        return empty_statistics(self.moment2_method, param, self._shapes_of(param))

    def _shapes_of(self, param: Tensor) -> list[tuple[int, int]]:
        stored = self.engines.stored(self._name_of(param), param)
        group = self._cut_of(param)[1]
        rank = 0 if group is None else torch.distributed.get_rank(group)
        return matrix_shapes(stored, rank, self.tp_mode == "blockwise" and group is not None)

    @property
    def _stack_dtype(self) -> torch.dtype:
        # statistics want the factors in float32
        return torch.float32

    def _update_stack(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        if self._running is None:
            stack.copy_(self.orthogonalization.orthogonal(stack, reduce, shape))
        else:
            self._running.update(stack, matrices, reduce, shape)

    def _updates(self, params: list[Tensor], to_orthogonalize: list[Tensor]) -> list[Tensor]:
        own = type(self).orthogonalize is TensorParallelAdaptiveMuon.orthogonalize
        inputs = to_orthogonalize
        if not own:
            inputs = [self.orthogonalize(p, d) for p, d in zip(params, inputs, strict=True)]
        coefficients = self._count_step(params)
        results: list[Tensor] = [torch.empty(0)] * len(params)
        for places, engine in self.engines.of(params):
            members = [params[i] for i in places]
            rule = self._rule(engine, members)
            self._take_over(rule, members)
            rule.orthogonal_already = not own
            rule.begin(
                [self.state[param]["moment2_buffer"] for param in members],
                [param.grad for param in members],  # type: ignore[misc]
                [to_orthogonalize[i] for i in places],
                [coefficients[i] for i in places],
            )
            self._running = rule
            try:
                updates = engine.updates([inputs[i] for i in places])
            finally:
                self._running = None
            rule.finish(updates)
            for i, update in zip(places, updates, strict=True):
                results[i] = update
        return results

    def _count_step(self, params: list[Tensor]) -> list[Coefficients]:
        """Count a step of each parameter, and return its settings."""
        if self.bias_correction and params:
            torch._foreach_add_([self.state[param]["step"] for param in params], 1)
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        coefficients = []
        for param in params:
            beta2, eps = group_of[param]["beta2"], group_of[param]["eps"]
            step = float(self.state[param]["step"]) if self.bias_correction else 1
            divisor = correction(beta2, step, self.bias_correction)
            coefficients.append(Coefficients(beta2, eps, divisor))
        return coefficients

    def _rule(self, engine: MatrixEngine, members: list[Tensor]) -> Rule:
        if engine not in self._rules:
            group = self._cut_of(members[0])[1]
            served = Served(
                engine,
                tuple(members),
                tuple(self.engines.stored(self._name_of(param), param) for param in members),
                group,
                members[0].device,
                blockwise=self.tp_mode == "blockwise" and group is not None,
            )
            self._rules[engine] = make_rule(self.moment2_method, served, self.orthogonalization)
        return self._rules[engine]

    def _take_over(self, rule: Rule, members: list[Tensor]) -> None:
        """Complete statistics that another set of parameters left at other ranks."""
        others = {
            param: self._stepped_by[param]
            for param in members
            if self._stepped_by.get(param, rule) is not rule
        }
        self._complete(others)
        self._stepped_by.update(dict.fromkeys(members, rule))

    def _complete(self, stepped_by: dict[Tensor, Rule]) -> None:
        for rule in dict.fromkeys(stepped_by.values()):
            if isinstance(rule, NorMuonRule):
                rule.complete(
                    {
                        number: self.state[param]["moment2_buffer"]
                        for number, param in enumerate(rule.served.params)
                        if stepped_by.get(param) is rule
                    }
                )
