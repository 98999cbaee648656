"""What the norm of gradients is computed of, and who is named if it is not finite."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.base.errors import NonFiniteError
from megatron_eopt.stores.interface import named_gradients

_HUGE = 1e16
"""Of norms up to this one it takes a million until float32 has no room for their squares' sum."""


def refusal(
    named: list[tuple[str, Tensor]], groups: Iterable[distributed.ProcessGroup | None]
) -> NonFiniteError:
    """Return the error for gradients whose norm is not finite, with names of all ranks."""
    groups = list(groups)
    odd = [name for name, grad in named if not bool(grad.isfinite().all())]
    if names := _names_of_all(odd, groups):
        return NonFiniteError("gradients", names)
    huge = [name for name, grad in named if float(grad.double().norm()) > _HUGE]
    return NonFiniteError(
        "norm of all gradients, each of them finite, because", _names_of_all(huge, groups)
    )


def _names_of_all(
    names: Iterable[str], groups: Iterable[distributed.ProcessGroup | None]
) -> list[str]:
    """Return the names that any rank of the groups has, sorted; collective over each of them.

    The groups have one order on all their ranks; a name travels on from one to the next.
    """
    known = set(names)
    for group in groups:
        known = known.union(*of_every_rank(known, group))
    return sorted(known)


def mark_left_out(counted: list[Tensor], left_out: list[Tensor]) -> list[Tensor]:
    """Return tensors with the norm of ``counted``, or with norm nan if that of the others is not.

    The host waits for nothing, and the norm keeps every bit: the smallest tensor is replaced by its
    sum with zero, or with nan.
    """
    left_out = [grad for grad in left_out if grad.numel()]
    if not left_out:
        return counted
    norms = [norm.to(torch.float32) for norm in torch._foreach_norm(left_out)]
    zero_or_nan = torch.stack(norms).sum() * 0
    filled = [number for number, grad in enumerate(counted) if grad.numel()]
    if not filled:
        return [*counted, zero_or_nan.view(1)]
    smallest = min(filled, key=lambda number: counted[number].numel())
    marked = list(counted)
    marked[smallest] = counted[smallest] + zero_or_nan.to(counted[smallest].dtype)
    return marked


def watched(child: Any) -> list[Tensor]:
    """Return what the norm of an optimizer's gradients counts, finite only if all of them are."""
    counted: list[Tensor] = child.get_grads_for_grad_norm()
    known = {id(grad) for grad in counted}
    return mark_left_out(
        counted, [grad for _, grad in named_gradients(child) if id(grad) not in known]
    )
