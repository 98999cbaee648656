"""What is done to all gradients at once: a loss scale is taken out, and they are clipped."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from megatron_eopt.base.upstream import needed
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.settings.settings import LossScale
from megatron_eopt.storage.dtensors import local_of

_MARGIN = 1e-6
"""What megatron-core adds to a norm before it divides by it."""


def make_scaler(wanted: LossScale | None) -> Any:
    """Return megatron-core's gradient scaler, constant or dynamic; None without."""
    if wanted is None:
        return None
    if wanted.constant is not None:
        return needed("ConstantGradScaler")(wanted.constant)
    return needed("DynamicGradScaler")(**wanted.dynamic)


def unscale_(grads: list[Tensor], inv_scale: Tensor, group: Any) -> bool:
    """Multiply float32 gradients by ``inv_scale``, of shape (1,), in place; collective.

    Returns:
        Whether any rank of ``group`` had infinities or nans among them.
    """
    found = torch.zeros_like(inv_scale)
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
    return bool(found.item() > 0)


def clip(steppers: Sequence[Stepper], most: float, norms: Mapping[Any, float]) -> None:
    """Scale gradients whose norm exceeds ``most`` down to it.

    Args:
        steppers: What steps the parameters.
        most: Largest norm.
        norms: Of the gradients that have a norm of their own, by its name, and of all others.
    """
    name_of = needed("GRAD_NORM_GROUP_ATTR")
    by_norm: dict[str | None, list[Tensor]] = {}
    for param in (param for stepper in steppers for param in _clipped(stepper)):
        if param.grad is not None:
            name = getattr(param, name_of, None)
            by_norm.setdefault(name, []).append(local_of(param.grad).detach())
    for name, grads in by_norm.items():
        factor = most / (norms[name] + _MARGIN)
        if factor < 1.0:
            torch._foreach_mul_(grads, factor)


def _clipped(stepper: Stepper) -> Iterator[Tensor]:
    if not stepper.drivers:
        yield from (item.main for item in stepper.storage.stored())
    yield from (main for driver, _, main in stepper.stepped() if driver.is_clipped)
