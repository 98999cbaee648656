"""What is done to all gradients at once: a loss scale is taken out, and they are clipped.

Note [No waits]
    The norm, and the factor that gradients are multiplied by, stay on the device. Drivers that fold
    the factor into their own pass read it there, and a factor of NaN lets them write nothing. So a
    step with non-finite gradients changes nothing although the host does not know yet: it reads the
    norm when the next step begins, from a copy that has long arrived.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_data_parallel_group_if_dtensor, to_local_if_dtensor
from torch import Tensor, distributed

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.base.gpu import HostCopy
from megatron_eopt.base.upstream import needed
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.settings.settings import LossScale
from megatron_eopt.storage.dtensors import local_of
from megatron_eopt.storage.interface import named_gradients
from megatron_eopt.storage.shard import global_name

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


class GradNorm:
    """The norm over all ranks of the gradients that Megatron counts.

    Making one is collective, and the host waits for nothing; :meth:`read` does.
    """

    def __init__(
        self, optimizers: Sequence[Any], name: str | None = None, flag: Tensor | None = None
    ) -> None:
        """Compute it of all gradients, or of those whose parameters have a norm called ``name``.

        A ``flag`` is this rank's number, of shape (), and then the sum of all ranks'.
        """
        self.flag = torch.zeros((), device="cuda") if flag is None else flag
        self._of_each: list[tuple[list[Any], Tensor]] = []  # gradients, or addresses, and norms
        self.groups: list[distributed.ProcessGroup] = []  # over whose ranks it is summed
        groups = [optimizer.get_grad_stats_parallel_group() for optimizer in optimizers]
        grads = [optimizer.get_grads_for_grad_norm(name) for optimizer in optimizers]
        if len(set(groups)) == 1:
            groups, grads = groups[:1], [[grad for some in grads for grad in some]]
        norms = [self._norm(some, group) for some, group in zip(grads, groups, strict=True)]
        # float64, of shape (), on the device
        self.value = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        self._sent: HostCopy | None = None

    def _norm(self, grads: list[Tensor], group: distributed.ProcessGroup) -> Tensor:
        square = torch.zeros((), dtype=torch.float32, device="cuda")
        mesh = None
        for grad in grads:
            mesh = get_data_parallel_group_if_dtensor(grad, mesh)
        if grads:
            local = [to_local_if_dtensor(grad) for grad in grads]
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(local)])
            self._of_each.append((local, norms))
            square = norms.norm().square()
        summed = torch.stack([square, self.flag])
        for ranks in (mesh, group) if mesh else (group,):
            self.groups.append(ranks)
            distributed.all_reduce(summed, group=ranks)
        self.flag = summed[1]
        norm: Tensor = summed[0].double().sqrt()
        return norm

    def send(self) -> None:
        """Begin to copy the norm to the host, where :meth:`read` finds it; let gradients go."""
        self._sent = HostCopy(self.value)
        if self.value.is_cuda:
            self._of_each = [([g.data_ptr() for g in grads], n) for grads, n in self._of_each]

    def read(self) -> float:
        """Return the norm; the host waits for it."""
        return float(self.value) if self._sent is None else self._sent.read()

    def non_finite(self) -> set[int]:
        """Return the addresses of this rank's gradients whose own norms are not finite."""
        return {
            grad.data_ptr() if isinstance(grad, Tensor) else grad
            for grads, norms in self._of_each
            for grad, norm in zip(grads, norms.tolist(), strict=True)
            if not math.isfinite(norm)
        }

    def factor(self, most: float) -> Tensor:
        """Return what scales the norm down to ``most``, at most 1; NaN if the norm is not finite.

        Returns:
            float32, of shape (), on the device. It is 1 where ``most`` is 0.
        """
        limit = torch.full_like(self.value, most or math.inf)
        scale = torch.div(limit, self.value + _MARGIN).clamp_(max=1.0)
        # what is not finite less itself is nan
        return (scale + (self.value - self.value)).float()


def non_finite(
    optimizers: Sequence[Any], names: Mapping[Tensor, str], norms: Sequence[GradNorm]
) -> set[str]:
    """Return the parameters, by their names in the whole model, whose gradients are not finite.

    It is collective, and the same on all ranks.
    """
    faulty = set[int]().union(*(norm.non_finite() for norm in norms))
    found = {
        global_name(param, names.get(param, "a parameter"))
        for optimizer in optimizers
        for param, grad in named_gradients(optimizer)
        if local_of(grad).data_ptr() in faulty
    }
    # a name travels on from one group to the next
    for group in dict.fromkeys(group for norm in norms for group in norm.groups):
        found = found.union(*of_every_rank(found, group))
    return found


def folds_clipping(stepper: Stepper) -> bool:
    """Return whether all that a stepper does to gradients multiplies them by a coefficient."""
    drivers = stepper.drivers
    is_done = bool(drivers) and all(driver.folds_clipping for driver in drivers)
    return stepper.storage.is_stub_optimizer or is_done


@contextmanager
def clipped(
    steppers: Sequence[Stepper], most: float, norms: Mapping[str | None, GradNorm], *, fold: bool
) -> Iterator[None]:
    """Scale gradients whose norm exceeds ``most`` down to it, for the steps in a block.

    Args:
        steppers: What steps the parameters.
        most: Largest norm; 0 scales nothing.
        norms: Of the gradients that have a norm of their own, by its name, and of all others.
        fold: Whether drivers that can do it scale gradients while they read them.
    """
    factors = {name: norm.factor(most) for name, norm in norms.items()}
    for driver in (driver for stepper in steppers for driver in stepper.drivers):
        driver.coefficient = None
        if fold and driver.folds_clipping:
            factor = factors[None] if driver.is_clipped else norms[None].factor(0)
            driver.coefficient = factor if _counts(factor) else None
    name_of = needed("GRAD_NORM_GROUP_ATTR")
    by_norm: dict[str | None, list[Tensor]] = {}
    for param in (param for stepper in steppers for param in _scaled(stepper)) if most > 0 else ():
        if param.grad is not None:
            name = getattr(param, name_of, None)
            by_norm.setdefault(name, []).append(local_of(param.grad).detach())
    for name, grads in by_norm.items():
        if _counts(factors[name]):
            # a tensor of shape () given to torch's function would be read by the host
            torch.ops.aten._foreach_mul_.Tensor(grads, factors[name])
    try:
        yield
    finally:
        for driver in (driver for stepper in steppers for driver in stepper.drivers):
            driver.coefficient = None


def _counts(factor: Tensor) -> bool:
    """Return whether to multiply by a factor; one that the host knows to be 1 need not be."""
    return gpu.runs_kernels(factor) or float(factor) != 1.0


def _scaled(stepper: Stepper) -> Iterator[Tensor]:
    if not stepper.drivers:
        yield from (item.main for item in stepper.storage.stored())
    for driver, _, main in stepper.stepped():
        if driver.is_clipped and driver.coefficient is None:
            yield main
