"""The error for gradients that are not finite, and the names of those."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.agreement import of_every_rank


class NonFiniteError(FloatingPointError):
    """A tensor holds inf or nan.

    Attributes:
        names: The tensors concerned.
    """

    def __init__(self, what: str, names: list[str]) -> None:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"non-finite {what} of {shown}: a step would let one inf or nan stay in the weights, "
            "and an orthogonalization spread it over the whole matrix. No weight and no state has "
            "changed. Lower the learning rate, clip gradients, or find the layer that overflows; "
            "with loss scaling such a step is skipped before it comes here."
        )
        self.names = names


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold inf or nan; one host synchronization for each."""
    return [name for name, tensor in named if not bool(tensor.isfinite().all())]


def names_of_all(names: Iterable[str], groups: Iterable[dist.ProcessGroup | None]) -> list[str]:
    """Return the names that any rank of the groups has, sorted; collective over each of them.

    The groups have one order on all their ranks; a name travels on from one to the next.
    """
    known = set(names)
    for group in groups:
        known = known.union(*of_every_rank(known, group))
    return sorted(known)
