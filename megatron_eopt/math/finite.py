"""Refusing non-finite input by name before it spreads through a matrix product."""

from collections.abc import Iterable, Sequence

import torch
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


def suspicion(tensors: list[Tensor]) -> Tensor:
    """Return a 0-d bool tensor, True if any tensor may hold inf or nan; no host synchronization.

    The Euclidean norm of finite entries is finite unless their squares leave the dtype's range, so
    this can cry wolf but never miss one; it is the norm with a fast kernel. At least one tensor.
    """
    norms = torch._foreach_norm(tensors)
    return ~torch.stack([norm.to(torch.float32) for norm in norms]).isfinite().all()


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


def check_finite(
    named: Iterable[tuple[str, Tensor]],
    what: str = "gradients",
    groups: Sequence[dist.ProcessGroup] = (),
) -> None:
    """Raise if a tensor holds inf or nan, naming every such tensor.

    One host synchronization for all tensors together, and one all-reduce of one number for each
    group; the search for the culprits runs only on failure. The ranks of ``groups``, in the same
    order on all of them, raise together: what a later group says reaches the earlier ones, too.

    Raises:
        NonFiniteError: If any entry is inf or nan on any rank of the groups, with the same names on
            each of them.
    """
    filled = [(name, tensor) for name, tensor in named if tensor.numel()]
    if filled:
        flag = suspicion([tensor for _, tensor in filled]).to(torch.int32)
    elif groups:
        on_gpu = "nccl" in dist.get_backend(groups[0])
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        flag = torch.zeros((), dtype=torch.int32, device=device)
    else:
        return
    there_and_back = [*groups, *reversed(groups[:-1])]
    for group in there_and_back:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    if not bool(flag):
        return
    culprits = not_finite(filled)
    if groups:
        culprits = names_of_all(culprits, there_and_back)
    if culprits:
        raise NonFiniteError(what, culprits)
