"""Operations on all gradients at once: unscale, compute the norm, clip.

Note [No waits]
    The gradient norm and the clipping factor stay on the device. Update rules that fold the factor
    into their own kernels read it there, and write nothing if it is NaN. So a step with non-finite
    gradients changes nothing, although the host does not know it yet: it reads the norm when the
    next step begins, from a copy that has arrived by then.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_data_parallel_group_if_dtensor, to_local_if_dtensor
from torch import Tensor, distributed

from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.base.gpu import HostCopy
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.math import passes
from megatron_eopt.megatron_core.stored_weights import StoredWeights, named_gradients
from megatron_eopt.megatron_core.upstream import require_upstream
from megatron_eopt.optimizers.update_rule import UpdateRule
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.storage.shard import global_name

NORM_GROUP: str = require_upstream("GRAD_NORM_GROUP_ATTR")
"""Attribute of parameters whose gradients have a norm of their own."""

_MARGIN = 1e-6
"""Added to the norm in the denominator of the clipping factor, as in megatron-core."""


def exceeds(norm: float, max_norm: float) -> bool:
    """Return whether gradients of this norm are clipped; ``max_norm`` 0 turns clipping off."""
    return not norm + _MARGIN <= (max_norm or math.inf)


def make_scaler(settings: RunSettings) -> Any:
    """Return megatron-core's gradient scaler, constant or dynamic; None without a loss scale."""
    if settings.config.loss_scale:
        return require_upstream("ConstantGradScaler")(settings.config.loss_scale)
    if settings.half != "fp16":
        return None
    return require_upstream("DynamicGradScaler")(
        initial_scale=settings.config.initial_loss_scale,
        min_scale=settings.config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=settings.config.loss_scale_window,
        hysteresis=settings.config.hysteresis,
    )


def unscale_(grads: list[Tensor], inv_scale: Tensor, group: Any) -> bool:
    """Multiply float32 gradients by ``inv_scale``, of shape (1,), in place; collective.

    Returns:
        Whether the gradients of any rank of ``group`` had infs or nans.
    """
    has_overflowed = torch.zeros_like(inv_scale)
    # a rank without gradients still takes part in the all-reduce
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, has_overflowed, inv_scale)
    distributed.all_reduce(has_overflowed, op=distributed.ReduceOp.MAX, group=group)
    return bool(has_overflowed.item() > 0)


class GradNorm:
    """The norm over all ranks of the gradients that Megatron counts.

    The constructor is collective and does not block the host; :meth:`read` does.
    """

    def __init__(
        self, optimizers: Sequence[Any], name: str | None = None, flag: Tensor | None = None
    ) -> None:
        """Compute the norm of all gradients, or of the parameters in the norm group ``name``.

        ``flag`` is a tensor of shape (); :attr:`flag` becomes its sum over the ranks.
        """
        self.flag = torch.zeros((), device="cuda") if flag is None else flag
        self._optimizers = optimizers
        # gradients, or their parameters once the norm is sent, and their norms
        self._of_each: list[tuple[list[Tensor | None], Tensor]] = []
        self.groups: list[distributed.ProcessGroup] = []  # over which it is summed
        groups = [optimizer.get_grad_stats_parallel_group() for optimizer in optimizers]
        grads = [optimizer.get_grads_for_grad_norm(name) for optimizer in optimizers]
        # one all-reduce instead of one for each optimizer, as in megatron-core
        if len(set(groups)) == 1:
            groups, grads = groups[:1], [[grad for some in grads for grad in some]]
        norms = [self._norm(some, group) for some, group in zip(grads, groups, strict=True)]
        # float64, shape (), on the device
        self.value = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        self._sent: HostCopy | None = None

    def _norm(self, grads: list[Tensor], group: distributed.ProcessGroup) -> Tensor:
        square = torch.zeros((), dtype=torch.float32, device="cuda")
        mesh = None
        for grad in grads:
            mesh = get_data_parallel_group_if_dtensor(grad, mesh)
        if grads:
            local = [to_local_if_dtensor(grad) for grad in grads]
            # norms of single gradients are kept, so that an error can name those that are not
            # finite
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(local)])
            self._of_each.append((list(local), norms))
            square = norms.norm().square()
        summed = torch.stack([square, self.flag])
        # the group of DTensors has only model-parallel ranks, so their mesh comes first, as in
        # megatron-core's ``get_grad_norm_fp32``
        for ranks in (mesh, group) if mesh else (group,):
            self.groups.append(ranks)
            distributed.all_reduce(summed, group=ranks)
        self.flag = summed[1]
        # summed in float32, then float64, as megatron-core's ``total_norm.item() ** 0.5``
        norm: Tensor = summed[0].double().sqrt()
        return norm

    def send(self) -> None:
        """Start to copy the norm to the host for :meth:`read`, and release the gradients."""
        self._of_each = self._of_params()
        self._sent = HostCopy(self.value)

    def read(self) -> float:
        """Return the norm; blocks the host."""
        return float(self.value if self._sent is None else self._sent.read())

    def with_flag(self) -> tuple[float, float]:
        """Return the norm and :attr:`flag`; blocks the host, once."""
        norm, flag = HostCopy(torch.stack([self.value, self.flag.to(self.value.dtype)])).read()
        return norm, flag

    def _of_params(self) -> list[tuple[list[Tensor | None], Tensor]]:
        """Return the parameters of gradients, and the norms of these."""
        if self._sent is not None:
            return self._of_each
        params = {
            local_of(grad).data_ptr(): param
            for optimizer in self._optimizers
            for param, grad in named_gradients(optimizer)
        }
        return [
            ([params.get(grad.data_ptr()) for grad in grads if grad is not None], norms)
            for grads, norms in self._of_each
        ]

    def non_finite(self) -> list[Tensor]:
        """Return this rank's parameters whose gradients have norms that are not finite."""
        return [
            param
            for params, norms in self._of_params()
            for param, norm in zip(params, norms.tolist(), strict=True)
            if param is not None and not math.isfinite(norm)
        ]

    def factor(self, max_norm: float) -> Tensor:
        """Return ``min(1, max_norm / (norm + 1e-6))``, float32 of shape () on the device.

        It is 1 if ``max_norm`` is 0, and NaN if the norm is not finite.
        """
        limit = torch.full_like(self.value, max_norm or math.inf)
        scale = torch.div(limit, self.value + _MARGIN).clamp_(max=1.0)
        # inf - inf and nan - nan are nan
        return (scale + (self.value - self.value)).float()


