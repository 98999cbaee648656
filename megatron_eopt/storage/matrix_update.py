"""The part of a composite that runs Muon: momentum in fragments, matrices whole while they step.

Momentum and main weights stay where the buffer is cut; weight decay and momentum are element-wise
on fragments. Only the directions travel, to each matrix's owner and back as updates.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, TpModeT
from megatron_eopt.optimizers.elementwise import apply_updates_, decay, directions
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.stored import Stored
from megatron_eopt.storage.checkpoint.owned import OwnedMatrix
from megatron_eopt.storage.composite import ParamGroup, State

__all__ = ["MatrixUpdatePart"]


class MatrixUpdatePart:
    """Steps a ``TensorParallelMuon`` whose parameters a group of ranks stores in fragments.

    Args:
        optimizer: The user's Muon; its settings are used, its parameters and state are not.
        stored: How the group stores each of its parameters, the same list on every rank.
        params: The model's parameters in the order of ``stored``.
        group: The ranks of the group; None for one.
        device: Where the fragments live; the current CUDA device by default.
        mode: Where the work happens; at one owner each rank sends and receives its share twice,
            at any number of ranks.
    """

    needs_matrices = True

    def __init__(
        self,
        optimizer: Any,
        stored: Sequence[Stored],
        params: Sequence[Tensor],
        group: torch.distributed.ProcessGroup | None,
        device: torch.device | None = None,
        mode: TpModeT = "exchange",
    ) -> None:
        self.name = type(optimizer).__name__
        self._nesterov: bool = optimizer.nesterov
        self._weight_decay_method = optimizer.weight_decay_method
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        arithmetic = optimizer.orthogonalization
        self._engine = MatrixEngine(
            stored,
            arithmetic.update,
            group,
            mode=mode,
            dtype=arithmetic.stack_dtype,
            device=self._device,
        )
        self._params = list(params)
        self._numbers: dict[int, int] = {}
        self._fragments: dict[int, Tensor] = {}
        self._nothing: list[Tensor] = []

    @property
    def plan(self) -> Any:
        """What travels in a step, for its counts of bytes and calls."""
        return self._engine.plan

    def attach(self, main_of: dict[Tensor, Tensor]) -> None:
        """Number the fragments that this rank holds in the engine's order."""
        self._numbers = {
            id(main_of[param]): number
            for number, param in enumerate(self._params)
            if param in main_of
        }
        self._fragments = {n: main_of[self._params[n]] for n in self._numbers.values()}
        self._nothing = [torch.empty(0, device=self._device)] * len(self._params)

    def refresh(self, groups: Sequence[ParamGroup]) -> None:
        """Nothing to take over: the fragments are what is stepped."""

    def init_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make the momentum of every fragment exist."""
        for group in groups:
            for param in group["params"]:
                state[param].setdefault(MOMENTUM, torch.zeros_like(param))

    def expect_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Nothing more to make: momentum is all there is."""

    def owned_matrices(self) -> tuple[OwnedMatrix, ...]:
        """Return nothing: momentum is in fragments."""
        return ()

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Nothing to set: Muon does not count."""

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the fragments of ``groups``; all ranks of the group must call this together."""
        momenta = list(self._nothing)
        places = []
        for group in groups:
            params = group["params"]
            grads = decay(
                params,
                [param.grad for param in params],
                group["lr"],
                group["weight_decay"],
                self._weight_decay_method,
            )
            buffers = [state[param][MOMENTUM] for param in params]
            places.append([self._numbers[id(param)] for param in params])
            found = directions(grads, buffers, group["momentum"], self._nesterov)
            for number, direction in zip(places[-1], found, strict=True):
                momenta[number] = direction
        for number in self._fragments.keys() - {n for numbers in places for n in numbers}:
            # it rests, but its matrices are in the plan
            momenta[number] = torch.zeros_like(self._fragments[number])
        updates = self._engine.updates(momenta)
        for group, numbers in zip(groups, places, strict=True):
            apply_updates_(group["params"], [updates[n] for n in numbers], group["lr"])
