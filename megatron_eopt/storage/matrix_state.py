"""The part of a composite for optimizers whose state needs whole matrices: SOAP, and any other.

Each logical matrix has an owner, which holds it whole and steps the optimizer on it. Gradients
travel in, parameters travel out, both in float32. Main weights in fragments are copies.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.stored import Stored, StoredParameter
from megatron_eopt.storage.checkpoint.dry_step import dry_step
from megatron_eopt.storage.checkpoint.owned import OwnedMatrix
from megatron_eopt.storage.composite import InitState, ParamGroup, State, bind

__all__ = ["MatrixStatePart"]

_ONE_WAVE = 1 << 62
"""Bytes of a wave: all gradients of an owner arrive before its optimizer steps, once."""

type _Arrived = list[tuple[Tensor, Sequence[int]]]


class MatrixStatePart:
    """Steps a torch optimizer on whole matrices, each at its owner.

    Args:
        optimizer: The user's optimizer; steps what this rank owns.
        stored: How the group stores each of its parameters, the same list on every rank.
        params: The model's parameters in the order of ``stored``.
        groups: Its parameter groups, of the model's parameters.
        group: The ranks that store pieces; None for one.
        init_state_fn: Makes the optimizer's state exist, called as ``(optimizer, config)``.
        config: An ``OptimizerConfig``.
        device: Where the fragments live; the current CUDA device by default.
    """

    needs_matrices = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stored: Sequence[Stored],
        params: Sequence[Tensor],
        groups: Sequence[ParamGroup],
        group: torch.distributed.ProcessGroup | None,
        init_state_fn: InitState,
        config: Any,
        device: torch.device | None = None,
    ) -> None:
        self.name = type(optimizer).__name__
        device = device or torch.device("cuda", torch.cuda.current_device())
        self._optimizer = optimizer
        self._init_state_fn = init_state_fn
        self._config = config
        self._params = list(params)
        self._stored = list(stored)
        self._group = group
        self._engine = MatrixEngine(
            stored, self._receive, group, mode="exchange", wave_bytes=_ONE_WAVE, device=device
        )
        self._nothing = torch.empty(0, device=device)
        self._numbers: dict[int, int] = {}
        self._arrived: _Arrived = []
        self._when_all_arrived: Callable[[], None] = self._step_owned
        self._groups: Sequence[ParamGroup] = groups
        self.owned: dict[int, torch.nn.Parameter] = {}
        self.owned_state: State = defaultdict(dict)
        self._own_groups: list[ParamGroup] = [{"params": []} for _ in groups]
        # of each owned matrix: its parameter's place, and its own among the parameter's
        self._source: dict[Tensor, tuple[int, int]] = {}
        self._make_owned(groups, device)

    @property
    def counters(self) -> frozenset[str]:
        """Names of what the optimizer counts in its groups instead of in states."""
        pairs = zip(self._own_groups, self._groups, strict=True)
        return frozenset(key for own, group in pairs for key in own.keys() - group.keys())

    @property
    def plan(self) -> Any:
        """What travels in a step, for its counts of bytes and calls."""
        return self._engine.plan

    def attach(self, main_of: dict[Tensor, Tensor]) -> None:
        """Number this rank's fragments in the engine's order."""
        self._numbers = {
            id(main_of[param]): number
            for number, param in enumerate(self._params)
            if param in main_of
        }

    def refresh(self, groups: Sequence[ParamGroup]) -> None:
        """Take the owned matrices from the fragments; collective over the group."""
        self._when_all_arrived = self._adopt_values
        try:
            self._engine.updates(self._in_order(groups, lambda param: param.detach()))
        finally:
            self._when_all_arrived = self._step_owned
            self._arrived.clear()

    def init_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make the state of every owned matrix exist, as far as the optimizer has a way to."""
        self._groups = groups
        if self._init_state_fn is not None and self.owned:
            self._init_state_fn(self._bound(), self._config)

    def expect_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make the state exist of every owned matrix that has none before its first step."""
        dry_step(self._bound())

    def owned_matrices(self) -> Iterator[OwnedMatrix]:
        """Yield the whole matrices that this rank owns, with their state."""
        rank = 0 if self._group is None else torch.distributed.get_rank(self._group)
        for own, group in zip(self._own_groups, self._groups, strict=True):
            counters = tuple(sorted(own.keys() - group.keys() - {"params"}))
            for matrix in own["params"]:
                place, index = self._source[matrix]
                stored = self._stored[place]
                assert isinstance(stored, StoredParameter)
                yield OwnedMatrix(
                    self._params[place],
                    stored,
                    stored.fragments[rank].tp_rank,
                    index,
                    matrix,
                    self.owned_state[matrix],
                    own,
                    counters,
                )

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Set counters in the optimizer's groups; those in states come with the states."""
        for own in self._own_groups:
            if "step" in own:
                own["step"] = steps

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the fragments of ``groups``; all ranks of the group must call this together."""
        self._groups = groups
        updated = self._engine.updates(self._in_order(groups, lambda param: param.grad))
        self._arrived.clear()
        for group in groups:
            if group["params"]:
                numbers = [self._numbers[id(param)] for param in group["params"]]
                torch._foreach_copy_(group["params"], [updated[n] for n in numbers])

    def _in_order(
        self, groups: Sequence[ParamGroup], value: Callable[[Tensor], Any]
    ) -> list[Tensor]:
        values = [self._nothing] * len(self._params)
        for group in groups:
            for param in group["params"]:
                values[self._numbers[id(param)]] = value(param)
        return values

    def _make_owned(self, groups: Sequence[ParamGroup], device: torch.device) -> None:
        """Make the owned matrices, by the engine's index, and put them into groups."""
        group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        sources = [
            (place, part)
            for place, item in enumerate(self._stored)
            for part in range(len(item.split.matrices))
        ]
        for index in sorted(self._engine.owned):
            place, _ = sources[index]
            param = self._params[place]
            shape: tuple[int, ...] = self._engine.shapes[index]
            if len(self._stored[place].split.matrices) == 1 and param.dim() != 2:
                # travels as a matrix, steps in its own number of dimensions
                shape = (-1, *param.shape[1:])
            whole = torch.zeros(self._engine.shapes[index], device=device).view(shape)
            self.owned[index] = torch.nn.Parameter(whole)
            self._source[self.owned[index]] = sources[index]
            self._own_groups[group_of[param]]["params"].append(self.owned[index])

    def _receive(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Wait until all gradients of this owner are here; the engine's callback."""
        self._arrived.append((stack, matrices))
        if sum(len(indices) for _, indices in self._arrived) == len(self.owned):
            self._when_all_arrived()

    def _each_arrived(self) -> Iterator[tuple[Tensor, torch.nn.Parameter]]:
        for stack, indices in self._arrived:
            for matrix, index in zip(stack, indices, strict=True):
                yield matrix, self.owned[index]

    def _adopt_values(self) -> None:
        for matrix, param in self._each_arrived():
            param.data.copy_(matrix.view_as(param))

    def _step_owned(self) -> None:
        for matrix, param in self._each_arrived():
            param.grad = matrix.view_as(param)
        self._bound().step()
        for matrix, param in self._each_arrived():
            param.grad = None
            matrix.copy_(param.detach().view_as(matrix))

    def _bound(self) -> torch.optim.Optimizer:
        """Return the optimizer over the owned matrices, with the schedule's present numbers.

        Groups of its own keep what it counts there.
        """
        for own, group in zip(self._own_groups, self._groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        return bind(self._optimizer, self._own_groups, self.owned_state)
