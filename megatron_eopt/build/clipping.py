"""Scales gradients down, in place and in one fused call for each norm."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.upstream import needed
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.dtensors import local_of

_MARGIN = 1e-6
"""What megatron-core adds to a norm before it divides by it."""


def clip(members: Sequence[Member], most: float, norms: Mapping[Any, float]) -> None:
    """Scale gradients whose norm exceeds ``most`` down to it.

    Args:
        members: What steps the parameters.
        most: Largest norm.
        norms: Of the gradients that have a norm of their own, by its name, and of all others.
    """
    name_of = needed("GRAD_NORM_GROUP_ATTR")
    by_norm: dict[str | None, list[Tensor]] = {}
    for member in members:
        for param in _clipped(member):
            # Transformer Engine's Adam has gradients of another dtype than its parameters
            grad = getattr(param, "decoupled_grad", None)
            grad = param.grad if grad is None else grad
            if grad is not None:
                name = getattr(param, name_of, None)
                by_norm.setdefault(name, []).append(local_of(grad).detach())
    for name, grads in by_norm.items():
        factor = most / (norms[name] + _MARGIN)
        if factor < 1.0:
            torch._foreach_mul_(grads, factor)


def _clipped(member: Member) -> Iterator[Tensor]:
    if not member.drivers:
        yield from (item.main for item in member.storage.stored())
    for driver in member.drivers:
        if driver.is_clipped:
            for group in member.groups_of(driver):
                yield from group["params"]
