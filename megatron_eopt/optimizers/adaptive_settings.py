"""The settings of Muon with second moments: AdaMuon, NorMuon and NAMO."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.base.bounds import check_bounds
from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.base.names import TpModeT
from megatron_eopt.math.coefficients import CoefficientsLike
from megatron_eopt.math.moments import MOMENT2_METHODS, Moment2MethodT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.adaptive_rule import RULES, AdaptiveMuonRule
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.muon_settings import MuonSettings
from megatron_eopt.storage.shard import ParamShard


class AdaptiveMuonSettings(MuonSettings):
    """Settings of Muon whose updates are divided by running second moments, then scaled.

    Statistics are those of whole logical matrices, however weights are fused or sharded. They are
    kept in the parameter's dtype.

    The state of a parameter is ``momentum_buffer``, in the parameter's shape, and
    ``moment2_buffer``. The latter has the parameter's shape for AdaMuon, ``(rows, 1)`` or
    ``(1, cols)`` of the whole matrix for NorMuon, and ``(1,)`` for NAMO. NorMuon and NAMO store
    the statistics of several logical matrices in one 1-D tensor, in the order of the split.

    Args:
        moment2_method: "adamuon" (arXiv:2507.11005), "normuon" (arXiv:2510.05491) or "namo"
            (arXiv:2602.17080).
        beta2: Decay of the second moments, in [0, 1); a parameter group may have its own.
        eps: Added to the divisor (AdaMuon, NAMO), or the smallest mean square (NorMuon); above 0.
            A parameter group may have its own.
        bias_correction: Divide statistics by ``1 - beta2^step``. Without it, the first steps of
            AdaMuon and NAMO are ``1 / sqrt(1 - beta2)`` times as long. Adds a state ``step``.
        **options: Keyword-only arguments of :class:`MuonSettings`.

    All other arguments are those of :class:`MuonSettings`.

    Raises:
        ConfigurationError: If a value is out of bounds, NAMO is used with l2 weight decay, or a
            subclass with an update rule of its own is used with another method than that rule's.
    """

    update_rule_class: type[MuonRule] = AdaptiveMuonRule
    called = "TensorParallelAdaptiveMuon"

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
        coefficient_type: CoefficientsLike = "quintic",
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
        check_bounds(beta2=beta2, eps=eps)
        # with the names of emerging-optimizers' AdaptiveMuon, whose constructor is not called
        self.moment2_method: Moment2MethodT = moment2_method
        self.scale_mode, self.extra_scale_factor = scale_mode, extra_scale_factor
        self.bias_correction = bias_correction
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
        of_method = RULES[moment2_method]
        if self.update_rule_class is AdaptiveMuonRule:
            self.update_rule_class = of_method
        elif not issubclass(self.update_rule_class, of_method):
            own = self.update_rule_class.__name__
            rule = f"is not what {own} computes, which is not derived from {of_method.__name__}"
            hint = "Set the method for which the rule was written, or derive the rule from that one"
            raise ConfigurationError("moment2_method", moment2_method, rule, hint)
        if moment2_method == "namo" and self.weight_decay_method == "l2":
            rule = "does not work with l2 weight decay, which would change the gradient norms"
            hint = "Use decoupled weight decay"
            raise ConfigurationError("moment2_method", moment2_method, rule, hint)
        self.defaults |= {"beta2": beta2, "eps": eps}
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)
            # tells what a checkpoint has; no default, because all groups have the same
            group["moment2_method"] = moment2_method

    def update_rule_over(
        self, shards: Sequence[ParamShard], exchange_config: ExchangeConfig
    ) -> MuonRule:
        """Return an update rule for other shards with this optimizer's settings, in float32."""
        # no teams, because statistics belong to whole matrices
        exchange_config = replace(
            self._exchange_config, mode=exchange_config.mode, device=exchange_config.device
        )
        return self.update_rule_class(self, shards, exchange_config)

    @property
    def _stack_dtype(self) -> torch.dtype:
        # statistics are taken of the factors in the stack, which bfloat16 would round
        return torch.float32

    def _orthogonalize_stack(
        self,
        stack: Tensor,
        matrices: Sequence[int],
        reduce: ReduceT | None,
        shape: tuple[int, int],
        *,
        transposed: bool = False,
    ) -> None:
        self.orthogonalization.factors_(stack, reduce, shape)
