"""Muon by windows of layers, whose updates can be computed before the gradient norm is known.

Note [Look ahead, then commit]
    Newton-Schulz, the expensive part, needs only a window's gradients and momenta, and writes to
    new tensors. So it can run while other gradients are still being reduced. Momenta and weights
    are written once the gradient norm is known, bit-equal to a step that did not look ahead. If
    gradients are clipped or have changed meanwhile, the updates are dropped and computed again.
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
    """Drives Muon window by window; see Note [Look ahead, then commit].

    ``windows`` has the window index of each shard; window 0 is updated first.
    """

    def __init__(
        self, optimizer: Any, shards: Sequence[Shard], means: Means, windows: Sequence[int]
    ) -> None:
        self.members = [
            [shard for shard, window in enumerate(windows) if window == number]
            for number in sorted(set(windows))
        ]
        super().__init__(optimizer, shards, means)
        # by window: updates and settings they depend on; parameters and their gradients' norms
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
        """Compute a window's updates from its gradients, without applying them; collective."""
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
        """Return the settings that directions depend on."""
        is_l2 = self.optimizer.weight_decay_method == "l2"
        return [(group["momentum"], is_l2 and group["weight_decay"]) for group in groups]

    def unchanged(self) -> Tensor | None:
        """Return, on the device, whether gradients equal those seen ahead; None if none were."""
        same = [
            torch.stack(_norms(params)) == torch.stack(norms)
            for params, norms in self._seen.values()
            if params
        ]
        return torch.cat(same).all() if same else None

    def forget(self) -> None:
        """Drop the updates that were computed ahead."""
        self._updates.clear()
        self._seen.clear()

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``, one window after another."""
        for window in range(len(self.engines)):
            self.step_window(window, groups, state)

    @torch.no_grad()
    def step_window(self, window: int, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of one window, with updates computed ahead if they are valid."""
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
        """Return the parameters of a window with gradients; make its engine the current one."""
        self.engine = self.engines[window]
        found = self._stepped(groups, state)
        return {number: found[number] for number in self.members[window] if number in found}


def _norms(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of gradients; nan, which equals nothing, for a missing gradient."""
    grads = [p.new_full((), torch.nan) if p.grad is None else p.grad for p in params]
    return list(torch._foreach_norm(grads)) if grads else []