def non_finite(names: Mapping[Tensor, str], norms: Sequence[GradNorm]) -> set[str]:
    """Return the global names of parameters with non-finite gradients; collective, on all ranks."""
    of_all_ranks = {
        global_name(param, names.get(param, "a parameter"))
        for norm in norms
        for param in norm.non_finite()
    }
    # each group passes the names on to the next, so that they get to all ranks
    for group in dict.fromkeys(group for norm in norms for group in norm.groups):
        of_all_ranks = of_all_ranks.union(*gather_objects(of_all_ranks, group))
    return of_all_ranks


def fuses_grad_scale(storage: StoredWeights) -> bool:
    """Return whether all update rules of a storage fold clipping into their own pass."""
    # a rule without shards steps nothing
    return all(rule.fuses_grad_scale for rule in storage.update_rules if rule.shards)


@contextmanager
def clipped(
    update_rules: Sequence[UpdateRule],
    max_norm: float,
    norms: Mapping[str | None, GradNorm],
    *,
    fuses: bool,
) -> Iterator[None]:
    """In a block, clip gradients to a norm of ``max_norm``.

    Args:
        update_rules: What the chain steps.
        max_norm: Largest norm; 0 turns clipping off.
        norms: The norm of each special group by its name, and of all other gradients by None.
        fuses: Whether update rules that support it clip while they read gradients.
    """
    factors = {name: norm.factor(max_norm) for name, norm in norms.items()}
    # a factor of 1 is skipped, unless only the device knows it
    by_norm: dict[str | None, list[Tensor]] = {
        name: []
        for name, factor in factors.items()
        if max_norm > 0 and (passes.KERNELS.runs(factor) or float(factor) != 1.0)
    }
    for update_rule in update_rules:
        folded = None
        if fuses and update_rule.fuses_grad_scale:
            # `factor(0)` is 1, or NaN if the norm is not finite, so that the rule writes nothing
            folded = factors[None] if update_rule.is_clipped else norms[None].factor(0.0)
        update_rule.scale_gradients(folded)
        if update_rule.is_clipped and folded is None:
            for shard in update_rule.shards:
                grads = by_norm.get(getattr(shard.main, NORM_GROUP, None))
                if grads is not None and shard.main is not None and shard.main.grad is not None:
                    grads.append(local_of(shard.main.grad).detach())
    for name, grads in by_norm.items():
        if grads:
            # torch._foreach_mul_ would make the host wait for the tensor of shape ()
            torch.ops.aten._foreach_mul_.Tensor(grads, factors[name])
    try:
        yield
    finally:
        for update_rule in update_rules:
            update_rule.scale_gradients(None)
