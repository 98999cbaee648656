"""Muon for parameters that tensor parallelism may have cut, as a torch optimizer."""

import functools
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import DEFAULT_WAVE_MB, TpModeT
from megatron_eopt.math.algorithm import AlgorithmT
from megatron_eopt.math.finite import check_finite as check_finite_gradients
from megatron_eopt.math.low_precision import MomentumDtypeT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import DEFAULT_EPS
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.driver import ParamGroup, loss_of
from megatron_eopt.optimizers.engine import MatrixEngine, Means
from megatron_eopt.optimizers.muon_arguments import (
    BATCHED,
    READ_ONCE,
    check_fused,
    check_kept,
    check_matrix,
    check_subclass,
    check_switches,
    declared_split,
    orthogonalization_of,
    weight_decay_method_of,
)
from megatron_eopt.optimizers.muon_arithmetic import WeightDecayT, shrink, subtract
from megatron_eopt.optimizers.muon_driver import MuonDriver, MuonSettings
from megatron_eopt.optimizers.planned import PlannedOptimizer
from megatron_eopt.stores.replicated import slab, tensor_parallel_cut
from megatron_eopt.stores.shard import Shard

HOOKS = ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")
"""What subclasses of emerging-optimizers' class may do to whole parameters around an update."""


class TensorParallelMuon(PlannedOptimizer):
    """Muon: momentum whose singular values are brought close to one, matrix by matrix.

    The method is Keller Jordan's (https://kellerjordan.github.io/posts/muon/). A parameter of shape
    (out, in) may be one rank's slab of a larger matrix; its attribute ``partition_dim`` then says
    which dimension the tensor-parallel group cuts (-1 or absent: none). Weight decay, momentum and
    the update itself are fused over all parameters of a group, and matrices of equal shape share
    one batched orthogonalization. It is planned when the optimizer is made, which is collective
    over the groups that cut parameters, as is a step.

    Args:
        params: Parameters of shape (out, in) or (experts, out, in), groups of them, or pairs
            (name, parameter); names appear in messages.
        lr: Learning rate.
        momentum: Decay of the moving average of gradients, in [0, 1).
        nesterov: Orthogonalize gradient and momentum mixed instead of the momentum alone.
        weight_decay: Weight decay, at least 0.
        use_decoupled_weight_decay: Decay weights, as AdamW does, and not by way of gradients.
        split_qkv: Orthogonalize the Q, K and V parts of fused weights each by itself.
        is_qkv_fn: Tells which parameters are; by default those with a true attribute ``is_qkv``.
        qkv_split_shapes: Rows of Q, K and V in one query group; a parameter's own attribute
            ``qkv_split_shapes`` goes before.
        fp32_matmul_prec: "highest" (float32), "high" (TF32) or "medium" (bfloat16 products).
        coefficient_type: Name of the iteration's coefficient set, or triples of your own.
        num_ns_steps: Steps of the Newton-Schulz iteration, at least 1.
        scale_mode: How the update is scaled to the shape of the whole matrix.
        extra_scale_factor: A further factor on the update, above 0.
        pg_collection: Process groups; ``tp`` and, for experts, ``expt_tp`` are used.
        tp_mode: Where a cut matrix is computed, see :data:`megatron_eopt.base.names.TpModeT`.
        use_syrk: Compute on emerging-optimizers' SYRK kernels where they can be used, else warn.
        weight_decay_method: "decoupled", "l2" or "independent"; goes before that switch.
        algorithm: Which iteration: "auto", "standard" or "gram".
        backend: Whose kernels compute it.
        ns_eps: Smallest norm that a matrix is divided by, at least 1e-38.
        splits: Logical matrices of parameters, by unsharded shape, None for a single one; goes
            before ``split_qkv``.
        check_finite: Refuse inf and nan by parameter name before any state changes, on all ranks
            that share a matrix alike; it takes an all-reduce of one number. Reading the answer
            makes the host wait for a GPU, so the default is to check on CPUs only.
        batched: Whether equal shapes share a call.
        wave_mb: MiB of whole matrices that one rank brings together at a time, at least
            0.001.
        momentum_dtype: How momentum is kept between steps: "fp32" (as the parameters are), "bf16",
            "fp8" or "int8", to which it is rounded. State dicts have it in float32.

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
        use_syrk: bool = False,
        *,
        weight_decay_method: WeightDecayT | None = None,
        algorithm: AlgorithmT = "auto",
        backend: str = "torch",
        ns_eps: float = DEFAULT_EPS,
        splits: Mapping[Tensor, Split | None] | None = None,
        check_finite: bool | None = None,
        batched: bool = True,
        wave_mb: float = DEFAULT_WAVE_MB,
        momentum_dtype: MomentumDtypeT = "fp32",
    ) -> None:
        check_subclass(type(self))
        check_switches(nesterov=nesterov, split_qkv=split_qkv, batched=batched, use_syrk=use_syrk)
        check_fused(is_qkv_fn, qkv_split_shapes, splits)
        check_kept(check_finite, wave_mb, momentum_dtype)
        method = weight_decay_method_of(use_decoupled_weight_decay, weight_decay_method)
        arithmetic = self.orthogonalization = orthogonalization_of(
            coefficients=coefficient_type,
            steps=num_ns_steps,
            scale_mode=scale_mode,
            extra_scale_factor=extra_scale_factor,
            precision=fp32_matmul_prec,
            algorithm=algorithm,
            backend=backend,
            eps=ns_eps,
            use_syrk=use_syrk,
            tp_mode=tp_mode,
        )
        self._muon = MuonSettings(nesterov, method, arithmetic, momentum_dtype)
        self.tp_mode: TpModeT = tp_mode
        self.pg_collection, self.check_finite = pg_collection, check_finite
        self.split_qkv, self.qkv_split_shapes = split_qkv, qkv_split_shapes
        self.is_qkv_fn = is_qkv_fn or (lambda param: bool(getattr(param, "is_qkv", False)))
        self._means = Means(tp_mode, wave_mb, batched, self.orthogonalization.whole_only)
        self._splits = dict(splits or {})
        self._names = []
        self._lone: dict[Tensor, MatrixEngine] = {}
        self.driver = None
        # Not super(): further bases of a subclass have other arguments.
        OrthogonalizedOptimizer.__init__(
            self,
            params,
            lr,
            momentum,
            weight_decay,
            nesterov=nesterov,
            weight_decay_method=method,
            fp32_matmul_prec=fp32_matmul_prec,  # type: ignore[arg-type]
            scaled_orthogonalize_fn=self._scaled_orthogonalization,
        )
        self.plan(self._names)

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
        loss = loss_of(closure)
        driver = self.prepared()
        self._refuse_non_finite()
        driver.step(self.param_groups, self.state)
        return loss

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the scaled update of one parameter; collective over the group that cuts it.

        Args:
            p: The parameter; its attributes say how it is cut and fused.
            grad: What to orthogonalize, of the same shape.
            **kwargs: Settings of its parameter group; none is needed.

        Raises:
            ConfigurationError: If ``grad`` is of another shape, or not of floating-point numbers.
        """
        if grad.shape != p.shape or not grad.is_floating_point():
            rule = f"must be floating-point numbers, one for each of {tuple(p.shape)}"
            way_out = "For other matrices call megatron_eopt.math.orthogonalize"
            raise ConfigurationError("grad", (tuple(grad.shape), grad.dtype), rule, way_out)
        if p not in self._lone:
            means = replace(self._means, dtype=self._stack_dtype, device=p.device)
            self._lone[p] = MatrixEngine([self._shard_of(p)], self._orthogonalize_stack, means)
        with torch.no_grad():
            return self._lone[p].updates([grad])[0].to(grad.dtype)

    def split_of(self, param: Tensor, shape: tuple[int, ...], name: str = "") -> Split:
        """Return the logical matrices of a parameter.

        Args:
            param: The parameter.
            shape: Its unsharded shape.
            name: Its name, for messages.

        Raises:
            ConfigurationError: If it is fused and how it is put together is not known.
        """
        if param in self._splits:
            return self._splits[param] or whole(shape)
        return declared_split(self, param, shape, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in READ_ONCE and vars(self).get("driver") and value != getattr(self, name):
            rule = "is read when the optimizer is made, and steps would not know of it"
            raise ConfigurationError(name, value, rule, "Make another one")
        super().__setattr__(name, value)

    @property
    def scaled_orthogonalize_fn(self) -> Callable[..., Tensor]:  # type: ignore[override]
        """What emerging-optimizers' class computes an update with; a step does not call it."""
        return self._scaled_orthogonalize_fn

    @scaled_orthogonalize_fn.setter
    def scaled_orthogonalize_fn(self, function: Callable[..., Tensor]) -> None:
        if self.driver is not None and type(self).orthogonalize is self._base().orthogonalize:
            raise ConfigurationError("scaled_orthogonalize_fn", function, *BATCHED)
        self._scaled_orthogonalize_fn = function

    @property
    def momentum_dtype(self) -> MomentumDtypeT:
        """How momentum is kept between steps."""
        return self._muon.momentum_dtype

    @classmethod
    def steps_in_pieces(cls) -> bool:
        """Whether nothing that a subclass defines needs the whole parameter."""
        own = ("step", "orthogonalize", "_init_group", "driver_over", *HOOKS)
        return all(_unhooked(cls, name) is _unhooked(cls._base(), name) for name in own)

    def driver_over(self, shards: Sequence[Shard], means: Means) -> MuonDriver:
        """Return what steps other shards with this optimizer's settings.

        Args:
            shards: The shards.
            means: How matrices are computed there, but for the dtype, which is the arithmetic's,
                and the size of waves.
        """
        dtype, own = self._stack_dtype, self._means
        means = replace(means, dtype=dtype, wave_mb=own.wave_mb, whole_only=own.whole_only)
        return MuonDriver(type(self).__name__, self._muon, shards, means)

    def driver_for(self, shards: list[Shard], device: str) -> MuonDriver:
        """Return what steps shards whose tensors are on a device, and what a subclass adds."""
        driver = self.driver_over(shards, replace(self._means, device=device))
        if type(self).orthogonalize is not self._base().orthogonalize:
            taken = inspect.signature(self.orthogonalize).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
            driver.own = functools.partial(self._own_way, None if takes_any else taken.keys())
        if any(getattr(type(self), f) is not getattr(OrthogonalizedOptimizer, f) for f in HOOKS):
            driver.apply = self._apply_with_hooks
        return driver

    def _own_way(
        self, taken: Container[str] | None, param: Tensor, direction: Tensor, group: ParamGroup
    ) -> Tensor:
        """Call a subclass's ``orthogonalize`` as emerging-optimizers' class does.

        It gets the settings of its group that it has ``taken``, all for None.
        """
        settings = {
            key: value
            for key, value in group.items()
            if key != "params" and (taken is None or key in taken)
        }
        with fp32_matmul_precision(self.fp32_matmul_prec):
            return self.orthogonalize(param, direction, **settings)

    @classmethod
    def _base(cls) -> type["TensorParallelMuon"]:
        """Return the class of ours whose ``orthogonalize`` needs no call for each parameter."""
        return TensorParallelMuon

    def _orthogonalize_stack(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        scales = self.orthogonalization.scales(shape)
        self.orthogonalization.factors_(stack, reduce, shape, scales)

    @property
    def _stack_dtype(self) -> torch.dtype:
        return self.orthogonalization.stack_dtype

    def shard(self, name: str, param: Tensor) -> Shard:
        """Return what this rank stores of a parameter, and how it is put together."""
        check_matrix(name, param)
        cut = tensor_parallel_cut(param, self.pg_collection, self.tp_mode)
        return slab(name, param, functools.partial(self.split_of, name=name), cut)

    def _shard_of(self, param: Tensor) -> Shard:
        """Return what this rank stores of a parameter: as planned, if it is one of its groups."""
        for _, known, number in self.numbered():
            if known is param:
                return self._shards[number]
        return self.shard("parameter", param)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Make the state of all parameters exist, as loading needs; the group does not matter."""
        self.prepared()

    def _refuse_non_finite(self) -> None:
        assert self.driver is not None
        found = [
            (self._names[number], param)
            for _, param, number in self.numbered()
            if param.grad is not None
        ]
        wanted = self.check_finite
        if wanted is None:
            wanted = all(param.device.type == "cpu" for _, param in found)
        if wanted:
            # the others would wait for a rank that has raised
            sharing = [engine.ranks.group for _, engine in self.driver.engines]
            check_finite_gradients(
                ((name, param.grad) for name, param in found),  # type: ignore[misc]
                groups=[group for group in sharing if group is not None],
            )

    def _apply_with_hooks(
        self, group: ParamGroup, params: Sequence[Tensor], updates: Sequence[Tensor], rate: float
    ) -> None:
        shrink(params, rate)
        updates = [update.to(param.dtype) for param, update in zip(params, updates, strict=True)]
        for param, update in zip(params, updates, strict=True):
            self.pre_weight_update_fn_inplace(param, update)
        subtract(group, params, updates)
        for param in params:
            self.post_weight_update_fn_inplace(param)

    def _scaled_orthogonalization(
        self, matrix: Tensor, tp_group: Any = None, partition_dim: int | None = None
    ) -> Tensor:
        """Compute the update of one plain matrix, for callers of ``scaled_orthogonalize_fn``."""
        if tp_group is not None and partition_dim is not None:
            rule = "scaled_orthogonalize_fn takes whole matrices"
            raise ConfigurationError("tp_group", tp_group, rule, "Call orthogonalize(p, grad)")
        shape = cast(tuple[int, int], tuple(matrix.shape))
        return self.orthogonalization(matrix.detach(), scale=self.orthogonalization.scales(shape))


def _unhooked(cls: type, name: str) -> Any:
    """Return a method of a class without what torch puts around the first instance's ``step``."""
    method = getattr(cls, name)
    return method.__wrapped__ if getattr(method, "hooked", False) else method
