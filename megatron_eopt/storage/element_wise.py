"""The part of a composite whose optimizer updates each number by itself: it steps on fragments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.storage.checkpoint.dry_step import dry_step
from megatron_eopt.storage.checkpoint.owned import OwnedMatrix
from megatron_eopt.storage.composite import InitState, ParamGroup, State, bind

__all__ = ["ElementWisePart", "complete_state", "set_steps"]

_COUNT_IN_GROUPS = ("transformer_engine", "apex")


class ElementWisePart:
    """Steps Adam, SGD, Lion and their like on fragments of the parameters.

    Args:
        optimizer: The user's optimizer; steps the fragments.
        init_state_fn: Makes its state exist, called as ``(optimizer, config)``; may be None.
        config: An ``OptimizerConfig``.
    """

    needs_matrices = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, init_state_fn: InitState, config: Any
    ) -> None:
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        self._init_state_fn = init_state_fn
        self._config = config

    def attach(self, main_of: dict[Tensor, Tensor]) -> None:
        """Nothing to learn: any fragment will do."""

    def refresh(self, groups: Sequence[ParamGroup]) -> None:
        """Nothing to take over: the fragments are what is stepped."""

    def init_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make the state of every fragment exist, with step counters of their own."""
        optimizer = bind(self._optimizer, groups, state)
        complete_state(optimizer, self._init_state_fn, self._config)

    def expect_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make all state exist that is about to be loaded."""
        dry_step(bind(self._optimizer, groups, state))

    def owned_matrices(self) -> tuple[OwnedMatrix, ...]:
        """Return nothing: all state is in fragments."""
        return ()

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Set the counters where the optimizer keeps them."""
        set_steps(bind(self._optimizer, groups, state), steps)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Let the optimizer step."""
        bind(self._optimizer, groups, state).step()


def complete_state(optimizer: Any, init_state_fn: InitState, config: Any) -> None:
    """Make the state of every parameter exist, with step counters of their own.

    Args:
        optimizer: A torch optimizer that updates each number by itself.
        init_state_fn: Makes most of its state exist, called as ``(optimizer, config)``; may be
            None.
        config: An ``OptimizerConfig``.
    """
    if init_state_fn is not None:
        init_state_fn(optimizer, config)
    for group in optimizer.param_groups:
        for param in group["params"]:
            _complete(optimizer, group, optimizer.state[param], param)


def set_steps(optimizer: Any, steps: int) -> None:
    """Set the counters of steps where an optimizer keeps them: in states, or in groups."""
    for group in optimizer.param_groups:
        group.pop("step", None)
        if type(optimizer).__module__.startswith(_COUNT_IN_GROUPS):
            group["step"] = steps
        for param in group["params"]:
            if "step" in optimizer.state[param]:
                # a tensor for each: torch counts in place
                optimizer.state[param]["step"] = torch.tensor(float(steps))


def _complete(
    optimizer: torch.optim.Optimizer, group: ParamGroup, state: dict[str, Any], param: Tensor
) -> None:
    """Add what torch's own optimizers expect in a state that is not empty."""
    names: tuple[str, ...] = ()
    if isinstance(optimizer, torch.optim.Adam):
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        # a tensor for each: torch counts in place
        state.setdefault("step", torch.tensor(0.0))
    elif isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        names = (MOMENTUM,)
    for name in names:
        state.setdefault(name, torch.zeros_like(param))
