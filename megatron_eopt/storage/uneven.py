"""DTensors that a framework cuts otherwise than torch would."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import Split


class UnevenKind:
    """How one framework cuts DTensors; :func:`register_uneven` adds it."""

    asks_sizes = False  # whether layouts follow only from how many elements each rank has
    hides_gradients = False  # whether ranks with empty shards do not see if there is a gradient
    own_loop_cls: Any = None  # class of the optimizer in a training loop of one's own

    def holds(self, param: DTensor) -> bool:
        """Return whether the framework has cut a parameter."""
        raise NotImplementedError

    def prepare(self, params: Iterable[Tensor]) -> None:
        """Do what must precede routing, with all parameters of a model."""

    def part_of(self, param: DTensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor, cut like ``param``."""
        raise NotImplementedError

    def layouts(
        self, name: str, param: DTensor, split: Split, mesh: Int64Array, sizes: Int64Array
    ) -> tuple[Layout, ...]:
        """Return the layouts of a parameter's logical matrices.

        Args:
            name: The parameter's, for messages.
            param: The parameter.
            split: Its logical matrices.
            mesh: Its device mesh, in ranks of a group.
            sizes: How many elements each rank of the group has; this rank's alone unless
                :attr:`asks_sizes`.
        """
        raise NotImplementedError


_kinds: list[UnevenKind] = []


def register_uneven(kind: UnevenKind) -> None:
    """Add a way to cut DTensors."""
    _kinds.append(kind)


def uneven_kind(param: Tensor) -> UnevenKind | None:
    """Return how a parameter is cut otherwise than torch would; None if it is not."""
    if not isinstance(param, DTensor):
        return None
    return next((kind for kind in _kinds if kind.holds(param)), None)


def is_uneven(param: Tensor) -> bool:
    """Return whether a parameter is cut otherwise than torch would."""
    return uneven_kind(param) is not None


def prepare(params: Iterable[Tensor]) -> None:
    """Let all frameworks do what must precede routing."""
    everything = list(params)
    for kind in _kinds:
        kind.prepare(everything)
