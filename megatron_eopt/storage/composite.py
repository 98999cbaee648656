"""One torch optimizer made of several: what Megatron's distributed optimizer wraps.

The composite holds the parameter groups and the state, as every consumer of an optimizer expects.
Its parts do the work: each steps some of the groups, with the numbers (lr, weight decay) that the
scheduler wrote there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_eopt.storage.checkpoint.owned import OwnedMatrix

__all__ = ["CompositeOptimizer", "InitState", "ParamGroup", "Part", "SavedPart", "State", "bind"]

type ParamGroup = dict[str, Any]
type State = defaultdict[Tensor, dict[str, Any]]
type InitState = Callable[..., None] | None


class Part(Protocol):
    """Steps some groups of a composite.

    Attributes:
        needs_matrices: Whether it brings whole matrices together.
        name: Class of the optimizer.
    """

    needs_matrices: bool
    name: str

    def attach(self, main_of: dict[Tensor, Tensor]) -> None:
        """Learn which fragment this rank holds of which model parameter, once all are known.

        Args:
            main_of: Model parameter to this rank's fragment of its float32 main copy.
        """
        ...

    def refresh(self, groups: Sequence[ParamGroup]) -> None:
        """Take over values that were written to the fragments from outside."""
        ...

    def init_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make the state of every parameter exist, as far as it can be without a step."""
        ...

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Continue after ``steps`` steps that another run did."""
        ...

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups`` from their ``grad``."""
        ...


class SavedPart(Part, Protocol):
    """A part whose state checkpoints can hold."""

    def expect_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make all state exist that is about to be loaded."""
        ...

    def owned_matrices(self) -> Iterable[OwnedMatrix]:
        """Return the whole matrices that this rank owns, with their state."""
        ...


class CompositeOptimizer(torch.optim.Optimizer):
    """Steps each parameter group with the part that it belongs to.

    Args:
        groups: Parameter groups of each part, in the order of ``parts``.
        parts: The parts.
    """

    def __init__(self, groups: Sequence[Sequence[ParamGroup]], parts: Sequence[SavedPart]) -> None:
        # torch refuses an optimizer without groups; a pipeline stage without experts has none
        super().__init__([{"params": []}], {})
        self.param_groups = [group for part in groups for group in part]
        self.parts = list(parts)
        ends = [sum(map(len, groups[: number + 1])) for number in range(len(parts))]
        self._slices = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def groups_of(self, part: SavedPart) -> list[ParamGroup]:
        """Return the parameter groups that ``part`` steps."""
        return self.param_groups[self._slices[self.parts.index(part)]]

    def attach(self, main_of: dict[Tensor, Tensor]) -> None:
        """Tell all parts which fragments this rank holds; see :meth:`Part.attach`."""
        for part in self.parts:
            part.attach(main_of)

    def refresh(self) -> None:
        """Take over values that were written to the fragments from outside."""
        for part in self.parts:
            part.refresh(self.groups_of(part))

    def init_state(self) -> None:
        """Make the state of every parameter exist, so that it can be saved and loaded."""
        for part in self.parts:
            part.init_state(self.groups_of(part), self.state)
            # listed with the fragments' state, for those who move all of it to another device
            self.state.update({item.matrix: item.state for item in part.owned_matrices()})

    def state_dict(self) -> dict[str, Any]:
        """Return groups and fragments' state; that of whole matrices belongs to no group."""
        members = {id(param) for group in self.param_groups for param in group["params"]}
        owned = [key for key in self.state if id(key) not in members]
        hidden = {key: self.state.pop(key) for key in owned}
        try:
            return super().state_dict()
        finally:
            self.state.update(hidden)

    def expect_state(self) -> None:
        """Make all state exist that is about to be loaded."""
        for part in self.parts:
            part.init_state(self.groups_of(part), self.state)
            part.expect_state(self.groups_of(part), self.state)

    def set_steps(self, steps: int) -> None:
        """Continue after ``steps`` steps that another run did."""
        for part in self.parts:
            part.set_steps(self.groups_of(part), self.state, steps)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters.

        Args:
            closure: Unsupported; must be None.
        """
        if closure is not None:
            raise ValueError("closure is not supported")
        for part in self.parts:
            part.step(self.groups_of(part), self.state)


def bind(
    optimizer: torch.optim.Optimizer, groups: Iterable[ParamGroup], state: State
) -> torch.optim.Optimizer:
    """Let ``optimizer`` work on other groups and another state from now on, and return it.

    One optimizer may serve several buffer sets, each with groups and state of its own.
    """
    optimizer.param_groups = list(groups)
    optimizer.state = state
    return optimizer
