"""Muon by windows of layers, whose updates can be computed before the gradient norm is known.

Note [Look ahead, then commit]
    Newton-Schulz, the expensive part, needs only a window's gradients and momenta, and writes to
    new tensors. So it can run while other gradients are still being reduced. Momenta and weights
    are written once the gradient norm is known, bit-equal to a step that did not look ahead. If
    gradients are clipped, or what was read has changed meanwhile (also weights, with L2 weight
    decay), the updates are dropped and computed again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.optimizers.exchange import ExchangeConfig, MatrixExchange, ParamWithGrad
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.update_rule import ParamGroup, State
from megatron_eopt.storage.shard import ParamShard


class WindowedMuonRule(MuonRule):
    """Updates matrices by Muon, window by window; see Note [Look ahead, then commit].

    ``windows`` has the window index of each shard; window 0 is updated first.
    """

    def __init__(
        self,
        optimizer: Any,
        shards: Sequence[ParamShard],
        exchange_config: ExchangeConfig,
        windows: Sequence[int],
    ) -> None:
        self.members = [
            [shard for shard, window in enumerate(windows) if window == number]
            for number in sorted(set(windows))
        ]
        super().__init__(optimizer, shards, exchange_config)
        # by window: updates and settings they depend on; parameters and what was read of them
        self._updates: dict[int, tuple[dict[int, Tensor], list[Any]]] = {}
        self._seen: dict[int, tuple[list[ParamWithGrad], tuple[list[int], list[Tensor]]]] = {}

    def _exchanges(self, exchange_config: ExchangeConfig) -> list[MatrixExchange]:
        exchanges: list[MatrixExchange] = []
        for members in self.members:
            shards = [self.shards[number] for number in members]
            before = exchanges[-1] if exchanges else None
            exchanges.append(
                MatrixExchange(
                    shards, self._update, exchange_config, numbers=members, before=before
                )
            )
        return exchanges

    @torch.no_grad()
    def precompute(self, window: int, groups: Sequence[ParamGroup], state: State) -> None:
        """Compute a window's updates from its gradients, without applying them; collective."""
        # the norm is not known yet: if it asks for clipping, the updates are dropped
        self.scale_gradients(None)
        items = self._items_of(window, groups, state)
        read = list(items.values())
        self._seen[window] = read, self._read(read)
        updates: dict[int, Tensor] = {}

        def directions(
            members: Mapping[int, ParamWithGrad], _: Sequence[int], outs: Mapping[int, Tensor]
        ) -> Mapping[int, Tensor]:
            # the step may be skipped or computed again
            return self.look_ahead(members, outs)

        self.exchange.run(items, directions, lambda _, results: updates.update(results), keep=True)
        self._updates[window] = updates, self._settings(groups)

    def _settings(self, groups: Sequence[ParamGroup]) -> list[Any]:
        """Return the settings that directions depend on."""
        is_l2 = self.optimizer.weight_decay_method == "l2"
        return [(group["momentum"], is_l2 and group["weight_decay"]) for group in groups]

    def _read(self, items: Sequence[ParamWithGrad]) -> tuple[list[int], list[Tensor]]:
        """Return versions and norms of the tensors that directions depend on.

        Versions count writes, but not those by ``tensor.data``. Gradients have none of their own,
        because they are views of a buffer that also gets other gradients.
        """
        params = [item.param for item in items]
        # nan for a gradient that is gone, because it is unequal to every norm
        grads = [p.new_full((), torch.nan) if p.grad is None else p.grad for p in params]
        tensors = [item.state[MOMENTUM] for item in items]
        if self.optimizer.weight_decay_method == "l2":
            tensors += params
        norms = list(torch._foreach_norm([*grads, *tensors])) if items else []
        return [tensor._version for tensor in tensors], norms

    def unchanged(self) -> Tensor | None:
        """Return, on the device, whether what was read ahead is the same; None if nothing was."""
        same = []
        for items, (versions, norms) in self._seen.values():
            if items:
                versions_now, norms_now = self._read(items)
                equal = torch.stack(norms_now) == torch.stack(norms)
                same.append(equal.all() & (versions_now == versions))
        return torch.stack(same).all() if same else None

    def forget(self) -> None:
        """Drop the updates that were computed ahead."""
        self._updates.clear()
        self._seen.clear()

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``, one window after another."""
        for window in range(len(self.exchanges)):
            self.step_window(window, groups, state)

    @torch.no_grad()
    def step_window(self, window: int, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of one window, with updates computed ahead if they are valid."""
        items = self._items_of(window, groups, state)
        updates, settings = self._updates.pop(window, ({}, None))
        self._seen.pop(window, None)
        if settings != self._settings(groups):
            self._run(items, groups)
            return
        momenta = {number: item.state[MOMENTUM] for number, item in items.items()}
        # only for the momenta: without Nesterov, no direction is written
        self._momentum_update(items, momenta, None, nesterov=False)
        self._apply(list(items.values()), updates)

    def _items_of(
        self, window: int, groups: Sequence[ParamGroup], state: State
    ) -> dict[int, ParamWithGrad]:
        """Return the parameters of a window with gradients; make its exchange the current one."""
        self.exchange = self.exchanges[window]
        items = self.with_grads(groups, state)
        return {number: items[number] for number in self.members[window] if number in items}
