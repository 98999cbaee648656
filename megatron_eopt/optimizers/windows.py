"""Muon in windows of layers, which may be computed before a step is known to happen.

Note [Look ahead, then commit]
    What is expensive, Newton-Schulz, needs a window's gradients and momenta and nothing else, and
    writes to new tensors. So it may run while other gradients are still reduced, before the norm of
    all of them is known. What is cheap, momenta and weights, is written once it is known, in the
    bits of a step that had not looked ahead. Where gradients turn out to be clipped, or to have
    changed meanwhile, the updates are dropped and computed again; nothing has to be taken back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.optimizers.driver import ParamGroup, State
from megatron_eopt.optimizers.engine import MatrixEngine, Means
from megatron_eopt.optimizers.muon_driver import MuonDriver, Stepped
from megatron_eopt.storage.shard import Shard


class WindowedMuonDriver(MuonDriver):
    """Steps Muon window by window; see Note [Look ahead, then commit].

    ``windows`` has the number of each shard's window, from 0 on in the order of steps.
    """

    def __init__(
        self, optimizer: Any, shards: Sequence[Shard], means: Means, windows: Sequence[int]
    ) -> None:
        self.members = [
            [shard for shard, window in enumerate(windows) if window == number]
            for number in sorted(set(windows))
        ]
        super().__init__(optimizer, shards, means)
        # what looking ahead found: updates by which settings, and the gradients' norms
        self._updates: dict[int, tuple[dict[int, Tensor], list[Any]]] = {}
        self._seen: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def _engines(self, means: Means) -> list[MatrixEngine]:
        engines: list[MatrixEngine] = []
        for members in self.members:
            shards = [self.shards[number] for number in members]
            before = engines[-1] if engines else None
            engines.append(MatrixEngine(shards, self._update, means, before=before))
        return engines

    @torch.no_grad()
    def look_ahead(self, window: int, groups: Sequence[ParamGroup], state: State) -> None:
        """Compute a window's updates from the gradients there are; collective, writes nothing."""
        self.coefficient = None
        stepped = self._stepped_in(window, groups, state)
        params = [item.param for item in stepped.values()]
        self._seen[window] = (params, _norms(params))
        updates: dict[int, Tensor] = {}

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            numbers = {name: self._numbers[name] for name in names}
            mine = {n: stepped[n] for n in numbers.values() if n in stepped}
            momenta = {n: item.state[MOMENTUM].clone() for n, item in mine.items()}
            found = self._mixed(mine, momenta, self.optimizer.nesterov, self._dtype)
            return {name: self._input(n, found) for name, n in numbers.items()}

        def store(results: Mapping[str, Tensor]) -> None:
            updates.update({self._numbers[name]: update for name, update in results.items()})

        self.engine.run(load, store)
        self._updates[window] = updates, self._settings(groups)

    def _settings(self, groups: Sequence[ParamGroup]) -> list[Any]:
        """Return what directions depend on beside gradients and momenta."""
        is_l2 = self.optimizer.weight_decay_method == "l2"
        return [(group["momentum"], is_l2 and group["weight_decay"]) for group in groups]

    def unchanged(self) -> Tensor | None:
        """Return whether all gradients are those that were looked at, on the device."""
        same = [
            torch.stack(_norms(params)) == torch.stack(norms)
            for params, norms in self._seen.values()
            if params
        ]
        return torch.cat(same).all() if same else None

    def forget(self) -> None:
        """Drop what was computed ahead."""
        self._updates.clear()
        self._seen.clear()

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``, one window after another."""
        for window in range(len(self.engines)):
            self.step_window(window, groups, state)

    @torch.no_grad()
    def step_window(self, window: int, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of one window, by what was computed ahead if there is such."""
        stepped = self._stepped_in(window, groups, state)
        updates, settings = self._updates.pop(window, ({}, None))
        self._seen.pop(window, None)
        if settings != self._settings(groups):
            self._run(stepped, state)
            return
        momenta = {number: item.state[MOMENTUM] for number, item in stepped.items()}
        self._mixed(stepped, momenta, nesterov=False)
        self._apply(list(stepped.values()), updates)

    def _stepped_in(
        self, window: int, groups: Sequence[ParamGroup], state: State
    ) -> dict[int, Stepped]:
        """Return what of a window steps, and let its engine be the present one."""
        self.engine = self.engines[window]
        found = self._stepped(groups, state)
        return {number: found[number] for number in self.members[window] if number in found}


def _norms(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of gradients; that of none is nan, which equals nothing."""
    grads = [p.new_full((), torch.nan) if p.grad is None else p.grad for p in params]
    return list(torch._foreach_norm(grads)) if grads else []
