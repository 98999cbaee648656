"""Muon for parameters that tensor parallelism may have cut."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.base.errors import ConfigurationError, check_choice, check_number
from megatron_eopt.base.names import SPLIT_ATTRIBUTE, TpModeT
from megatron_eopt.math.algorithm import AlgorithmT
from megatron_eopt.math.finite import check_finite
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import DEFAULT_EPS
from megatron_eopt.matrices import Split, qkv, whole
from megatron_eopt.optimizers.elementwise import (
    WEIGHT_DECAY_METHODS,
    WeightDecayT,
    apply_updates_,
    decay,
    directions,
)
from megatron_eopt.optimizers.engines import (
    ParameterEngines,
    TensorParallelCut,
    tensor_parallel_cut,
)
from megatron_eopt.optimizers.orthogonalization import Orthogonalization

__all__ = ["TensorParallelMuon"]

logger = logging.getLogger(__name__)


class TensorParallelMuon(OrthogonalizedOptimizer):
    """Muon: momentum whose singular values are brought close to one, matrix by matrix.

    The method is Keller Jordan's (https://kellerjordan.github.io/posts/muon/). A parameter of shape
    (out, in) may be one rank's slab of a larger matrix; its attribute ``partition_dim`` then says
    which dimension the tensor-parallel group cuts (-1 or absent: none). Weight decay, momentum and
    the update itself are fused over all parameters of a group, and matrices of equal shape share
    one batched orthogonalization.

    Args:
        params: Parameters of shape (out, in) or (experts, out, in), groups of them, or pairs
            (name, parameter); names appear in messages.
        lr: Learning rate.
        momentum: Decay of the moving average of gradients, in [0, 1).
        nesterov: Orthogonalize gradient and momentum mixed instead of the momentum alone.
        weight_decay: Weight decay, at least 0.
        use_decoupled_weight_decay: Decay the weights themselves (as AdamW does) instead of adding
            their multiple to the gradient.
        split_qkv: Orthogonalize the Q, K and V parts of fused weights each by itself.
        is_qkv_fn: Tells which parameters are such fused weights; by default those with a true
            attribute ``is_qkv``.
        qkv_split_shapes: Rows of Q, K and V in one query group; a parameter's own attribute
            ``qkv_split_shapes`` goes before.
        fp32_matmul_prec: "highest" (float32), "high" (TF32) or "medium" (bfloat16 products).
        coefficient_type: Name of the iteration's coefficient set, or triples of your own.
        num_ns_steps: Steps of the Newton-Schulz iteration, at least 1.
        scale_mode: How the update is scaled to the shape of the whole matrix.
        extra_scale_factor: A further factor on the update.
        pg_collection: Process groups; ``tp`` and, for experts, ``expt_tp`` are used.
        tp_mode: Where the work on a cut matrix happens; see
            :data:`megatron_eopt.base.names.TpModeT`.
        weight_decay_method: "decoupled", "l2" or "independent"; goes before
            ``use_decoupled_weight_decay``.
        algorithm: Which iteration: "auto", "standard" or "gram".
        backend: Whose kernels compute it.
        ns_eps: Smallest norm that a matrix is divided by, above 0.
        splits: Logical matrices of fused parameters, by unsharded shape; goes before ``split_qkv``.
        check_finite: Refuse inf and nan by parameter name before any state changes, on all ranks
            that share a matrix alike; it takes an all-reduce of one number. Reading the answer
            makes the host wait for a GPU, so the default is to check on CPUs only.
        batched: Whether equal shapes share a call.

    Raises:
        ConfigurationError: If a value is out of bounds, or a parameter is cut and there is no group
            of the ranks that hold its other parts.
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
        *,
        weight_decay_method: WeightDecayT | None = None,
        algorithm: AlgorithmT = "auto",
        backend: str = "torch",
        ns_eps: float = DEFAULT_EPS,
        splits: Mapping[Tensor, Split] | None = None,
        check_finite: bool | None = None,
        batched: bool = True,
    ) -> None:
        if weight_decay_method is None:
            weight_decay_method = "decoupled" if use_decoupled_weight_decay else "l2"
        check_choice("weight_decay_method", weight_decay_method, WEIGHT_DECAY_METHODS)
        check_choice("tp_mode", tp_mode, get_args(TpModeT))
        self._weight_decay: WeightDecayT = weight_decay_method
        self.orthogonalization = Orthogonalization(
            coefficients=coefficient_type,  # type: ignore[arg-type]
            steps=num_ns_steps,
            scale_mode=scale_mode,  # type: ignore[arg-type]
            extra_scale_factor=extra_scale_factor,
            precision=fp32_matmul_prec,  # type: ignore[arg-type]
            algorithm=algorithm,
            backend=backend,
            eps=ns_eps,
        )
        self.pg_collection = pg_collection
        self.tp_mode: TpModeT = tp_mode
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn or (lambda param: bool(getattr(param, "is_qkv", False)))
        self.qkv_split_shapes = qkv_split_shapes
        self.check_finite = check_finite
        self._splits = dict(splits or {})
        self._names: dict[Tensor, str] = {}
        self.engines = ParameterEngines(
            self._update_stack,
            cut_of=self._cut_of,
            split_of=self.split_of,
            name_of=self._name_of,
            mode=tp_mode,
            batched=batched,
            dtype=self._stack_dtype,
        )
        # Not super(): further bases of a subclass have other arguments.
        OrthogonalizedOptimizer.__init__(
            self,
            params,
            lr,
            momentum,
            weight_decay,
            nesterov=nesterov,
            weight_decay_method=weight_decay_method,
            fp32_matmul_prec=fp32_matmul_prec,  # type: ignore[arg-type]
            scaled_orthogonalize_fn=self._scaled_orthogonalization,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get their state at once.

        Raises:
            ConfigurationError: If a setting of the group or a parameter cannot be honoured.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_number("lr", group["lr"], at_least=0)
        check_number("momentum", group["momentum"], at_least=0, below=1)
        check_number("weight_decay", group["weight_decay"], at_least=0)
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            self._names[param] = name or f"parameter {len(self._names)}"
            self._check_parameter(param)
        self._init_group(group, skip_non_grad_params=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step; collective over the groups that cut parameters.

        Args:
            closure: Computes the loss again, with gradients enabled.

        Returns:
            The closure's loss.

        Raises:
            NonFiniteError: If a gradient holds inf or nan on any rank of these groups, with nothing
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [
            [p for p in group["params"] if p.grad is not None] for group in self.param_groups
        ]
        self._refuse_non_finite(stepped)
        to_orthogonalize: list[Tensor] = []
        for group, params in zip(self.param_groups, stepped, strict=True):
            to_orthogonalize += self._directions(group, params)
        updates = self._updates([p for params in stepped for p in params], to_orthogonalize)
        self._apply(stepped, updates)
        return loss

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the scaled update of one parameter; collective over the group that cuts it.

        Args:
            p: The parameter; its attributes say how it is cut and fused.
            grad: What to orthogonalize, of the same shape.
            **kwargs: Settings of its parameter group; none is needed.
        """
        with torch.no_grad():
            return self.engines.updates([p], [grad])[0].to(grad.dtype)

    def split_of(self, param: Tensor, shape: tuple[int, ...]) -> Split:
        """Return the logical matrices of a parameter.

        Args:
            param: The parameter.
            shape: Its unsharded shape.

        Raises:
            ConfigurationError: If it is fused and how it is put together is not known.
        """
        if param in self._splits:
            return self._splits[param]
        if hasattr(param, SPLIT_ATTRIBUTE):
            return getattr(param, SPLIT_ATTRIBUTE) or whole(shape)
        declared = getattr(param, "eopt_split", None)
        if isinstance(declared, Split):
            return declared
        if not (self.split_qkv and self.is_qkv_fn(param)):
            return whole(shape)
        rows = getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes
        if not rows:
            raise ConfigurationError(
                "qkv_split_shapes",
                rows,
                f"must say how the fused weight {self._name_of(param)!r} is put together",
                "Give the rows of Q, K and V in one query group",
            )
        return qkv(shape, rows)

    def _check_parameter(self, param: Tensor) -> None:
        shape = tuple(param.shape)
        if len(shape) not in (2, 3) or 0 in shape:
            raise ConfigurationError(
                self._name_of(param),
                shape,
                "Muon needs shapes (out, in) or (experts, out, in) without a size of 0",
                "Give other parameters to an element-wise optimizer",
            )
        self._cut_of(param)

    def _cut_of(self, param: Tensor) -> TensorParallelCut:
        return tensor_parallel_cut(param, self.pg_collection, self.tp_mode)

    def _name_of(self, param: Tensor) -> str:
        return self._names.get(param, "parameter")

    def _refuse_non_finite(self, stepped: Iterable[list[Tensor]]) -> None:
        params = [param for params in stepped for param in params]
        wanted = self.check_finite
        if wanted is None:
            wanted = all(param.device.type == "cpu" for param in params)
        if not wanted:
            return
        groups = dict.fromkeys(self._cut_of(param)[1] for param in params)
        check_finite(
            ((self._name_of(param), param.grad) for param in params),  # type: ignore[misc]
            # the others would wait for a rank that has raised
            groups=[group for group in groups if group is not None],
        )

    def _directions(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Decay weights, update momenta, and return what to orthogonalize."""
        grads: list[Tensor] = [param.grad for param in params]  # type: ignore[misc]
        momenta = [self.state[param]["momentum_buffer"] for param in params]
        grads = decay(params, grads, group["lr"], group["weight_decay"], self._weight_decay)
        return directions(grads, momenta, group["momentum"], self.nesterov)

    def _updates(self, params: list[Tensor], to_orthogonalize: list[Tensor]) -> list[Tensor]:
        if type(self).orthogonalize is TensorParallelMuon.orthogonalize:
            return self.engines.updates(params, to_orthogonalize)
        # A subclass has its own way with each parameter.
        return [
            self.orthogonalize(param, direction)
            for param, direction in zip(params, to_orthogonalize, strict=True)
        ]

    def _apply(self, stepped: list[list[Tensor]], updates: list[Tensor]) -> None:
        remaining = iter(updates)
        for group, params in zip(self.param_groups, stepped, strict=True):
            mine = [next(remaining).to(param.dtype) for param in params]
            if self._has_own("pre_weight_update_fn_inplace"):
                for param, update in zip(params, mine, strict=True):
                    self.pre_weight_update_fn_inplace(param, update)
            apply_updates_(params, mine, group["lr"])
            if self._has_own("post_weight_update_fn_inplace"):
                for param in params:
                    self.post_weight_update_fn_inplace(param)

    def _has_own(self, method: str) -> bool:
        """Whether a subclass defines its own version of one of emerging-optimizers' hooks."""
        return getattr(type(self), method) is not getattr(OrthogonalizedOptimizer, method)

    @property
    def _stack_dtype(self) -> torch.dtype:
        """Dtype in which matrices travel and are stacked for :meth:`_update_stack`."""
        return self.orthogonalization.stack_dtype

    def _update_stack(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Replace directions by updates in place; the engines' arithmetic."""
        self.orthogonalization.update(stack, matrices, reduce, shape)

    def _scaled_orthogonalization(
        self, matrix: Tensor, tp_group: Any = None, partition_dim: int | None = None
    ) -> Tensor:
        """Compute the update of one plain matrix, for callers of ``scaled_orthogonalize_fn``."""
        if tp_group is not None and partition_dim is not None:
            rule = "scaled_orthogonalize_fn takes whole matrices"
            raise ConfigurationError("tp_group", tp_group, rule, "Call orthogonalize(p, grad)")
        stack = matrix.detach().clone().unsqueeze(0)
        self._update_stack(stack, (0,), None, tuple(matrix.shape))  # type: ignore[arg-type]
        return stack[0]
