"""The settings of Muon, from which its update rules are made.

They are checked here, for a configuration as well as for :class:`TensorParallelMuon`, which is a
torch optimizer with these settings.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.base.bounds import check_bounds
from megatron_eopt.base.errors import (
    ConfigurationError,
    check_cautious,
    check_choice,
    naming,
)
from megatron_eopt.base.names import CAUTIOUS_DECAY, DEFAULT_MATRIX_BUFFER_MB, TpModeT
from megatron_eopt.math.algorithm import AlgorithmT
from megatron_eopt.math.coefficients import CoefficientsLike
from megatron_eopt.math.low_precision import MOMENTUM_DTYPES, MomentumDtypeT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import DEFAULT_EPS, Orthogonalization
from megatron_eopt.matrices import Split, qkv, whole
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.muon_rule import WEIGHT_DECAY_METHODS, MuonRule, WeightDecayT
from megatron_eopt.storage.shard import ParamShard

_ARGUMENTS = {
    "coefficients": "coefficient_type",
    "steps": "num_ns_steps",
    "precision": "fp32_matmul_prec",
    "eps": "ns_eps",
}
"""Arguments of Muon, by their names in ``Orthogonalization``."""


class MuonSettings:
    """The settings of a :class:`MuonRule`, with the parameter groups that have some of them.

    Args:
        params: Parameters of shape (out, in), (experts, out, in) or a convolution's, groups of
            them, or pairs (name, parameter); names appear in messages.
        lr: Learning rate.
        momentum: Decay of the moving average of gradients, in [0, 1).
        nesterov: Orthogonalize a mix of gradient and momentum, not the momentum alone.
        weight_decay: Weight decay, at least 0.
        use_decoupled_weight_decay: Decay weights, as AdamW does; False adds it to gradients (L2).
        split_qkv: Orthogonalize the Q, K and V parts of fused weights separately.
        is_qkv_fn: Returns whether a parameter is a fused QKV weight; by default its attribute
            ``is_qkv``.
        qkv_split_shapes: Rows of Q, K and V in one query group, for parameters without an
            attribute ``qkv_split_shapes``.
        fp32_matmul_prec: "highest" (float32), "high" (TF32) or "medium" (16-bit products).
        coefficient_type: Name of the iteration's coefficient set, or your own ``(a, b, c)``, or a
            list of such triples, which steps use in turn.
        num_ns_steps: Steps of the Newton-Schulz iteration, at least 1.
        scale_mode: How the update is scaled to the shape of the whole matrix.
        extra_scale_factor: A further factor on the update, above 0.
        pg_collection: Process groups; ``tp`` and, for experts, ``expt_tp`` are used.
        tp_mode: How sharded matrices are computed: "duplicated" (on every rank), "distributed"
            (in shards), "exchange" (on one owner each), "auto" (the cheapest of these), or
            "blockwise" (each shard as a matrix, which changes the update).
        use_syrk: Has no effect: symmetric products are computed as such anyway, where a GPU can.
        weight_decay_method: "decoupled", "l2" or "independent"; overrides
            ``use_decoupled_weight_decay``.
        cautious_weight_decay: Decay weights only where their update does not have the opposite
            sign (arXiv:2510.12402); not with "l2".
        algorithm: Which iteration: "auto", "standard" or "gram".
        backend: Whose kernels compute it, such as "torch" or "auto".
        ns_eps: Smallest norm that a matrix is divided by, at least 1e-36.
        splits: Logical matrices of each parameter, for its unsharded shape; None for a single
            one. Overrides ``split_qkv``.
        batched: Compute matrices of equal shape in one call.
        matrix_buffer_mb: Most MiB of whole matrices that one rank gathers at a time; at least
            0.001.
        momentum_dtype: How momentum is stored between steps: "fp32" (the parameters' dtype),
            "bf16", "fp8" or "int8". State dicts have the last three in float32.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds.
    """

    update_rule_class: type[MuonRule] = MuonRule
    """What updates shards of parameters; a subclass may have its own."""

    called = "TensorParallelMuon"  # the torch optimizer with these settings, for messages
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: Any

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
        use_syrk: bool = False,
        *,
        weight_decay_method: WeightDecayT | None = None,
        cautious_weight_decay: bool = False,
        algorithm: AlgorithmT = "auto",
        backend: str = "torch",
        ns_eps: float = DEFAULT_EPS,
        splits: Mapping[Tensor, Split | None] | None = None,
        batched: bool = True,
        matrix_buffer_mb: float = DEFAULT_MATRIX_BUFFER_MB,
        momentum_dtype: MomentumDtypeT = "fp32",
    ) -> None:
        check_bounds(lr=lr, momentum=momentum, weight_decay=weight_decay)
        check_bounds(extra_scale_factor=extra_scale_factor, matrix_buffer_mb=matrix_buffer_mb)
        check_choice("tp_mode", tp_mode, get_args(TpModeT))
        check_choice("momentum_dtype", momentum_dtype, MOMENTUM_DTYPES)
        method = weight_decay_method or ("decoupled" if use_decoupled_weight_decay else "l2")
        check_choice("weight_decay_method", method, WEIGHT_DECAY_METHODS)
        if cautious_weight_decay:
            check_cautious(CAUTIOUS_DECAY, decoupled=method != "l2")
        self.cautious_weight_decay = cautious_weight_decay
        with naming(_ARGUMENTS):
            self.orthogonalization = Orthogonalization(
                coefficient_type,
                num_ns_steps,
                algorithm,
                fp32_matmul_prec,  # type: ignore[arg-type]
                ns_eps,
                backend,
                scale_mode,  # type: ignore[arg-type]
                extra_scale_factor,
            )
        self.tp_mode: TpModeT = tp_mode
        self.pg_collection = pg_collection
        self.split_qkv, self.qkv_split_shapes = split_qkv, qkv_split_shapes
        self.is_qkv_fn = is_qkv_fn or _is_qkv
        self.splits = dict(splits or {})
        self.momentum_dtype: MomentumDtypeT = momentum_dtype
        self.batched, self.matrix_buffer_mb = batched, matrix_buffer_mb
        self.nesterov, self.weight_decay_method = nesterov, method
        self.fp32_matmul_prec = fp32_matmul_prec
        # the update rule reads these from a parameter's group in each step
        self.defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self._take_groups(params)

    def _take_groups(self, params: Any) -> None:
        """Set :attr:`param_groups`, which have the :attr:`defaults`."""
        self.state = defaultdict(dict)
        self.param_groups = [{**self.defaults, **group} for group in params]

    @classmethod
    def steps_in_pieces(cls) -> bool:
        """Whether it updates shards of parameters."""
        return True

    def split_of(self, param: Tensor, shape: tuple[int, ...], name: str = "") -> Split:
        """Return the logical matrices of a parameter.

        Args:
            param: The parameter.
            shape: Its unsharded shape.
            name: Its name, for messages.

        Raises:
            ConfigurationError: If it is fused, but its layout is unknown.
        """
        # decided by the factory, from module types and declarations
        if param in self.splits:
            return self.splits[param] or whole(shape)
        return declared_split(self, param, shape, name)

    @property
    def _exchange_config(self) -> ExchangeConfig:
        whole_only = self.orthogonalization.whole_only
        return ExchangeConfig(
            self.tp_mode, self.matrix_buffer_mb, self.batched, whole_only, self._stack_dtype
        )

    def update_rule_over(
        self, shards: Sequence[ParamShard], exchange_config: ExchangeConfig
    ) -> MuonRule:
        """Return an update rule for other shards with this optimizer's settings.

        Args:
            shards: The shards.
            exchange_config: Gives the mode, device, team size, windows and whether waves grow; all
                else is as here.
        """
        exchange_config = replace(
            self._exchange_config,
            mode=exchange_config.mode,
            device=exchange_config.device,
            max_ranks_per_matrix=exchange_config.max_ranks_per_matrix,
            grows=exchange_config.grows,
            windows=exchange_config.windows,
        )
        return self.update_rule_class(self, shards, exchange_config)

    def _orthogonalize_stack(
        self,
        stack: Tensor,
        matrices: Sequence[int],
        reduce: ReduceT | None,
        shape: tuple[int, int],
        *,
        transposed: bool = False,
    ) -> None:
        scales = self.orthogonalization.scales((shape[1], shape[0]) if transposed else shape)
        self.orthogonalization.factors_(stack, reduce, shape, scales)

    @property
    def _stack_dtype(self) -> torch.dtype:
        return self.orthogonalization.stack_dtype


def declared_split(optimizer: Any, param: Tensor, shape: tuple[int, ...], name: str = "") -> Split:
    """Return the logical matrices that a parameter and its optimizer declare.

    An optimizer declares them as megatron-core's Muon does: by ``split_qkv``, ``is_qkv_fn`` and
    ``qkv_split_shapes``.

    Raises:
        ConfigurationError: If the parameter is fused, but its layout is unknown.
    """
    declared = getattr(param, "eopt_split", None)
    if isinstance(declared, Split):
        return declared
    is_split = getattr(optimizer, "split_qkv", False) and optimizer.is_qkv_fn(param)
    if declared == "whole" or not is_split:
        return whole(shape)
    rows = getattr(param, "qkv_split_shapes", None) or optimizer.qkv_split_shapes
    if not rows:
        rule = f"must give the layout of the fused weight {name!r} of shape {shape}"
        hint = "Pass the rows of Q, K and V in one query group"
        raise ConfigurationError("qkv_split_shapes", rows, rule, hint)
    return qkv(shape, rows)


def _is_qkv(param: Tensor) -> bool:
    return bool(getattr(param, "is_qkv", False))
