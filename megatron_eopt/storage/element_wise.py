"""The part of a composite whose optimizer updates each number by itself: it steps on fragments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.storage.composite import InitState, ParamGroup, State, bind

__all__ = ["ElementWisePart"]

_COUNT_IN_GROUPS = ("transformer_engine", "apex")


class ElementWisePart:
    """Steps Adam, SGD, Lion and their like on fragments of the parameters.

    Args:
        optimizer: The user's optimizer; steps the fragments.
        init_state_fn: Makes its state exist, called as ``(optimizer, config)``; may be None.
        config: An ``OptimizerConfig``.
    """

    needs_matrices = False
    owned_state: State | None = None

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
        if self._init_state_fn is not None:
            self._init_state_fn(optimizer, self._config)
        for group in groups:
            for param in group["params"]:
                _complete(optimizer, group, state[param], param)

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Set the counters where the optimizer keeps them: in states, or in groups."""
        for group in groups:
            group.pop("step", None)
            if type(self._optimizer).__module__.startswith(_COUNT_IN_GROUPS):
                group["step"] = steps
            for param in group["params"]:
                if "step" in state[param]:
                    # a tensor for each: torch counts in place
                    state[param]["step"] = torch.tensor(float(steps))

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Let the optimizer step."""
        bind(self._optimizer, groups, state).step()


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
        names = ("momentum_buffer",)
    for name in names:
        state.setdefault(name, torch.zeros_like(param))
