"""Refusing non-finite input by name before it spreads through a matrix product."""

from collections.abc import Iterable

import torch
from torch import Tensor


class NonFiniteError(FloatingPointError):
    """A tensor holds inf or nan.

    Attributes:
        names: The tensors concerned.
    """

    def __init__(self, what: str, names: list[str]) -> None:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"non-finite {what} of {shown}: one inf or nan would spread over the whole matrix when "
            "it is orthogonalized. Lower the learning rate, clip gradients, or find the layer that "
            "overflows; with loss scaling such a step is skipped before it comes here."
        )
        self.names = names


def suspicion(tensors: list[Tensor]) -> Tensor:
    """Return a 0-d bool tensor, True if any tensor may hold inf or nan; no host synchronization.

    The Euclidean norm of finite entries is finite unless their squares leave the dtype's range, so
    this can cry wolf but never miss one; it is the norm with a fast kernel.

    Args:
        tensors: At least one tensor, all on one device.
    """
    norms = torch._foreach_norm(tensors)
    return ~torch.stack([norm.to(torch.float32) for norm in norms]).isfinite().all()


def check_finite(named: Iterable[tuple[str, Tensor]], what: str = "gradients") -> None:
    """Raise if a tensor holds inf or nan, naming every such tensor.

    One host synchronization for all tensors together; the search for the culprits runs only on
    failure.

    Args:
        named: Pairs of parameter name and tensor, any shapes and float dtypes.
        what: What the tensors are, for the message.

    Raises:
        NonFiniteError: If any entry is inf or nan.
    """
    pairs = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not pairs or not bool(suspicion([tensor for _, tensor in pairs])):
        return
    culprits = [name for name, tensor in pairs if not bool(tensor.isfinite().all())]
    if culprits:
        raise NonFiniteError(what, culprits)
