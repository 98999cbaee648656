"""Adaptive Muon on shards: momentum cut like the weights, statistics as each method needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, STEP, TpModeT
from megatron_eopt.math.moments import correction
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.adaptive import (
    Coefficients,
    NorMuonRule,
    Rule,
    Served,
    empty_statistics,
    make_rule,
    matrix_shapes,
)
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.elementwise import apply_updates_, decay, directions
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.stored import PlacedParameter
from megatron_eopt.storage.composite import ParamGroup, State

__all__ = ["AdaptivePart"]

MOMENT2 = "moment2_buffer"


class AdaptivePart:
    """Steps a ``TensorParallelAdaptiveMuon`` on shards.

    AdaMuon's second moments are stored like the weights; NorMuon's and NAMO's are few numbers and
    lie on all ranks.

    Args:
        optimizer: Has the settings; its parameters and state are not used.
        stored: How the group stores each of its parameters.
        params: The parameters, in the order of ``stored``.
        group: The ranks; None for one.
        device: Where the shards live.
        mode: Where the work happens.
    """

    needs_matrices = True
    owned_state: State | None = None

    def __init__(
        self,
        optimizer: TensorParallelAdaptiveMuon,
        stored: Sequence[PlacedParameter],
        params: Sequence[Tensor],
        group: torch.distributed.ProcessGroup | None,
        device: torch.device,
        mode: TpModeT,
    ) -> None:
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        self._params = list(params)
        self._shards: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        engine = MatrixEngine(stored, self._update, group, mode=mode, device=device)
        served = Served(engine, (), tuple(stored), group, device, blockwise=False)
        self._engine = engine
        self._rule: Rule = make_rule(optimizer.moment2_method, served, optimizer.orthogonalization)
        self._shapes = [matrix_shapes(item, served.rank, False) for item in stored]

    @property
    def plan(self) -> Any:
        """What travels in a step, for its counts of bytes and calls."""
        return self._engine.plan

    @property
    def whole_keys(self) -> frozenset[str]:
        """State that is not cut like its parameter, whatever its shape."""
        return frozenset(() if self._optimizer.moment2_method == "adamuon" else (MOMENT2,))

    def attach(self, main_of: dict[Tensor, Tensor]) -> None:
        """Number this rank's shards in the engine's order."""
        self._shards = [main_of[param] for param in self._params]
        self._numbers = {id(shard): number for number, shard in enumerate(self._shards)}

    def refresh(self, groups: Sequence[ParamGroup]) -> None:
        """Nothing to take over: the shards are what is stepped."""

    def init_state(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make momenta and statistics exist."""
        method = self._optimizer.moment2_method
        for shard, shapes in zip(self._shards, self._shapes, strict=True):
            state[shard].setdefault(MOMENTUM, torch.zeros_like(shard))
            state[shard].setdefault(MOMENT2, empty_statistics(method, shard, shapes))
            if self._optimizer.bias_correction:
                state[shard].setdefault(STEP, torch.zeros(()))

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Nothing to set: the counters come with the states."""

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the shards of ``groups``; all ranks of the group must call this together."""
        # matrices that rest are in the plan too: they get zeros, and their statistics stay
        zeros = [torch.zeros_like(shard) for shard in self._shards]
        grads, found = list(zeros), list(zeros)
        moments: list[Tensor | None] = [None] * len(zeros)
        coefficients = [Coefficients(0.0, 1.0, 1.0)] * len(zeros)
        for group in groups:
            shards = group["params"]
            raw = [shard.grad for shard in shards]
            numbers = [self._numbers[id(shard)] for shard in shards]
            used = decay(
                shards,
                raw,
                group["lr"],
                group["weight_decay"],
                self._optimizer.weight_decay_method,
            )
            momenta = [state[shard][MOMENTUM] for shard in shards]
            mixed = directions(used, momenta, group["momentum"], self._optimizer.nesterov)
            for number, shard, grad, direction in zip(numbers, shards, raw, mixed, strict=True):
                grads[number], found[number] = grad, direction
                moments[number] = state[shard][MOMENT2]
                coefficients[number] = self._count(group, state[shard])
        filled = [
            torch.zeros_like(state[shard][MOMENT2]) if moment is None else moment
            for shard, moment in zip(self._shards, moments, strict=True)
        ]
        self._rule.begin(filled, grads, found, coefficients)
        updates = self._engine.updates(found)
        self._rule.finish(updates)
        for group in groups:
            mine = [updates[self._numbers[id(shard)]] for shard in group["params"]]
            apply_updates_(group["params"], mine, group["lr"])

    def complete(self, states: Sequence[dict[str, Any]]) -> None:
        """Make every rank's statistics complete; collective over the group.

        Args:
            states: State of every parameter, in the order of ``params``.
        """
        if isinstance(self._rule, NorMuonRule):
            self._rule.complete({n: state[MOMENT2] for n, state in enumerate(states)})

    def _count(self, group: ParamGroup, state: dict[str, Any]) -> Coefficients:
        corrected = self._optimizer.bias_correction
        if corrected:
            state[STEP] += 1
        step = float(state[STEP]) if corrected else 1
        divisor = correction(group["beta2"], step, corrected)
        return Coefficients(group["beta2"], group["eps"], divisor)

    def _update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        self._rule.update(stack, matrices, reduce, shape)
