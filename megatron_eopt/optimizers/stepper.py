"""One optimizer of a chain: a storage, and the drivers that update what it stores."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from megatron_eopt.optimizers.driver import CompositeOptimizer, Driver, ParamGroup, State
from megatron_eopt.storage.interface import Storage


@dataclass(frozen=True, eq=False)
class Stepper:
    """A storage with its drivers."""

    storage: Storage
    drivers: Sequence[Driver] = ()
    params: Sequence[Sequence[Tensor]] = ()  # each driver's model parameters, in shard order

    def groups_of(self, driver: Driver) -> list[ParamGroup]:
        """Return the parameter groups that a driver updates, as schedulers see them."""
        optimizer = self.storage.optimizer
        if isinstance(optimizer, CompositeOptimizer):
            return optimizer.groups_of(driver)
        groups: list[ParamGroup] = optimizer.param_groups
        return groups

    def groups_and_state(
        self, driver: Driver
    ) -> AbstractContextManager[tuple[list[ParamGroup], State]]:
        """Provide what a driver works on: groups of this rank's tensors, and their state."""
        optimizer = self.storage.optimizer
        if isinstance(optimizer, CompositeOptimizer):
            return optimizer.groups_and_state(driver)
        return nullcontext((optimizer.param_groups, optimizer.state))

    def stepped(self) -> Iterator[tuple[Driver, int, Tensor]]:
        """Yield every tensor of the parameter groups, with its driver and shard index."""
        for driver in self.drivers:
            for _, main, number in driver.numbered(self.groups_of(driver)):
                yield driver, number, main
