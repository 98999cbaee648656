"""What optimizers, checkpoints and chains ask of a storage."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Stored(NamedTuple):
    """What this rank stores of one of the model's parameters.

    Attributes:
        param: The model's parameter.
        main: What is stepped: the parameter itself, its float32 copy, or this rank's part of it.
        start: First element of the flattened local parameter that ``main`` holds.
        stop: One past the last.
    """

    param: Tensor
    main: Tensor
    start: int
    stop: int


class Storage(Protocol):
    """One of megatron-core's wrappers around a torch optimizer, as far as it keeps weights.

    Attributes:
        optimizer: The torch optimizer, with groups and state of what is stepped.
        steps: Steps done, the same on every rank.
        is_stub_optimizer: Whether it has no parameter on any rank.
        grad_scaler: The loss scale of the chain; None without.
    """

    optimizer: Any
    steps: int
    is_stub_optimizer: bool
    grad_scaler: Any

    def stored(self) -> Iterator[Stored]:
        """Yield what this rank stores, in an order that does not change."""
        ...

    def tensors_of(self, item: Stored) -> dict[str, Any]:
        """Return main weights, where they are not the model's, and state, by kind."""
        ...

    def put_tensors(self, item: Stored, tensors: Mapping[str, Any]) -> None:
        """Take over what was written to what :meth:`tensors_of` returned."""
        ...

    def collect_gradients(self) -> None:
        """Hand this step's gradients to what is stepped."""
        ...

    def gather_params(self, *, now: bool = False) -> None:
        """Bring the stepped weights to all ranks, unless hooks will and it need not be now."""
        ...

    def replica_of(self, replica: Any) -> tuple[int, ...]:
        """Return which copy of stored state this rank has, from that of the model's parameter."""
        ...

    def replica_of_matrix(self, replica: Any) -> tuple[int, ...]:
        """Return the same of state that is not cut like the parameter."""
        ...


def named_gradients(storage: Storage) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's parameters with the gradients that their main copies step with."""
    for item in storage.stored():
        # Transformer Engine's Adam has gradients of another dtype than its parameters
        grad = getattr(item.main, "decoupled_grad", None)
        grad = item.main.grad if grad is None else grad
        if grad is not None:
            yield item.param, grad
