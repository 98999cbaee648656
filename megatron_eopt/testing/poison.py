"""Overwrites memory that an update rule must not use any more, so that late reads are noticed."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.base.address import address_of
from megatron_eopt.cpu.patches import Patch
from megatron_eopt.layouts import Redistribution
from megatron_eopt.optimizers import update_rule, whole_matrix_rule
from megatron_eopt.optimizers.host_memory import HostMemory
from megatron_eopt.optimizers.matrix_sums_rule import MatrixSumsRule

# Memory that must not be used any more


class PoisonedHost(HostMemory):
    """Lets an update rule see no values in host memory during a step, where it is to fetch them."""

    def __init__(self, *args: Any) -> None:
        self._in_step = False
        self._true: dict[Tensor, list[tuple[Tensor, Tensor]]] = {}
        super().__init__(*args)

    def announce(self, params: Iterable[Tensor], state: Any) -> None:
        """Start to copy what will be fetched."""
        params = list(params)
        self._restore(params)
        super().announce(params, state)

    def write_back(self, params: Iterable[Tensor], state: Any) -> None:
        """Move weights and state back to the host."""
        params = list(self.params.intersection(params))
        used = [value for param in params for _, value in self._tensors(param, state)]
        super().write_back(params, state)
        _poison(used)
        for param in params:
            homes = [home for _, home in self._tensors(param, state)]
            self._true[param] = [(home, home.clone()) for home in homes]
            _poison(homes)

    def wait_for_write_back(self) -> None:
        """Wait until the host can read what was written back."""
        super().wait_for_write_back()
        if not self._in_step:
            self._restore(list(self._true))

    def during(self, step: Callable[..., None], *args: Any) -> None:
        """Take a step of the update rule."""
        self._in_step = True
        try:
            step(*args)
        finally:
            self._in_step = False
            self.wait_for_write_back()

    def _restore(self, params: Iterable[Tensor]) -> None:
        for param in params:
            for home, value in self._true.pop(param, ()):
                home.copy_(value)


def _poison(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a collective may hang, or add up different parameters."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.name.startswith("c10d::"):
            text = (
                "%s while updates are stored, which ranks do in another order; see MatrixSumsRule"
            )
            raise RuntimeError(text % func._schema.name)
        return func(*args, **(kwargs or {}))


_plain_run = Redistribution.run


def _poisoned_run(self: Redistribution, load: Any, compute: Any, store: Any, *rest: Any) -> None:
    def store_and_poison(results: Mapping[str, Tensor]) -> None:
        with _NoCollectives():  # type: ignore[no-untyped-call]
            store(results)
        for name, result in results.items():
            place = self.place(name)
            if place is not None and address_of(place) == address_of(result):
                _poison([result])

    _plain_run(self, load, compute, store_and_poison, *rest)
    _poison(self.buffers.values())


_plain_apply_with_totals = MatrixSumsRule._apply_with_totals


def _watched_apply_with_totals(self: MatrixSumsRule, *args: Any) -> None:
    with _NoCollectives():  # type: ignore[no-untyped-call]
        _plain_apply_with_totals(self, *args)


PATCHES = [
    Patch(update_rule, "HostMemory", PoisonedHost),
    Patch(whole_matrix_rule, "HostMemory", PoisonedHost),
    Patch(Redistribution, "run", _poisoned_run),
    Patch(MatrixSumsRule, "_apply_with_totals", _watched_apply_with_totals),
]
"""With them, each step overwrites what must not be used any more."""
